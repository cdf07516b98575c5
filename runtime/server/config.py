"""The settings of a server."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from enginewright.errors import UsageError
from enginewright.runtime.server.cors import ORIGIN
from enginewright.runtime.server.hosts import is_host
from enginewright.runtime.text.messages.formats import call_format

METRICS_COMPAT = ("vllm",)
MAX_TENANT_CLASSES = 8  # different ones, since each is a value of a label of metrics


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server; those of the engines are in RuntimeConfig.

    Raises:
        UsageError: a value is not valid.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # TCP port; 0 chooses a free one
    served_model_names: tuple[str, ...] = ()  # names of the model in requests; empty means the engine's own name
    api_keys: tuple[str, ...] = ()  # accepted API keys; with any, every route except /health and the page requires one
    # class of each key's tenant in metrics, in the order of the keys; empty means that tenants have no classes
    tenant_classes: tuple[str, ...] = ()
    page: bool = True  # True serves the web page at /
    drain_seconds: float = 30.0  # seconds that running requests may take to end after the signal to stop
    max_num_waiting: int = 1024  # maximum number of completions that wait for their first token outside the batch
    max_waiting_tokens: int = 262_144  # maximum number of tokens of all waiting prompts
    max_body_bytes: int = 8 << 20  # maximum size of a request's body, in bytes
    strict_keys: bool = False  # True refuses keys of a request that are not used, False names them in a warning
    max_logprobs_memory: int = 1 << 30  # maximum bytes for log-probabilities of all running requests
    responses_store: int = 1000  # number of responses kept for GET /v1/responses/{id} and previous_response_id
    responses_memory: int = 256 << 20  # maximum bytes of these responses
    # maximum number of connections; None is up to 4096, within the limit of open files
    max_connections: int | None = None
    step_timeout: float = 60.0  # seconds after which a step of the engine counts as stalled; 0 means never
    tool_call_parser: str | None = None  # name of a CallFormat; None detects it from the chat template
    memory: int | None = None  # bytes that open engines may take together; None is the machine's free memory
    idle_seconds: float | None = None  # seconds without requests after which an engine is closed; None means never
    # origins of web pages of other sites that may use the server, as browsers send them
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | Path | None = None  # PEM file of the certificate with its chain; None means no TLS
    ssl_keyfile: str | Path | None = None  # PEM file of the key; None means that it is in ssl_certfile
    metrics_compat: str | None = None  # one of METRICS_COMPAT, whose metric names /metrics has in addition to ours
    otlp_traces_endpoint: str | None = None  # URL of an OpenTelemetry collector; None means no traces
    # names in the Host header that are accepted like the server's own, without ports
    allowed_hosts: tuple[str, ...] = ()

    @property
    def on_demand(self) -> bool:
        """True if even a single engine is opened at its first request instead of at the start."""
        return self.memory is not None or self.idle_seconds is not None

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None and not rule.holds(value):
                raise UsageError(f"{name} is {value!r}", rule.why)
        for name, rule in _RULES_OF_EACH.items():
            for value in getattr(self, name):
                if not rule.holds(value):
                    raise UsageError(f"{name} has {value!r}", rule.why, rule.fix)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile needs ssl_certfile", "a key without a certificate is no identity")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise UsageError("an API key is empty or cannot be sent", "it must be printable ASCII without outer spaces")
        if self.tenant_classes and len(self.tenant_classes) != len(self.api_keys):
            raise UsageError(
                f"there are {len(self.tenant_classes)} tenant_classes and {len(self.api_keys)} API keys",
                "each key must have a class",
                "Name one class for each key, in the order of the keys; keys may have the same class.",
            )
        if (count := len(set(self.tenant_classes))) > MAX_TENANT_CLASSES:
            raise UsageError(f"there are {count} different tenant_classes", f"there may be {MAX_TENANT_CLASSES}")


def tenant_of(key: bytes | str) -> str:
    """The tenant of an API key, which is its hash, so that the key itself is kept nowhere else."""
    return sha256(key.encode() if isinstance(key, str) else key).hexdigest()


class _Rule(NamedTuple):
    """A rule for a value."""

    holds: Callable[[Any], object]  # condition; it may raise an error of its own
    why: str = ""  # the rule in words
    fix: str = ""  # advice


_SECONDS = _Rule(lambda value: 0 <= value < float("inf"), "it must be a number of seconds, 0 or more")
_AT_LEAST_1 = _Rule(lambda value: value >= 1, "it must be at least 1")
# Rules of fields that are not None.
_RULES: Mapping[str, _Rule] = {
    "port": _Rule(lambda port: 0 <= port <= 65535, "it must be between 0 and 65535"),
    "drain_seconds": _SECONDS,
    "max_num_waiting": _AT_LEAST_1,
    "max_waiting_tokens": _AT_LEAST_1,
    "max_body_bytes": _AT_LEAST_1,
    "max_logprobs_memory": _AT_LEAST_1,
    "responses_store": _Rule(lambda count: count >= 0, "it must be 0 or more"),
    "responses_memory": _AT_LEAST_1,
    "max_connections": _AT_LEAST_1,
    "step_timeout": _SECONDS,
    "tool_call_parser": _Rule(call_format),
    "memory": _AT_LEAST_1,
    "idle_seconds": _SECONDS,
    "metrics_compat": _Rule(METRICS_COMPAT.__contains__, f"it must be {', '.join(METRICS_COMPAT)}"),
    "otlp_traces_endpoint": _Rule(
        re.compile("https?://[^/]+/").match, "it must be a URL with its path, such as http://127.0.0.1:4318/v1/traces"
    ),
}
# Rules of each value of a tuple.
_RULES_OF_EACH: Mapping[str, _Rule] = {
    "served_model_names": _Rule(lambda name: name and name.isprintable(), "it must be printable characters"),
    "tenant_classes": _Rule(
        re.compile("[a-z][a-z0-9_-]{0,31}").fullmatch,
        "it must be 1 to 32 lower-case letters, digits, _ and -, and begin with a letter",
    ),
    "allowed_origins": _Rule(
        ORIGIN.fullmatch,
        "it must be as browsers send it: scheme, host in lower case, and any port that is not the default",
        "Name each site, such as https://chat.example.com: * would let any web page use the server.",
    ),
    "allowed_hosts": _Rule(is_host, "it must be a host without scheme and port"),
}
