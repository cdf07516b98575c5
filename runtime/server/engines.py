"""The engines of a server by name: opened at a request, and closed when idle or when another needs their memory.

Everything belongs to the thread of the event loop. One engine is opened or closed at a time.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.types import Receive

from enginewright.checkpoint_ref import refuse_checkpoint
from enginewright.errors import (
    CorruptEngineError,
    EngineError,
    NoCodeForMachineError,
    NotEnoughMemoryError,
    UsageError,
)
from enginewright.printable import printable
from enginewright.runtime import env
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.cpu.executor import choose_isa
from enginewright.runtime.device.devices import check_device, open_engine
from enginewright.runtime.device.machine import free_memory, trim_memory
from enginewright.runtime.device.memory_plan import limits_of
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.errors import ApiError, internal, overloaded, shutting_down
from enginewright.runtime.server.log import log_refused_bytes
from enginewright.runtime.server.metrics import Metrics, MetricsPage
from enginewright.runtime.server.responses_store import ResponseStore
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.wire import BodyReader, ClientGone, until_gone
from enginewright.runtime.server.work import timed_out
from enginewright.runtime.speculation.methods import plan_engine_memory
from enginewright.targets import CPU

logger = logging.getLogger(__name__)

POLL_S = 0.005  # seconds between checks whether the requests of an engine to be closed have ended
SUFFIX = ".engine"  # of engine files in a folder
UNLIMITED = 1 << 62  # bytes


class _AbandonedError(Exception):
    """Nobody waits any more for the engine that is being opened."""


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


class Engines:
    """All engines of a server.

    Args:
        engines: the engines.
        config: the server's settings.
        limits: limits of each engine.
        memory: bytes that open engines may take together.
        verify: whether to check the hashes of an engine's weights each time that it is opened.
    """

    def __init__(
        self,
        engines: Sequence[ServedEngine],
        config: ServerConfig,
        limits: RuntimeConfig,
        memory: int,
        *,
        verify: bool = False,
    ) -> None:
        self.all, self.config = engines, config
        self._limits, self.memory, self._verify = limits, memory, verify
        self._by_name = {name: engine for engine in engines for name in engine.names}
        self._open_lock = asyncio.Lock()  # held by the engine that is being opened or closed
        self._idle_closing: asyncio.Task[None] | None = None
        self._ended = asyncio.get_running_loop().create_future()  # done once the server ends, and nobody waits
        self.bodies = BodyReader(config.max_body_bytes)
        self.responses = ResponseStore(config.responses_store, config.responses_memory)
        self.draining = False  # True once the server is ending and takes no new requests
        self.started = int(time.time())
        self._rejected: Counter[int] = Counter()  # requests that named no engine, by HTTP status
        self.metrics = MetricsPage(
            lambda: [(one.metrics, one.service is not None) for one in engines if one.metrics is not None],
            self._rejected,
            vllm_names=config.metrics_compat == "vllm",
        )

    @classmethod
    def of(cls, service: Service) -> "Engines":
        """Engines of a server with a single engine, which is open and stays open."""
        info = replace(EngineInfo.of(service.llm.engine, RuntimeConfig()), max_model_len=service.llm.max_model_len)
        engine = ServedEngine(service.models, None, info, service.metrics, service)
        return cls([engine], service.config, RuntimeConfig(), memory=0)

    @classmethod
    def of_files(
        cls, paths: Sequence[str | Path], config: ServerConfig, limits: RuntimeConfig, *, verify: bool = False
    ) -> "Engines":
        """Engines that are closed, and opened by requests.

        They are named after their files, with escapes for characters that are not printable; a single one is named as
        by `names_alone`.

        Args:
            paths: the engine files.
            config: the server's settings.
            limits: limits of each engine.
            verify: whether to check the hashes of the weights each time that an engine is opened.

        Raises:
            UsageError: two have the same name, the limits do not fit one, or a path is mistyped.
            NotEnoughMemoryError: the KV cache does not hold a sequence of one, or none fits the memory.
            EngineError: the only one cannot be opened.
        """
        check_device(limits.device)
        memory = free_memory() if config.memory is None else config.memory
        engines: list[ServedEngine] = []
        too_large: list[NotEnoughMemoryError] = []
        for path in paths:
            engine = ServedEngine((printable(Path(path).stem),), Path(path), None)
            engines.append(engine)
            try:
                opened = open_engine(path, limits.device)
            except EngineError as error:
                if len(paths) == 1 or _is_mistyped(path):
                    raise
                engine.refuse(error)
                continue
            with opened:
                try:
                    info = EngineInfo.of(opened, limits)
                except NoCodeForMachineError as error:
                    if len(paths) == 1:
                        raise
                    engine.refuse(error)
                    continue
                if len(paths) == 1:
                    engine.names = names_alone(info.name, path, config)
                engine.update(info)
                _check_options(opened, config, limits)
                if (why := _why_too_large(opened, limits, memory)) is not None:
                    too_large.append(why)
                    engine.refuse(why)
        if too_large and all(engine.has_failed for engine in engines):
            raise too_large[0]
        _check_names(engines, config)
        return cls(engines, config, limits, memory, verify=verify)

    @property
    def names(self) -> Sequence[str]:
        """All names that requests may use."""
        return list(self._by_name)

    @property
    def services(self) -> list[Service]:
        """The services of the open engines."""
        return [engine.service for engine in self.all if engine.service is not None]

    @property
    def max_vocab_size(self) -> int:
        """The largest vocabulary of all engines."""
        return max((engine.info.vocab_size for engine in self.all if engine.info is not None), default=0)

    def find(self, name: str | None) -> tuple[str, ServedEngine]:
        """Finds the engine that a request names.

        Args:
            name: the name in the request; None means the only engine.

        Returns:
            Its name for the response, and the engine.

        Raises:
            ApiError: 404, there is none of that name; 400, the name is missing and there are several engines.
        """
        known = ", ".join(self._by_name)
        if name is None and len(self.all) > 1:
            raise ApiError(400, f"model is needed: there are {known}", param="model")
        name = name if name is not None else self.all[0].names[0]
        if name not in self._by_name:
            raise ApiError(
                404, f"there is no model {name[:100]!r} here, only {known}", param="model", code="model_not_found"
            )
        return name, self._by_name[name]

    @asynccontextmanager
    async def use(
        self, name: str | None, receive: Receive, timeout_s: float | None = None
    ) -> AsyncIterator[tuple[str, Service]]:
        """An engine that stays open while it is used; a closed one is opened first.

        Args:
            name: the name in the request.
            receive: of the request, whose body has been read.
            timeout_s: seconds that the request waits for a closed engine; None means without limit.

        Yields:
            Its name for the response, and its service.

        Raises:
            ApiError: as `find`, or the engine cannot be opened.
            ClientGone: the client has disconnected.
        """
        if self.draining:
            raise shutting_down(self.config.drain_seconds)
        name, engine = self.find(name)
        user = object()
        if engine.is_ready:
            engine.users.add(user)
        else:
            await self._wait(engine, user, receive, timeout_s)
        engine.last_used = time.monotonic()
        try:
            assert engine.service is not None
            if closed := engine.service.why_closed():
                raise closed
            yield name, engine.service
        finally:
            engine.users.discard(user)
            engine.last_used = time.monotonic()

    async def _wait(self, engine: ServedEngine, user: object, receive: Receive, timeout_s: float | None) -> None:
        """Waits until an engine is open; then the request is among its users."""
        if len(engine.waiting) >= self.config.max_num_waiting:
            raise overloaded(f"{len(engine.waiting)} requests wait until {engine.names[0]} is open")
        engine.waiting.add(user)
        if engine.opening is None:
            engine.opening = asyncio.create_task(self._open(engine))
        opening, gone = engine.opening, asyncio.create_task(until_gone(receive))
        try:
            ends = (opening, gone, self._ended)
            done, _ = await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if timeout_s is not None and not done:
                raise timed_out(timeout_s)
            if user in engine.users:
                return
            if gone.done():
                raise ClientGone
            raise (opening.result() or internal()) if opening.done() else shutting_down(0)
        except BaseException:
            engine.users.discard(user)
            raise
        finally:
            gone.cancel()
            engine.waiting.discard(user)

    async def _open(self, engine: ServedEngine) -> ApiError | None:
        """Opens an engine and hands it to the requests that wait; returns the error if it cannot be opened."""
        try:
            async with self._open_lock:
                if not engine.waiting:
                    return None
                if not engine.is_ready:
                    await self._close(engine, "it has failed")
                    await self._start(engine)
                engine.users |= engine.waiting
                return None
        except _AbandonedError:
            return None
        except EngineError as error:
            engine.has_failed = True
            logger.error("%s cannot be opened: %s", engine.names[0], error)
            return _unavailable(engine.names[0], error)
        except Exception:
            logger.exception("%s cannot be opened", engine.names[0])
            return internal()
        finally:
            engine.opening = None

    async def _start(self, engine: ServedEngine) -> None:
        assert engine.path is not None
        began = time.perf_counter()
        opened = await asyncio.to_thread(open_engine, engine.path, self._limits.device, verify=self._verify)
        try:
            info = EngineInfo.of(opened, self._limits)
            waits = time.perf_counter()
            limits, nbytes = await self._free_memory(engine, opened)
            began += time.perf_counter() - waits
            llm = await AsyncLLM.open(opened, limits)
        except BaseException:
            opened.close()
            raise
        engine.update(info)
        engine.service = Service(llm, self.config, engine.names, engine.metrics)
        engine.nbytes, engine.has_failed = nbytes, False
        seconds = time.perf_counter() - began
        engine.service.metrics.opening.observe(seconds)
        logger.info("%s is open after %.3f s and takes %s", engine.names[0], seconds, format_bytes(nbytes))

    async def _free_memory(self, engine: ServedEngine, opened: Engine) -> tuple[RuntimeConfig, int]:
        """Closes engines, the least recently used first, until there is memory for this one.

        Returns:
            Its limits, with the size of its KV caches, and the bytes that it takes.

        Raises:
            NotEnoughMemoryError: it does not fit even alone.
        """
        while True:
            free_bytes = self.memory - sum(one.nbytes for one in self.all)
            try:
                limits, nbytes = plan_engine_memory(opened, self._limits, free_bytes)
                why = NotEnoughMemoryError(
                    f"{engine.path} takes {format_bytes(nbytes)}", f"engines may take {format_bytes(self.memory)}"
                )
                if nbytes <= free_bytes:
                    return limits, nbytes
            except NotEnoughMemoryError as error:
                why = error
            others = [one for one in self.all if one.service is not None]
            if not others:
                raise why
            victim = min(others, key=lambda one: (bool(one.users), one.last_used))
            victim.is_closing = True  # new requests now wait until it is open again, so its users only become fewer
            try:
                while victim.users:
                    if not engine.waiting or self._ended.done():
                        raise _AbandonedError
                    await asyncio.sleep(POLL_S)
                await self._close(victim, f"{engine.names[0]} needs its memory")
            finally:
                victim.is_closing = False

    async def _close(self, engine: ServedEngine, why: str) -> None:
        """Closes an engine if it is open."""
        service = engine.service
        if service is None:
            return
        engine.is_closing = True
        try:
            service.throughput.end()
            await service.llm.close()
        finally:
            engine.stats_before, engine.service, engine.is_closing, engine.nbytes = engine.stats(), None, False, 0
        del service
        await asyncio.to_thread(trim_memory)
        logger.info("%s is closed: %s", engine.names[0], why)

    async def _close_idle(self) -> None:
        async with self._open_lock:
            for engine in self._idle():
                await self._close(engine, "it is idle")

    def _idle(self) -> list[ServedEngine]:
        """Open engines that have not been used for the configured time."""
        limit = self.config.idle_seconds
        since = None if limit is None else time.monotonic() - limit
        return [
            one
            for one in self.all
            if since is not None and one.is_ready and one.path and not one.users and one.last_used < since
        ]

    def watch(self) -> None:
        """Detects steps that do not end, and closes idle engines. To be called several times per second."""
        for service in self.services:
            service.watch()
        if (self._idle_closing is None or self._idle_closing.done()) and self._idle():
            self._idle_closing = asyncio.create_task(self._close_idle())

    def why_unhealthy(self) -> ApiError | None:
        """Error that /health reports, if any. A failed engine that can be opened again is none."""
        if self.draining:
            return shutting_down(self.config.drain_seconds)
        for engine in self.all:
            if engine.service is not None and (engine.path is None or engine.is_ready):
                stays = engine.path is None
                if closed := engine.service.why_unhealthy() if stays else engine.service.why_closed():
                    return closed
        return None

    def reject(self, status: int, name: str | None) -> None:
        """Counts a request that got an error.

        Args:
            status: the HTTP status.
            name: the name of its engine; None means the only engine, or an unknown one.
        """
        engine = self._by_name[name] if name is not None else self.all[0] if len(self.all) == 1 else None
        counts = self._rejected if engine is None or engine.metrics is None else engine.metrics.rejected
        counts[status] += 1

    def refuse_bytes(self, error: ApiError) -> None:
        """Counts and logs a client whose bytes are no HTTP request."""
        self.reject(error.status, None)
        log_refused_bytes(error)

    def drain(self) -> None:
        """Stops taking new requests."""
        self.draining = True
        for service in self.services:
            service.draining = True

    async def until_idle(self) -> None:
        """Waits until no request runs or waits."""
        while any(service.live for service in self.services) or any(engine.waiting for engine in self.all):
            await asyncio.sleep(0.02)

    def end_all(self) -> None:
        """Ends all requests with an error."""
        if not self._ended.done():
            self._ended.set_result(None)
        for service in self.services:
            service.end_all()

    async def close(self) -> None:
        """Closes all engines, including those that are being opened."""
        self.end_all()
        openings = [engine.opening for engine in self.all if engine.opening is not None]
        await asyncio.gather(*openings, *([self._idle_closing] if self._idle_closing is not None else []))
        for service in self.services:
            service.throughput.end()
            await service.llm.close()

    def cards(self) -> dict[str, Any]:
        """The response of /v1/models: all engines, on a single page of Anthropic's API."""
        names = self.names
        data = [self.card(name) for name in names]
        return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    def card(self, name: str) -> dict[str, Any]:
        """An engine in /v1/models: keys of OpenAI's API, ours, and those of Anthropic's."""
        engine = self._by_name[name]
        max_model_len = None if engine.info is None else engine.info.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "enginewright",
            "root": engine.names[0],
            "max_model_len": max_model_len,
            "state": engine.state,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.started, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": max_model_len,
            "lifecycle": "active",
        }


def files_of(given: Sequence[str | Path]) -> list[str | Path]:
    """Replaces folders by the engine files in them.

    Raises:
        UsageError: a folder has none.
    """
    files: list[str | Path] = []
    for path in given:
        found: Sequence[str | Path] = sorted(Path(path).glob(f"*{SUFFIX}")) if os.path.isdir(path) else [path]
        if not found:
            refuse_checkpoint(path)
            raise UsageError(f"there is no engine in {path}", f"no name of a file there ends in {SUFFIX}")
        files += found
    return files


def _is_mistyped(path: str | Path) -> bool:
    """True if a path that cannot be opened does not name an engine file at all, not even a broken one."""
    return Path(path).suffix != SUFFIX or not os.path.lexists(path)


def _check_options(engine: Engine, config: ServerConfig, limits: RuntimeConfig) -> None:
    """Refuses options at the start with which no request to an engine could ever be answered.

    Raises:
        UsageError: there is no such instruction set, or the engine runs on a GPU without --memory.
        NotEnoughMemoryError: the KV cache does not hold one sequence of the maximum length.
        NoCodeForMachineError: this CPU does not have the requested instruction set.
    """
    if engine.target == CPU:
        choose_isa(limits.isa or env.cpu_isa())
    elif config.memory is None:
        why = "the GPU memory that engines may take together must be given"
        raise UsageError("engines that are opened on demand need --memory on a GPU", why)
    if limits.kv_cache_memory is None:
        return
    try:
        plan_engine_memory(engine, limits, UNLIMITED)
    except NotEnoughMemoryError as error:
        given = format_bytes(limits.kv_cache_memory)
        what = f"{engine.file.path} needs more than --kv-cache-memory {given}"
        raise NotEnoughMemoryError(what, f"{error.what}, {error.why}", error.fix) from error


def _why_too_large(engine: Engine, limits: RuntimeConfig, memory: int) -> NotEnoughMemoryError | None:
    """Error of an engine that does not fit the memory even if no other one is open; None if it fits.

    Raises:
        UsageError: the engine does not have the draft model that the limits name.
    """
    weights = f"its weights take {format_bytes(engine.weight_bytes)}"
    try:
        _, nbytes = plan_engine_memory(engine, limits, memory)
    except NotEnoughMemoryError as error:
        takes = f"{weights}, and {error.what}"
    else:
        if nbytes <= memory:
            return None
        takes = f"{weights}, and it needs {format_bytes(nbytes)} in all"
    return NotEnoughMemoryError(
        f"{engine.file.path} does not fit the memory that engines may take together, {format_bytes(memory)}",
        takes,
        "Use a larger --memory, or a smaller --max-model-len, --max-num-batched-tokens or --kv-cache-memory.",
    )


def names_alone(model: str, path: str | Path, config: ServerConfig) -> Sequence[str]:
    """Names in requests of a server's only engine: those of the config, or its model's and its file's.

    Args:
        model: the model's name in the file.
        path: the engine file.
        config: the server's settings.
    """
    return config.served_model_names or tuple(dict.fromkeys((model, printable(Path(path).stem))))


def _check_names(engines: Sequence[ServedEngine], config: ServerConfig) -> None:
    if len(engines) > 1 and config.served_model_names:
        raise UsageError("--served-model-name names one engine", f"here are {len(engines)}, named after their files")
    seen: dict[str, ServedEngine] = {}
    for engine in engines:
        other = seen.setdefault(engine.names[0], engine)
        if other is not engine:
            raise UsageError(
                f"two engines have the name {engine.names[0]}",
                f"{other.path} and {engine.path}",
                "Rename one of the files.",
            )


_REASONS: dict[type[EngineError], str] = {
    CorruptEngineError: "its file is damaged",
    NoCodeForMachineError: "it has no code for this machine",
    NotEnoughMemoryError: "it needs more memory than this server has",
}


def _unavailable(name: str, error: EngineError) -> ApiError:
    """Error for clients when an engine cannot be opened; the log says more, with paths."""
    why = _REASONS.get(type(error), "the server's log says why")
    return ApiError(503, f"the model {name} cannot be opened: {why}", param="model", code="model_unavailable")
