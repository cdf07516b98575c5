"""The settings of the proxy."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import httpx2

from enginewright.errors import UsageError
from enginewright.runtime.server.hosting_config import AT_LEAST_0, HostingConfig, check_rules


@dataclass(frozen=True)
class RouteConfig(HostingConfig):
    """Settings of the proxy.

    Raises:
        UsageError: a value is not valid.
    """

    replicas: tuple[str, ...]  # URLs of the replicas that answer: scheme, host and port
    _: KW_ONLY
    prefill: tuple[str, ...] = ()  # URLs of replicas that only compute prompts
    min_prefill_bytes: int = 2048  # bytes of a prompt, new to the replica that answers, from which another computes it
    port: int = 8080  # TCP port; 0 chooses a free one
    max_lead: int = 8  # requests that a replica may run beyond the least busy one, to reuse a prefix

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self, {"max_lead": AT_LEAST_0, "min_prefill_bytes": AT_LEAST_0}, {})
        if not self.replicas:
            raise UsageError("there is no replica that answers")
        urls = origins(self.replicas + self.prefill)
        if len(set(urls)) < len(urls):
            raise UsageError("the replicas must be different", f"there are {', '.join(map(str, urls))}")


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
