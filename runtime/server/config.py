"""The settings of a server."""

from dataclasses import dataclass

from enginewright.errors import UsageError
from enginewright.runtime.messages.formats import call_format
from enginewright.runtime.server.hosts import is_host


@dataclass(frozen=True)
class ServerConfig:
    """Limits of requests. Those of the engine are in RuntimeConfig.

    Raises:
        UsageError: a value makes no sense.
    """

    host: str = "127.0.0.1"  # address to listen on
    port: int = 8000  # 0 takes a free one
    served_model_names: tuple[str, ...] = ()  # what clients may call the model; empty: the engine's own name
    api_keys: tuple[str, ...] = ()  # with any, every route but /health wants one of them
    drain_seconds: float = 30.0  # how long requests may go on after the signal to stop
    max_num_waiting: int = 1024  # completions that wait for their first token, beyond the batch
    max_waiting_tokens: int = 262_144  # of all prompts that wait
    max_body_bytes: int = 8 << 20  # of one request
    max_logprobs_memory: int = 1 << 30  # bytes that the log-probabilities of all running requests may take
    max_connections: int | None = None  # None: as many as the limit of open files allows, up to a few thousand
    step_timeout: float = 60.0  # seconds of one step of the engine after which it counts as stalled; 0: never
    tool_call_parser: str | None = None  # name of a CallFormat; None: the one that the chat template tells
    allowed_hosts: tuple[str, ...] = ()  # names in the Host header, beside the server's own; no ports

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}", "it must be between 0 and 65535")
        for name in ("drain_seconds", "step_timeout"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be a number of seconds, 0 or more")
        for name in (
            "max_num_waiting",
            "max_waiting_tokens",
            "max_body_bytes",
            "max_logprobs_memory",
            "max_connections",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}", "it must be at least 1")
        if self.tool_call_parser is not None:
            call_format(self.tool_call_parser)
        for name in self.allowed_hosts:
            if not is_host(name):
                raise UsageError(f"allowed_hosts has {name!r}", "it must be a host alone, without scheme and port")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise UsageError("an API key is empty or cannot be sent", "it must be printable ASCII without outer spaces")
        if not all(name.isprintable() and name for name in self.served_model_names):
            raise UsageError("a served model name is empty", "it must be printable characters")
