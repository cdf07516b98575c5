"""CORS: lets web pages of chosen other sites use the server from a browser.

A browser sends the site of a page in the Origin header. Without these headers in the response, it hides the response
from the page.
Source: the Fetch standard, fetch.spec.whatwg.org.
"""

import re
from collections.abc import Awaitable, Sequence

from starlette.types import Message, Scope, Send

from enginewright.runtime.server.errors import Headers
from enginewright.runtime.server.wire import header

ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")  # as browsers send it
NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{1,1000}", re.ASCII)  # a list of header names
MAX_AGE_S = b"600"  # seconds for which a browser may cache the permission


class Cors:
    """CORS headers for the pages of some origins.

    Args:
        origins: the origins: scheme, host, and a port that is not the scheme's default.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def _origin(self, scope: Scope) -> bytes | None:
        """The allowed origin of the page that sent a request; None if there is none."""
        found = header(scope, b"origin")
        return found[0] if len(found) == 1 and found[0] in self._origins else None

    def permission(self, scope: Scope) -> Headers | None:
        """Headers that answer a preflight request; None if the request is none, or its origin is not allowed.

        A browser sends no API key with a preflight, so it is answered without one, and only with these headers.
        """
        method = header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or not method or self._origin(scope) is None:
            return None
        wanted = header(scope, b"access-control-request-headers")
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-max-age", MAX_AGE_S),
        ]
        if len(wanted) == 1 and NAMES.fullmatch(wanted[0]):  # clients send many headers of their own
            headers.append((b"access-control-allow-headers", wanted[0]))
        if header(scope, b"access-control-request-private-network") == [b"true"]:
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def with_headers_in(self, scope: Scope, send: Send) -> Send:
        """Wraps `send` to add the headers that let the page read the response."""
        if not self._origins:
            return send
        mine: Headers = [(b"vary", b"Origin")]
        if (origin := self._origin(scope)) is not None:
            mine = [
                *mine,
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"X-Request-Id, X-Enginewright-Warning, Retry-After"),
            ]

        def with_headers(message: Message) -> Awaitable[None]:  # a plain function saves a coroutine per message
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *mine]}
            return send(message)

        return with_headers
