"""What a server is told before it starts."""

from dataclasses import dataclass

from enginewright.errors import UsageError


@dataclass(frozen=True)
class ServerConfig:
    """Limits of requests are here, limits of the engine in RuntimeConfig.

    port: 0 takes a free one. served_model_names: what clients may call the model; none is the engine's own name.
    api_keys: with any, every route but /health wants one of them. drain_seconds: how long requests may go on after
    the signal to stop. max_num_waiting: answers that may wait for their first token, beyond those that fit a step.
    max_waiting_tokens: of the prompts that wait. max_body_bytes: of a request.

    Raises:
        UsageError: a value makes no sense.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    drain_seconds: float = 30.0
    max_num_waiting: int = 1024
    max_waiting_tokens: int = 262_144
    max_body_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"port is {self.port}", "it must be between 0 and 65535")
        if not 0 <= self.drain_seconds < float("inf"):
            raise UsageError(f"drain_seconds is {self.drain_seconds}", "it must be a number of seconds, 0 or more")
        for name in ("max_num_waiting", "max_waiting_tokens", "max_body_bytes"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if not all(key.isascii() and key.isprintable() and key.strip() == key != "" for key in self.api_keys):
            raise UsageError("an API key is empty or cannot be sent", "it must be printable ASCII without outer spaces")
        if not all(name.isprintable() and name for name in self.served_model_names):
            raise UsageError("a served model name is empty", "it must be printable characters")
