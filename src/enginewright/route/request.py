"""A request as replicas get it, and their complete answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import httpx2

from enginewright.route.replica import Replica
from enginewright.runtime.server.errors import Headers

# Headers that are about one connection, or that the proxy's own client and server write. A client that asks for a
# compressed answer gets a plain one, as from a replica.
NOT_PASSED = frozenset(
    (
        *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te"),
        *(b"trailer", b"transfer-encoding", b"upgrade", b"expect", b"host", b"content-length", b"content-encoding"),
        *(b"accept-encoding", b"date", b"server", b"x-request-id"),
    )
)


@dataclass(frozen=True)
class RoutedRequest:
    """A request as it is sent to replicas."""

    route: str  # path of its route
    method: str  # HTTP method
    target: bytes  # path and query as they were received
    headers: list[tuple[bytes, bytes]]  # headers that are passed on
    body: bytes | None = None  # body without encoding; None for methods without one
    keys: Sequence[bytes] = ()  # keys of its prompt
    session: bytes | None = None  # key of its session; None: it names none
    # the request without parameters that the proxy has added to its body; None if it is as the client sent it
    original: "RoutedRequest | None" = None

    def to(self, replica: Replica) -> httpx2.Request:
        """The request to a replica."""
        return replica.request(self.method, self.target, self.headers, self.body)


class Answer(NamedTuple):
    """A complete answer of a replica."""

    status: int  # HTTP status
    headers: Headers  # headers that are passed on
    body: bytes  # body


def passed_headers(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers that are passed on: not those of the connection, nor those that Connection names."""
    lower = [(name.lower(), value) for name, value in headers]
    named = b",".join(value for name, value in lower if name == b"connection").lower()
    dropped = NOT_PASSED.union(part.strip() for part in named.split(b","))
    return [(name, value) for name, value in lower if name not in dropped]
