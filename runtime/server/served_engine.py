"""An engine of a server: facts from its file, and its service while it is open."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from enginewright.errors import EngineError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.memory_plan import limits_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.metrics import Metrics
from enginewright.runtime.server.service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineInfo:
    """Facts from an engine's file."""

    name: str  # name of the model
    content_hash: str  # hash of the file's content
    max_model_len: int  # maximum number of tokens of a sequence, within the server's limits
    vocab_size: int  # number of tokens in the vocabulary
    target: str  # platform that the engine runs on here

    @classmethod
    def of(cls, engine: Engine, config: RuntimeConfig) -> "EngineInfo":
        """Reads them. Raises UsageError if the limits exceed those that the engine was built for."""
        length, _ = limits_of(engine.plan, config)
        return cls(engine.manifest.name, engine.manifest.content_hash, length, engine.plan.vocab_size, engine.target)


@dataclass(eq=False)
class ServedEngine:
    """An engine that requests can name: open with a service, or closed."""

    names: Sequence[str]  # names in requests; metrics have the first
    path: Path | None  # engine file; None means that the engine was open from the start, and stays open
    info: EngineInfo | None  # facts from the file; None means that it cannot be read
    metrics: Metrics | None = None  # metrics since this content was first opened; None without info
    service: Service | None = None  # service of the open engine; None means closed
    nbytes: int = 0  # bytes of weights, activations and KV caches while the engine is open
    users: set[object] = field(default_factory=set)  # requests that use the engine
    waiting: set[object] = field(default_factory=set)  # requests that wait until the engine is open
    # task that opens the engine; its result is the error, if there is one
    opening: "asyncio.Task[ApiError | None] | None" = None
    # True while the engine waits for its last user or closes; new requests wait until it is open again
    is_closing: bool = False
    has_failed: bool = False  # True if the last attempt to open the engine failed
    last_used: float = 0.0  # time of the last use, by time.monotonic
    stats_before: Stats = field(default_factory=Stats)  # statistics at the last closing, to which later ones are added

    @property
    def is_ready(self) -> bool:
        """True if a request can start; the service of an engine that stays open reports its errors itself."""
        if self.path is None:
            return True
        return self.service is not None and not self.is_closing and self.service.llm.is_alive

    @property
    def state(self) -> str:
        """State of the engine in /v1/models."""
        if self.is_closing:
            return "closing"
        if self.service is not None:
            return "open"
        return "opening" if self.opening is not None else "failed" if self.has_failed else "closed"

    def stats(self) -> Stats:
        """Statistics since this content was first opened."""
        return self.stats_before if self.service is None else self.service.llm.stats().after(self.stats_before)

    def refuse(self, why: EngineError) -> None:
        """Lists the engine as failed from the start; it is served once its file has been repaired."""
        logger.warning("%s cannot be served as it is: %s", self.path, why)
        self.has_failed = True

    def update(self, info: EngineInfo) -> None:
        """Takes over new facts from the file; another content starts its metrics from zero."""
        if self.metrics is None or self.info is None or info.content_hash != self.info.content_hash:
            self.stats_before = Stats()
            self.metrics = Metrics(self.stats, self.names[0], info.content_hash, info.max_model_len)
        self.info = info
