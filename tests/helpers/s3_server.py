"""A small S3 server with faults: objects by path in memory, and an answer of one's own instead of the right one.

The protocol itself is checked against another project's server, in tests/long/test_kv_store.py.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class S3Server:
    """The server.

    objects: contents by path. requests: method, path and headers of each request.
    fault: gets the socket in place of the right answer to a method; None: there is none.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.fault: Callable[[str, socket.socket], None] | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.requests.append((self.command, self.path, dict(self.headers)))
                if server.fault is not None:
                    self.close_connection = True
                    with suppress(OSError):  # the client has gone
                        server.fault(self.command, self.connection)
                    return
                if self.command == "PUT":
                    server.objects[self.path], body = body, b""
                content = body if self.command == "PUT" else server.objects.get(self.path)
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content or b"")

            do_GET = do_HEAD = do_PUT = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"s3://bucket/some/prefix?endpoint=http://127.0.0.1:{self.port}&region=eu-1"

    def run(self) -> None:
        self._server.serve_forever(0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Runs the server in a thread of its own."""
    server = S3Server()
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(30)


def answer(status: int, body: bytes = b"", *, length: int | None = None) -> Callable[[str, socket.socket], None]:
    """A fault that is an answer. length: the Content-Length that it claims."""
    size = len(body) if length is None else length

    def send(method: str, connection: socket.socket) -> None:
        head = b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, size)
        connection.sendall(head + (b"" if method == "HEAD" else body))

    return send
