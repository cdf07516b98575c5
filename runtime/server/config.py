"""The settings of a server."""

import re
from dataclasses import dataclass
from pathlib import Path

from enginewright.errors import UsageError
from enginewright.runtime.server.cors import ORIGIN
from enginewright.runtime.server.hosts import is_host
from enginewright.runtime.text.messages.formats import call_format

METRICS_COMPAT = ("vllm",)


@dataclass(frozen=True)
class ServerConfig:
    """Limits of requests. Those of the engine are in RuntimeConfig.

    Raises:
        UsageError: a value makes no sense.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 takes a free one
    served_model_names: tuple[str, ...] = ()  # what clients may call the model; empty: the engine's own name
    api_keys: tuple[str, ...] = ()  # with any, every route but /health and the page wants one of them
    page: bool = True  # whether there is a page at /
    drain_seconds: float = 30.0  # how long requests may go on after the signal to stop
    max_num_waiting: int = 1024  # completions that wait for their first token, beyond the batch
    max_waiting_tokens: int = 262_144  # of all prompts that wait
    max_body_bytes: int = 8 << 20  # of one request
    strict_keys: bool = False  # whether what nothing uses of a request is refused, and not named in a warning
    max_logprobs_memory: int = 1 << 30  # bytes that the log-probabilities of all running requests may take
    responses_store: int = 1000  # responses that are kept for GET /v1/responses/{id} and for those that follow them
    responses_memory: int = 256 << 20  # bytes that these may take
    max_connections: int | None = None  # None: as many as the limit of open files allows, up to a few thousand
    step_timeout: float = 60.0  # seconds of one step of the engine after which it counts as stalled; 0: never
    tool_call_parser: str | None = None  # name of a CallFormat; None: the one that the chat template tells
    memory: int | None = None  # bytes that open engines may take together; None: what the machine has free
    idle_seconds: float | None = None  # after which an engine that nobody uses is closed; None: never
    allowed_origins: tuple[str, ...] = ()  # of web pages of other sites that may use the server, as browsers say them
    ssl_certfile: str | Path | None = None  # PEM, with the chain; None: no TLS
    ssl_keyfile: str | Path | None = None  # PEM; None: the key is in ssl_certfile
    metrics_compat: str | None = None  # of METRICS_COMPAT: whose names /metrics has beside ours
    otlp_traces_endpoint: str | None = None  # URL of a collector of OpenTelemetry's; None: no traces
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header, beside the server's own; no ports

    @property
    def on_demand(self) -> bool:
        """Whether also a single engine is opened when a request wants it, and not at the start."""
        return self.memory is not None or self.idle_seconds is not None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}", "it must be between 0 and 65535")
        for name in ("drain_seconds", "step_timeout", "idle_seconds"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be a number of seconds, 0 or more")
        for name in (
            "max_num_waiting",
            "max_waiting_tokens",
            "max_body_bytes",
            "max_logprobs_memory",
            "responses_memory",
            "max_connections",
            "memory",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", "it must be at least 1")
        if self.responses_store < 0:
            raise UsageError(f"responses_store is {self.responses_store}", "it must be 0 or more")
        if self.metrics_compat not in (None, *METRICS_COMPAT):
            raise UsageError(f"metrics_compat is {self.metrics_compat!r}", f"it must be {', '.join(METRICS_COMPAT)}")
        if self.otlp_traces_endpoint is not None and not re.match(r"https?://[^/]+/", self.otlp_traces_endpoint):
            why = "it must be a URL with its path, such as http://127.0.0.1:4318/v1/traces"
            raise UsageError(f"otlp_traces_endpoint is {self.otlp_traces_endpoint!r}", why)
        if self.tool_call_parser is not None:
            call_format(self.tool_call_parser)
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise UsageError(
                    f"allowed_origins has {origin!r}",
                    "it must be what browsers send: scheme, host in lower case, and a port if it is not the usual one",
                    "Name each site, such as https://chat.example.com: * would let any web page use the server.",
                )
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("ssl_keyfile is there without ssl_certfile", "a key alone is no identity")
        for name in self.allowed_hosts:
            if not is_host(name):
                raise UsageError(f"allowed_hosts has {name!r}", "it must be a host alone, without scheme and port")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise UsageError("an API key is empty or cannot be sent", "it must be printable ASCII without outer spaces")
        if not all(name.isprintable() and name for name in self.served_model_names):
            raise UsageError("a served model name is empty", "it must be printable characters")
