"""CORS: which web pages of other sites may use the server from a browser.

A browser says with Origin what site a page is of. Without these headers in the response it shows the page nothing.
Source: the Fetch standard, fetch.spec.whatwg.org.
"""

import re
from collections.abc import Awaitable, Sequence

from starlette.types import Message, Scope, Send

from enginewright.runtime.server.errors import Headers
from enginewright.runtime.server.wire import header

ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")  # as browsers send it
NAMES = re.compile(rb"[\w!#$%&'*+.^`|~, -]{1,1000}", re.ASCII)  # of headers, in a list
MAX_AGE_S = b"600"  # for which a browser need not ask again


class Cors:
    """The pages that may use the server.

    Args:
        origins: of these pages: scheme, host, and a port that is not the scheme's own.
    """

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def _origin(self, scope: Scope) -> bytes | None:
        """Of the page that asks, if it may."""
        found = header(scope, b"origin")
        return found[0] if len(found) == 1 and found[0] in self._origins else None

    def permission(self, scope: Scope) -> Headers | None:
        """What a browser hears that asks before it sends a page's request; None: this is no such question.

        It sends no key with it, so it is answered without one; nothing else is said.
        """
        method = header(scope, b"access-control-request-method")
        if scope["method"] != "OPTIONS" or not method or self._origin(scope) is None:
            return None
        wanted = header(scope, b"access-control-request-headers")
        headers = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-max-age", MAX_AGE_S),
        ]
        if len(wanted) == 1 and NAMES.fullmatch(wanted[0]):  # clients have many of their own
            headers.append((b"access-control-allow-headers", wanted[0]))
        if header(scope, b"access-control-request-private-network") == [b"true"]:
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def returning(self, scope: Scope, send: Send) -> Send:
        """`send`, with the headers that let the page read the response, if it may."""
        if not self._origins:
            return send
        mine: Headers = [(b"vary", b"Origin")]
        if (origin := self._origin(scope)) is not None:
            mine = [
                *mine,
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"X-Request-Id, X-Enginewright-Warning, Retry-After"),
            ]

        def with_headers(message: Message) -> Awaitable[None]:  # no coroutine of its own, as in RequestLog
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *mine]}
            return send(message)

        return with_headers
