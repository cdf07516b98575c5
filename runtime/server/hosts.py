"""Checks the Host header against the server's names, as a defence against DNS rebinding.

A web page cannot read from another site. But its own name may be pointed at 127.0.0.1 once it has been loaded; then the
browser takes a server on the reader's machine for the page's own site. Only the Host header still has the page's name.
"""

import re
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.types import Scope

from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.wire import header

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
NAME = r"[a-z0-9._-]+|\[[0-9a-f:.]+\]"  # host in lower case; IPv6 addresses in brackets
HEADER = re.compile(rf"({NAME})(:[0-9]*)?".encode())


def host_name(text: str) -> str:
    """Converts a host to the form of a Host header without port: lower case, IPv6 addresses in brackets."""
    text = text.lower()
    return f"[{text}]" if ":" in text and not text.startswith("[") else text


def is_host(text: str) -> bool:
    """True if a text is a host name or an address, without scheme and port."""
    return re.fullmatch(NAME, host_name(text)) is not None


class HostCheck:
    """Refuses requests to names that are not this server's.

    Args:
        address: the address that the server listens at. If it is not a loopback address and no names are allowed,
            nothing
            is checked, since the names of the machine are not known.
        host: the host that the server was started with.
        allowed: further names, without ports.
    """

    def __init__(self, address: str, host: str, allowed: Sequence[str]) -> None:
        self._names: frozenset[bytes] | None = None
        if allowed or ip_address(address).is_loopback:
            names = (*LOOPBACK_NAMES, *map(host_name, (address, host, *allowed)))
            self._names = frozenset(name.encode() for name in names)

    def check(self, scope: Scope) -> None:
        """Checks the header as it was sent.

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
