"""Opens and closes the engines of a server within a memory budget, one at a time."""

import asyncio
import logging
import time
from collections.abc import Sequence

from enginewright.errors import CorruptEngineError, EngineError, NoCodeForMachineError, NotEnoughMemoryError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.device.machine import trim_memory
from enginewright.runtime.engine import Engine
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.errors import ApiError, internal
from enginewright.runtime.server.served_engine import EngineInfo, ServedEngine
from enginewright.runtime.server.service import Service
from enginewright.runtime.speculation.methods import plan_engine_memory

logger = logging.getLogger(__name__)

POLL_S = 0.005  # seconds between checks whether the requests of an engine to be closed have ended


class _AbandonedError(Exception):
    """Nobody waits any more for the engine that is being opened."""


class EngineSwaps:
    """Opens an engine when requests wait for it, and closes others for its memory.

    Args:
        engines: the engines.
        config: the server's settings.
        limits: limits of each engine.
        memory: bytes that open engines may take together.
        verify: whether to check the hashes of an engine's weights each time that it is opened.
    """

    def __init__(
        self, engines: Sequence[ServedEngine], config: ServerConfig, limits: RuntimeConfig, memory: int, *, verify: bool
    ) -> None:
        self._engines, self._config, self._limits = engines, config, limits
        self.memory, self._verify = memory, verify
        self._lock = asyncio.Lock()  # held by the engine that is being opened or closed

    async def open(self, engine: ServedEngine) -> ApiError | None:
        """Opens an engine and hands it to the requests that wait; returns the error if it cannot be opened."""
        try:
            async with self._lock:
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
        """Opens an engine once there is memory for it."""
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
        engine.service = Service(llm, self._config, engine.names, engine.metrics)
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
            free_bytes = self.memory - sum(one.nbytes for one in self._engines)
            try:
                limits, nbytes = plan_engine_memory(opened, self._limits, free_bytes)
                if nbytes <= free_bytes:
                    return limits, nbytes
                why = NotEnoughMemoryError(
                    f"{engine.path} takes {format_bytes(nbytes)}", f"engines may take {format_bytes(self.memory)}"
                )
            except NotEnoughMemoryError as error:
                why = error
            others = [one for one in self._engines if one.service is not None]
            if not others:
                raise why
            victim = min(others, key=lambda one: (bool(one.users), one.last_used))
            victim.is_closing = True  # new requests now wait until it is open again, so its users only become fewer
            try:
                while victim.users:
                    if not engine.waiting:
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

    async def close_idle(self, idle_s: float) -> None:
        """Closes the engines that have not been used for this many seconds."""
        async with self._lock:
            for engine in self.idle(idle_s):
                await self._close(engine, "it is idle")

    def idle(self, idle_s: float) -> list[ServedEngine]:
        """Open engines that have not been used for this many seconds."""
        since = time.monotonic() - idle_s
        return [one for one in self._engines if one.is_ready and one.path and not one.users and one.last_used < since]


_REASONS: dict[type[EngineError], str] = {
    CorruptEngineError: "its file is damaged",
    NoCodeForMachineError: "it has no code for this machine",
    NotEnoughMemoryError: "it needs more memory than this server has",
}


def _unavailable(name: str, error: EngineError) -> ApiError:
    """Error for clients when an engine cannot be opened; the log says more, with paths."""
    why = _REASONS.get(type(error), "the server's log says why")
    return ApiError(503, f"the model {name} cannot be opened: {why}", param="model", code="model_unavailable")
