"""What all requests to a server share."""

import asyncio
import time

from enginewright.runtime.async_llm import AsyncLLM
from enginewright.runtime.server.admission import Admission
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.errors import ApiError, shutting_down
from enginewright.runtime.server.generation import Generation
from enginewright.runtime.server.metrics import Metrics


class Service:
    """An engine, and who uses it. Everything is of the thread of its event loop.

    live: requests that are being answered. draining: no new ones are taken. fingerprint: the same seed gives the same
    answer where it is the same.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        engine = llm.engine
        self.llm, self.config = llm, config
        self.models = config.served_model_names or (engine.manifest.name,)
        self.fingerprint = f"fp_{engine.manifest.content_hash[:12]}"
        self.started = int(time.time())
        self.metrics = Metrics(llm.stats, self.models[0])
        self.admission = Admission(llm.envelope.limits.sequences + config.max_num_waiting, config.max_waiting_tokens)
        self.live: set[Generation] = set()
        self.draining = False

    def why_closed(self) -> ApiError | None:
        """Why no new work is taken, if so."""
        if self.draining:
            return shutting_down(self.config.drain_seconds)
        if not self.llm.is_alive:
            return ApiError(503, "the engine has failed", code="engine_dead")
        return None

    def check_model(self, name: str | None) -> str:
        """The name that the answer goes under: what was asked for, or the first if nothing was.

        Raises:
            ApiError: 404, it is none of ours.
        """
        if name is None:
            return self.models[0]
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(
                404, f"there is no model {name[:100]!r} here, but {known}", param="model", code="model_not_found"
            )
        return name

    async def until_idle(self) -> None:
        while self.live:
            await asyncio.sleep(0.02)

    def end_all(self) -> None:
        """Whoever is still being answered gets an error."""
        for generation in list(self.live):
            generation.stop(shutting_down(0))
