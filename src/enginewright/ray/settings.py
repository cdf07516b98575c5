"""The settings of a deployment, read from the arguments of `serve run` or of a config file of Ray Serve."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import parse_bytes
from enginewright.runtime.server.config import ServerConfig

# Settings of a server that Ray's proxies decide, or that are not for replicas.
NOT_HERE = ("host", "port", "page", "allowed_origins", "max_connections", "ssl_certfile", "ssl_keyfile")
SIZES = ("memory", "responses_memory", "max_logprobs_memory", "max_body_bytes")  # a text such as 2g is accepted
LIMITS = frozenset(RuntimeConfig.__dataclass_fields__)


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment.

    Raises:
        UsageError: a value is not valid.
    """

    engines: tuple[str, ...]  # engine files and folders of them, at the same paths on every node
    replicas: int = 1  # number of replicas; the minimum if max_replicas is given
    max_replicas: int | None = None  # maximum number of replicas; None means that the number is fixed
    target: float = 16.0  # completions per replica, running and waiting ones, that autoscaling aims at
    upscale_delay_s: float = 10.0  # seconds for which more replicas must be needed before one is started
    downscale_delay_s: float = 300.0  # seconds for which fewer must be needed before one is stopped
    cpus: float = 1.0  # CPU cores of a replica
    gpus: float = 0.0  # GPUs of a replica
    ingresses: int = 1  # number of processes that read requests and route them
    max_lead: int = 8  # requests that a replica may run beyond the least busy one, to reuse a prefix
    server: ServerConfig = field(default_factory=lambda: ServerConfig(page=False))  # settings of each server
    limits: Mapping[str, Any] = field(default_factory=dict)  # limits of each engine, fields of RuntimeConfig

    def __post_init__(self) -> None:
        if not self.engines:
            raise UsageError("engines is missing", "it names engine files, or folders of them")
        runtime_config(**self.limits)
        for name in ("replicas", "ingresses"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be at least 1")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise UsageError(f"max_replicas is {self.max_replicas}", f"replicas is {self.replicas}")
        if self.max_lead < 0:
            raise UsageError(f"max_lead is {self.max_lead}", "it must be 0 or more")
        for name in ("target", "cpus"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be a number above 0")
        for name in ("gpus", "upscale_delay_s", "downscale_delay_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name} is {getattr(self, name)}", "it must be a number, 0 or more")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> "Settings":
        """Reads arguments: fields of this class, of ServerConfig, and of RuntimeConfig.

        Values may be texts, as a command line has them; several are separated by commas.

        Raises:
            UsageError: a name is unknown, or a value is not valid.
        """
        mine = {one.name for one in fields(cls)} - {"server", "limits"}
        servers = {one.name for one in fields(ServerConfig)} - set(NOT_HERE)
        if unknown := sorted(set(arguments) - mine - servers - LIMITS):
            known = ", ".join(sorted(mine | servers | LIMITS))
            raise UsageError(f"there is no setting called {unknown[0]}", f"there are {known}")
        own = _converted(cls, {name: value for name, value in arguments.items() if name in mine})
        server = _converted(ServerConfig, {name: value for name, value in arguments.items() if name in servers})
        limits = {name: value for name, value in arguments.items() if name in LIMITS}
        for name in ("enable_prefix_caching", "mmap"):
            if name in limits:
                limits[name] = _convert(name, limits[name], bool)
        # Processes of Ray have other working folders.
        own["engines"] = tuple(map(os.path.abspath, own.get("engines", ())))
        if "threads" not in limits and (cpus := own.get("cpus", cls.cpus)) >= 1:
            limits["threads"] = int(cpus)
        return cls(**own, server=ServerConfig(**server, page=False), limits=limits)

    @property
    def max_ongoing(self) -> int:
        """Requests at once in a replica: those that run, and as many that wait there; others wait for any replica."""
        return 2 * runtime_config(**self.limits).max_num_seqs


def _converted(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {name: _convert(name, value, hints[name]) for name, value in values.items()}


def _convert(name: str, value: Any, kind: Any) -> Any:
    """Converts a value that may be a text. Raises UsageError."""
    if name in SIZES and isinstance(value, str):
        return parse_bytes(value)
    if kind == tuple[str, ...]:
        return _texts(name, value)
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"{name} is {value!r}", str(error)) from None


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, Sequence) or not all(isinstance(part, str) for part in value):
        raise UsageError(f"{name} is {value!r}", "it must be a text, or a list of texts")
    return tuple(value)
