"""A hub of our own on this machine: the part of its HTTP interface that huggingface_hub uses."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """One repository, owner/Tiny or the data set owner/Texts, and a record of the files fetched from it."""

    endpoint: str
    files: dict[str, bytes] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    refusal: tuple[int, str] | None = None  # status, and the hub's name for the error

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if self.refusal:
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b""
        match path.strip("/").split("/"):
            case ["api", "models", "owner", "Tiny", *rest] | ["api", "datasets", "owner", "Texts", *rest]:
                if rest and rest[:1] in (["revision"], ["tree"]) and rest[1] not in ("main", COMMIT):
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b""
                if rest and rest[0] == "tree":
                    tree = [
                        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                        for name, content in self.files.items()
                    ]
                    return 200, {}, json.dumps(tree).encode()
                info = {"id": "owner/Tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.files]}
                return 200, {}, json.dumps(info).encode()
            case ["owner", "Tiny", "resolve", _, *name] | ["datasets", "owner", "Texts", "resolve", _, *name] if (
                "/".join(name) in self.files
            ):
                content = self.files["/".join(name)]
                if method == "GET":
                    self.fetched.append("/".join(name))
                return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b""


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Hub]:
    """Runs a hub within the context."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = served.answer(self.command, unquote(urlsplit(self.path).path))
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_port}", dict(files))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
