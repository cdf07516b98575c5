"""The settings of the proxy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2

from enginewright.errors import UsageError


@dataclass(frozen=True)
class RouteConfig:
    """Settings of the proxy.

    Raises:
        UsageError: a value is not valid.
    """

    replicas: tuple[str, ...]  # URLs of the replicas: scheme, host and port
    host: str = "127.0.0.1"  # address to listen on
    port: int = 8080  # TCP port; 0 chooses a free one
    max_lead: int = 8  # requests that a replica may run beyond the least busy one, to reuse a prefix
    drain_seconds: float = 30.0  # seconds that running requests may take to end after the signal to stop
    max_body_bytes: int = 8 << 20  # maximum size of a request's body, in bytes
    # maximum number of connections of clients; None is up to 4096, within the limit of open files
    max_connections: int | None = None
    ssl_certfile: str | Path | None = None  # PEM file of the certificate with its chain; None means no TLS
    ssl_keyfile: str | Path | None = None  # PEM file of the key; None means that it is in ssl_certfile
    # names in the Host header that are accepted like the proxy's own, without ports
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        urls = origins(self.replicas)
        if len(set(urls)) < len(urls) or not urls:
            raise UsageError("the replicas must be different", f"there are {', '.join(map(str, urls)) or 'none'}")
        if self.max_lead < 0:
            raise UsageError(f"max_lead is {self.max_lead}", "it must be 0 or more")
        if not 0 <= self.drain_seconds < float("inf"):
            raise UsageError(f"drain_seconds is {self.drain_seconds}", "it must be a number of seconds, 0 or more")
        if self.max_connections is not None and self.max_connections < 1:
            raise UsageError(f"max_connections is {self.max_connections}", "it must be at least 1")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile needs ssl_certfile", "a key without a certificate is no identity")


def origins(urls: Sequence[str]) -> list[httpx2.URL]:
    """URLs of replicas without a path.

    Args:
        urls: the URLs as people write them; a path /v1, as `engine run` prints it, is accepted.

    Raises:
        UsageError: one is no URL, or has more than scheme, host and port.
    """
    found = []
    for text in urls:
        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL:
            url = httpx2.URL("")
        is_origin = url.scheme in ("http", "https") and url.host and (url.port is None or 0 < url.port <= 65535)
        if not is_origin or url.userinfo or url.query or url.fragment or url.path not in ("/", "/v1", "/v1/"):
            raise UsageError(
                f"{text!r} is no URL of a replica",
                "it must have a scheme, a host and a port, and no more",
                "Write it as http://10.0.0.5:8000. Clients send API keys to the proxy, which passes them on.",
            )
        found.append(httpx2.URL(scheme=url.scheme, host=url.host, port=url.port, path="/"))
    return found
