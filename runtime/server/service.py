"""State that all requests to an open engine share."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from enginewright.errors import EngineError
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.device.memory_plan import KvBlocks
from enginewright.runtime.server.admission import Admission
from enginewright.runtime.server.config import ServerConfig, tenant_of
from enginewright.runtime.server.errors import OVERLOAD_RETRY_S, ApiError, retry_after, shutting_down
from enginewright.runtime.server.generation import Generation
from enginewright.runtime.server.log import Throughput
from enginewright.runtime.server.metrics import Metrics
from enginewright.runtime.text.messages.formats import call_format

if TYPE_CHECKING:
    from enginewright.runtime.server.embeddings import Texts

logger = logging.getLogger(__name__)


class Service:
    """An open engine, and the requests that use it. Everything belongs to the thread of the event loop.

    Args:
        llm: the engine.
        config: the server's settings.
        models: names in requests; empty means those of the config, or the engine's own name.
        metrics: metrics to continue; None starts new ones.
    """

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, models: Sequence[str] = (), metrics: Metrics | None = None
    ) -> None:
        engine = llm.engine
        self.llm, self.config = llm, config
        if config.tool_call_parser is not None:
            form = engine.tokenizer.message_format
            engine.tokenizer.use_message_format(replace(form, calls=call_format(config.tool_call_parser)))
        self.models = models or config.served_model_names or (engine.manifest.name,)
        # With the same fingerprint, the same seed gives the same completion.
        self.fingerprint = f"fp_{engine.manifest.content_hash[:12]}"
        self.metrics = metrics or Metrics(llm.stats, self.models[0], engine.manifest.content_hash, llm.max_model_len)
        self.metrics.cache = KvBlocks.of(engine.plan.caches, llm.memory_plan.num_blocks)
        self.metrics.max_loras = llm.max_loras
        self.admission = Admission(
            llm.memory_plan.limits.sequences + config.max_num_waiting,
            config.max_waiting_tokens,
            config.max_logprobs_memory,
            llm.max_model_len,
        )
        self.live: set[Generation | Texts] = set()  # requests that have not ended
        self.metrics.live = self.live
        # classes of tenants, if they have any
        self.tenant_classes = dict(zip(map(tenant_of, config.api_keys), config.tenant_classes, strict=False))
        self.throughput = Throughput(llm.stats, self.live)
        self.draining = False  # True once the server is ending and takes no new requests
        self.stalled = False  # True while the running step exceeds the step timeout

    def why_closed(self) -> ApiError | None:
        """Error for new requests, if the engine takes none."""
        if self.draining:
            return shutting_down(self.config.drain_seconds)
        if not self.llm.is_alive:
            return ApiError(503, "the engine has failed", code="engine_dead")
        if self.stalled:
            return ApiError(
                503,
                f"the engine is stalled: its step has not ended within {self.config.step_timeout:g} s",
                code="engine_stalled",
                headers=retry_after(OVERLOAD_RETRY_S),
            )
        return None

    def why_unhealthy(self) -> ApiError | None:
        """Error that /health reports, if any, including a changed engine file before a step notices it."""
        closed, error = self.why_closed(), self.llm.error
        if closed is not None and closed.code == "engine_dead" and error is not None and error.is_shown_by_health:
            return ApiError(closed.status, f"{error.what}: {error.why}", code=closed.code)
        if closed is None:
            try:
                self.llm.engine.check_in_use()
            except EngineError:
                return ApiError(503, "the engine's file was changed while it is in use", code="engine_dead")
        return closed

    def watch(self) -> None:
        """Detects a step that does not end, and its late end. To be called several times per second."""
        limit = self.config.step_timeout
        stalled = 0 < limit < self.llm.step_s
        if stalled and not self.stalled:
            logger.error("a step of the engine has not ended within %g s: new requests get a 503 until it ends", limit)
        elif self.stalled and not stalled and self.llm.is_alive:
            logger.warning("the step that had not ended within %g s has ended: requests are accepted again", limit)
        self.stalled = stalled

    def end_all(self) -> None:
        """Ends all running requests with an error."""
        for generation in list(self.live):
            generation.stop(shutting_down(0))
