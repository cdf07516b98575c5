"""The names under which clients may reach a server: the defence against DNS rebinding.

A web page cannot read from another site. But its own name may be pointed at 127.0.0.1 once it has been loaded; then the
browser takes a server on the reader's machine for the page's own site. Only the Host header still says the page's name.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import Scope

from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
NAME = r"[a-z0-9._-]+|\[[0-9a-f:.]+\]"  # of a host, in lower case; IPv6 addresses in brackets
HEADER = re.compile(rf"({NAME})(:[0-9]*)?".encode())


def host_name(text: str) -> str:
    """A host as a Host header has it, without its port: in lower case, IPv6 addresses in brackets."""
    text = text.lower()
    return f"[{text}]" if ":" in text and not text.startswith("[") else text


def is_host(text: str) -> bool:
    """Whether it is a name or an address, without scheme and port."""
    return re.fullmatch(NAME, host_name(text)) is not None


class HostCheck:
    """Refuses requests to names that are not this server's.

    Args:
        address: that the server listens at. Where it is not a loopback address and none is allowed by name, there is
            nothing to check: its names are not known here.
        host: as the server was told to bind it.
        allowed: more names, without ports.
    """

    def __init__(self, address: str, host: str, allowed: Sequence[str]) -> None:
        self._names: frozenset[bytes] | None = None
        if allowed or ip_address(address).is_loopback:
            names = (*LOOPBACK_NAMES, *map(host_name, (address, host, *allowed)))
            self._names = frozenset(name.encode() for name in names)

    def check(self, scope: Scope) -> None:
        """Compare the header as it came over the wire.

        Raises:
            ApiError: 403, there is no Host header, more than one, or one that is not allowed.
        """
        if self._names is None:
            return
        values = header(scope, b"host")
        found = HEADER.fullmatch(values[0].lower()) if len(values) == 1 else None
        if found is None or found[1] not in self._names:
            raise ApiError(
                403,
                "the Host header names none of this server's names; --allowed-host of the server adds one",
                code="host_not_allowed",
            )
