"""Serves the web page from memory, without an API key.

The page is the same for all readers and contains no secret, so it needs no key. Its data come from the API, with the
key that its reader types in.
"""

from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
KINDS = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# The page loads its own files, calls its own server, and is shown in no frame. No text becomes HTML: whatever a model
# writes, its answers run nothing.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "cache-control": "no-cache",  # cached, and checked by its ETag, so that a new version is used at once
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Asset:
    """A file of the page.

    Args:
        name: the name of the file in this package.
    """

    def __init__(self, name: str) -> None:
        self.path = "/" if name == INDEX else f"/page/{name}"
        self._content = (files(__package__) / name).read_bytes()
        self._headers = {
            **HEADERS,
            "content-type": KINDS[name.rpartition(".")[2]],
            "etag": f'"{sha256(self._content).hexdigest()[:32]}"',
        }

    async def __call__(self, request: Request) -> Response:
        """The file, or 304 if the browser has it already."""
        known = request.headers.get("if-none-match", "")
        if self._headers["etag"] in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


class Page:
    """All files of the page.

    Attributes:
        paths: the paths of its routes, as clients send them.
        routes: the routes.
    """

    def __init__(self) -> None:
        names = sorted(file.name for file in files(__package__).iterdir() if file.name.rpartition(".")[2] in KINDS)
        assets = [Asset(name) for name in names]
        self.paths = frozenset(asset.path.encode() for asset in assets)
        self.routes = [Route(asset.path, asset.__call__) for asset in assets]
