"""The settings of a process that serves HTTP, and the rules that settings are checked by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from enginewright.errors import UsageError
from enginewright.runtime.server.hosts import is_host


class Rule(NamedTuple):
    """A rule for a value."""

    holds: Callable[[Any], object]  # condition; it may raise an error of its own
    why: str = ""  # the rule in words
    fix: str = ""  # advice


SECONDS = Rule(lambda value: 0 <= value < float("inf"), "it must be a number of seconds, 0 or more")
AT_LEAST_0 = Rule(lambda value: value >= 0, "it must be 0 or more")
AT_LEAST_1 = Rule(lambda value: value >= 1, "it must be at least 1")


def check_rules(settings: object, rules: Mapping[str, Rule], rules_of_each: Mapping[str, Rule]) -> None:
    """Checks settings.

    Args:
        settings: the object that has them.
        rules: rule of a field by its name; a field that is None is not checked.
        rules_of_each: rule of each value of a field that is a tuple, by the field's name.

    Raises:
        UsageError: a value breaks its rule.
    """
    for name, rule in rules.items():
        value = getattr(settings, name)
        if value is not None and not rule.holds(value):
            raise UsageError(f"{name} is {value!r}", rule.why, rule.fix)
    for name, rule in rules_of_each.items():
        for value in getattr(settings, name):
            if not rule.holds(value):
                raise UsageError(f"{name} has {value!r}", rule.why, rule.fix)


@dataclass(frozen=True, kw_only=True)
class HostingConfig:
    """Settings of a process that serves HTTP, whatever it answers.

    Raises:
        UsageError: a value is not valid.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # TCP port; 0 chooses a free one
    drain_seconds: float = 30.0  # seconds that running requests may take to end after the signal to stop
    max_body_bytes: int = 8 << 20  # maximum size of a request's body, in bytes
    # maximum number of connections; None is up to 4096, within the limit of open files
    max_connections: int | None = None
    ssl_certfile: str | Path | None = None  # PEM file of the certificate with its chain; None means no TLS
    ssl_keyfile: str | Path | None = None  # PEM file of the key; None means that it is in ssl_certfile
    # names in the Host header that are accepted like the server's own, without ports
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_rules(self, _RULES, _RULES_OF_EACH)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile needs ssl_certfile", "a key without a certificate is no identity")


_RULES: Mapping[str, Rule] = {
    "port": Rule(lambda port: 0 <= port <= 65535, "it must be between 0 and 65535"),
    "drain_seconds": SECONDS,
    "max_body_bytes": AT_LEAST_1,
    "max_connections": AT_LEAST_1,
}
_RULES_OF_EACH: Mapping[str, Rule] = {
    "allowed_hosts": Rule(is_host, "it must be a host without scheme and port"),
}
