"""The page at /, as HTTP has it; tests/long/test_page.py is about what it does in a browser."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import urljoin

from tests.helpers.serving import Running, running

ROOT = Path(__file__).parents[2]
FILES = [path for path in sorted((ROOT / "runtime/server/page").iterdir()) if path.suffix not in (".py", "")]
MAX_BYTES = 80_000  # of all of them
SERVER = {"api_keys": ("key",)}


def path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


def test_each_file_is_served_without_a_key(server: Running) -> None:
    for file in FILES:
        answer = server.ask("GET", path_of(file))
        assert (answer.status, answer.body) == (200, file.read_bytes()), file
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        policy = dict(part.partition(" ")[::2] for part in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
    assert server.ask("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.ask("GET", "/page/main.js").headers["content-type"] == "text/javascript; charset=utf-8"
    assert server.ask("GET", "/?from=bookmark").status == 200


def test_all_else_wants_the_key(server: Running) -> None:
    near = ("/page", "/page/", "/page/routes.py", "/page/__init__.py", "/page/../metrics", "/page/index.html")
    for path in (*near, "/v1/models", "/metrics"):
        assert server.ask("GET", path).status == 401
        assert server.ask("GET", path, headers={"X-Api-Key": "key"}).status == (404 if path in near else 200)


def test_a_browser_that_has_a_file_gets_no_other(server: Running) -> None:
    first = server.ask("GET", "/")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache" and tag != server.ask("GET", "/page/main.js").headers["etag"]
    for known in (tag, f"W/{tag}", f'"other", {tag}'):
        again = server.ask("GET", "/", headers={"If-None-Match": known})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
    assert server.ask("GET", "/", headers={"If-None-Match": '"other"'}).body == first.body


def test_methods(server: Running) -> None:
    whole, head = server.ask("GET", "/"), server.ask("HEAD", "/")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"] == str(len(whole.body))
    refused = server.ask("POST", "/", {})
    assert refused.status == 405 and refused.error["message"] == "there is no POST of this route"


def test_it_can_be_switched_off() -> None:
    with running(page=False, api_keys=("key",)) as server:
        assert server.ask("GET", "/").status == 401
        for path in map(path_of, FILES):
            assert server.ask("GET", path, headers={"X-Api-Key": "key"}).error["message"] == "there is no such route"


def test_the_files_name_nothing_that_is_elsewhere() -> None:
    texts = {path_of(file): file.read_text() for file in FILES}
    assert sum(map(len, texts.values())) < MAX_BYTES
    found = set()
    for path, text in texts.items():
        urls = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\"'\s]*", text)
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", text), path
        # Relative, so that a proxy may have the server below any path.
        named = re.findall(r'(?:from|src=|href=|ask\() ?"([^"#]+)"', text)
        assert not [one for one in named if one.startswith("/")], path
        found |= {urljoin(path, one) for one in named if not re.match("v1/|metrics$", one)}
    assert found == texts.keys() - {"/"}
    assert "style=" not in texts["/"] and "<script>" not in texts["/"]


def test_the_wheel_has_every_file() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["enginewright.runtime.server.page"]
    assert FILES and [file for file in FILES if not any(fnmatch(file.name, one) for one in patterns)] == []
