"""The engines of a server by name: opened at a request, and closed when idle or when another needs their memory.

Everything belongs to the thread of the event loop. One engine is opened or closed at a time.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from starlette.types import Receive

from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.machine import free_memory
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.engine_files import closed_engines
from enginewright.runtime.server.engine_swaps import EngineSwaps
from enginewright.runtime.server.errors import ApiError, internal, overloaded, shutting_down
from enginewright.runtime.server.log import log_refused_bytes
from enginewright.runtime.server.metrics import MetricsPage
from enginewright.runtime.server.responses_store import ResponseStore
from enginewright.runtime.server.served_engine import EngineInfo, ServedEngine
from enginewright.runtime.server.service import Service
from enginewright.runtime.server.wire import BodyReader, ClientGone, until_gone
from enginewright.runtime.server.work import timed_out

ADAPTER_SUFFIX = ".lora"  # of adapter files in a folder


class AdapterNames:
    """Files of adapters by name. Everything belongs to the thread of the event loop.

    Args:
        modules: name → adapter file.
        folder: folder whose files NAME.lora are adapters as well, also those that come later; None: there is none.
    """

    def __init__(self, modules: Mapping[str, Path], folder: Path | None = None) -> None:
        self._modules, self._folder = dict(modules), folder

    def find(self, name: str) -> Path | None:
        """Returns the file of an adapter; None if there is none of this name."""
        if name in self._modules or self._folder is None:
            return self._modules.get(name)
        path = self._folder / f"{name}{ADAPTER_SUFFIX}"
        is_inside = "/" not in name and "\0" not in name and not name.startswith(".")
        return path if is_inside and path.is_file() else None

    def names(self) -> list[str]:
        """Lists the names of all adapters, sorted."""
        files = () if self._folder is None else self._folder.glob(f"*{ADAPTER_SUFFIX}")
        stems = (file.stem for file in files)
        return sorted({*self._modules, *(stem for stem in stems if stem.isprintable() and not stem.startswith("."))})

    def add(self, name: str, path: Path) -> None:
        """Adds an adapter, or replaces the file of this name."""
        self._modules[name] = path

    def remove(self, name: str) -> bool:
        """Removes an adapter that was given by name; False if there is none."""
        return self._modules.pop(name, None) is not None


class NamedModel(NamedTuple):
    """A model that a request names."""

    name: str  # name for the response
    engine: ServedEngine  # engine that computes it
    adapter: Path | None  # file of its adapter; None: the engine's own weights


class UsedModel(NamedTuple):
    """A model whose engine is open while a request uses it."""

    name: str  # name for the response
    service: Service  # service of the engine
    adapter: Path | None  # file of its adapter; None: the engine's own weights


class Engines:
    """All engines of a server.

    Args:
        engines: the engines.
        config: the server's settings.
        swaps: opens and closes them.
    """

    def __init__(self, engines: Sequence[ServedEngine], config: ServerConfig, swaps: EngineSwaps) -> None:
        self.all, self.config, self._swaps = engines, config, swaps
        self._by_name = {name: engine for engine in engines for name in engine.names}
        self.adapters = AdapterNames(config.adapter_files, None if config.lora_dir is None else Path(config.lora_dir))
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
        swaps = EngineSwaps([engine], service.config, RuntimeConfig(), 0, verify=False)
        return cls([engine], service.config, swaps)

    @classmethod
    def of_files(
        cls, paths: Sequence[str | Path], config: ServerConfig, limits: RuntimeConfig, *, verify: bool = False
    ) -> "Engines":
        """Engines of a server that opens them at requests (engine_files.py).

        Args:
            paths: the engine files.
            config: the server's settings.
            limits: limits of each engine.
            verify: whether to check the hashes of the weights each time that an engine is opened.

        Raises:
            UsageError, NotEnoughMemoryError, EngineError: as `closed_engines`.
        """
        memory = free_memory() if config.memory is None else config.memory
        engines = closed_engines(paths, config, limits, memory)
        return cls(engines, config, EngineSwaps(engines, config, limits, memory, verify=verify))

    @property
    def names(self) -> Sequence[str]:
        """All names that requests may use: of engines, then of their adapters."""
        adapters = self.adapters.names()
        if len(self.all) > 1:
            return [*self._by_name, *(f"{engine}:{adapter}" for engine in self._by_name for adapter in adapters)]
        return [*self._by_name, *(adapter for adapter in adapters if adapter not in self._by_name)]

    @property
    def engine_names(self) -> Collection[str]:
        """Names of the engines alone."""
        return self._by_name.keys()

    @property
    def memory(self) -> int:
        """Bytes that open engines may take together."""
        return self._swaps.memory

    @property
    def services(self) -> list[Service]:
        """The services of the open engines."""
        return [engine.service for engine in self.all if engine.service is not None]

    @property
    def max_vocab_size(self) -> int:
        """The largest vocabulary of all engines."""
        return max((engine.info.vocab_size for engine in self.all if engine.info is not None), default=0)

    def find(self, name: str | None) -> NamedModel:
        """Finds the engine that a request names, and its adapter if it names one: ADAPTER, or ENGINE:ADAPTER.

        Args:
            name: the name in the request; None means the only engine.

        Raises:
            ApiError: 404, there is none of that name; 400, the name is missing and there are several engines.
        """
        known = ", ".join(self._by_name)
        if name is None and len(self.all) > 1:
            raise ApiError(400, f"model is needed: there are {known}", param="model")
        name = name if name is not None else self.all[0].names[0]
        if (found := self._find(name)) is None:
            raise ApiError(
                404, f"there is no model {name[:100]!r} here, only {known}", param="model", code="model_not_found"
            )
        return found

    def _find(self, name: str) -> NamedModel | None:
        if name in self._by_name:
            return NamedModel(name, self._by_name[name], None)
        engine, _, adapter = name.rpartition(":")
        if engine in self._by_name and (path := self.adapters.find(adapter)) is not None:
            return NamedModel(name, self._by_name[engine], path)
        path = self.adapters.find(name) if len(self.all) == 1 else None
        return None if path is None else NamedModel(name, self.all[0], path)

    @asynccontextmanager
    async def use(self, name: str | None, receive: Receive, timeout_s: float | None = None) -> AsyncIterator[UsedModel]:
        """An engine that stays open while it is used; a closed one is opened first.

        Args:
            name: the name in the request.
            receive: of the request, whose body has been read.
            timeout_s: seconds that the request waits for a closed engine; None means without limit.

        Yields:
            The model, with its engine's service.

        Raises:
            ApiError: as `find`, or the engine cannot be opened.
            ClientGone: the client has disconnected.
        """
        if self.draining:
            raise shutting_down(self.config.drain_seconds)
        name, engine, adapter = self.find(name)
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
            yield UsedModel(name, engine.service, adapter)
        finally:
            engine.users.discard(user)
            engine.last_used = time.monotonic()

    async def _wait(self, engine: ServedEngine, user: object, receive: Receive, timeout_s: float | None) -> None:
        """Waits until an engine is open; then the request is among its users."""
        if len(engine.waiting) >= self.config.max_num_waiting:
            raise overloaded(f"{len(engine.waiting)} requests wait until {engine.names[0]} is open")
        engine.waiting.add(user)
        if engine.opening is None:
            engine.opening = asyncio.create_task(self._swaps.open(engine))
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

    def watch(self) -> None:
        """Detects steps that do not end, and closes idle engines. To be called several times per second."""
        for service in self.services:
            service.watch()
        idle_s, is_closing = self.config.idle_seconds, self._idle_closing is not None and not self._idle_closing.done()
        if idle_s is not None and not is_closing and self._swaps.idle(idle_s):
            self._idle_closing = asyncio.create_task(self._swaps.close_idle(idle_s))

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
        found = None if name is None else self._find(name)
        only = self.all[0] if name is None and len(self.all) == 1 else None
        engine = only if found is None else found.engine
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
        found = map(self._find, self.names)
        models = [model for model in found if model is not None]  # the file of an adapter may be removed meanwhile
        names, data = [model.name for model in models], [self._card(model) for model in models]
        return {"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    def card(self, name: str) -> dict[str, Any]:
        """A model in /v1/models: keys of OpenAI's API, ours, vLLM's of adapters, and those of Anthropic's."""
        return self._card(self.find(name))

    def _card(self, model: NamedModel) -> dict[str, Any]:
        name, engine, adapter = model
        max_model_len = None if engine.info is None else engine.info.max_model_len
        return {
            "id": name,
            "object": "model",
            "created": self.started,
            "owned_by": "enginewright",
            "root": engine.names[0] if adapter is None else adapter.stem,
            "parent": None if adapter is None else engine.names[0],
            "max_model_len": max_model_len,
            "state": engine.state,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self.started, UTC).isoformat().replace("+00:00", "Z"),
            "max_input_tokens": max_model_len,
            "lifecycle": "active",
        }
