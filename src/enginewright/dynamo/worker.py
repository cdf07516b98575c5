"""The worker: Dynamo's LLMEngine over an AsyncLLM."""

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dynamo._core import Context
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.token_ids import token_ids_to_list
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, Unknown
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from enginewright.dynamo.form import (
    CANCELLED,
    cache_salt,
    chunk_of,
    handover,
    last_part,
    remote_prefix,
    sampling_params,
    work_class,
)
from enginewright.dynamo.model_files import write_model_files
from enginewright.dynamo.options import WorkerOptions, parse_options
from enginewright.errors import EngineDeadError, EngineError, UsageError
from enginewright.runtime.api.async_llm import AsyncLLM, AsyncRequest
from enginewright.runtime.cache.cache import shared_block_size
from enginewright.runtime.core.engine_kind import refuse_answers
from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.request import Request
from enginewright.runtime.device.devices import open_engine
from enginewright.runtime.device.memory_plan import KvBlocks
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.server.metrics import Metrics
from enginewright.runtime.server.serve import SWITCH_INTERVAL_S

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.25  # seconds between two reports of the KV cache's load, which are made only if it has changed
RANK = 0  # an engine runs on one device


class DynamoWorker(LLMEngine):  # type: ignore[misc]
    """Answers the requests of Dynamo's frontends. Everything belongs to the thread of the event loop.

    Args:
        options: its options.
        llm: the open engine, which is closed with it.
        model_files: folder of the files that frontends read.
        folder: a folder of its own, with the socket of its KV events.
    """

    def __init__(
        self, options: WorkerOptions, llm: AsyncLLM, model_files: Path, folder: "TemporaryDirectory[str]"
    ) -> None:
        engine, plan = llm.engine, llm.memory_plan
        self._options, self._engine, self._model_files, self._folder = options, engine, model_files, folder
        self._llm: AsyncLLM | None = llm  # None once the worker ends
        self._names = options.names or (engine.manifest.name,)
        self._block_size = _shared_block_size(options, engine)
        self._blocks = KvBlocks.of(engine.plan.caches, plan.num_blocks)
        self._metrics = Metrics(llm.stats, self._names[0], engine.manifest.content_hash, llm.max_model_len)
        self._metrics.cache = self._blocks
        self._running: dict[str, AsyncRequest] = {}  # started requests by Dynamo's id
        self._idle = asyncio.Event()  # set while nothing runs
        self._idle.set()
        self._failed = False  # True once the engine has failed
        self._publisher: Any = None  # takes reports of the load of the KV cache; None: nothing asks for them
        self._loads: asyncio.Task[None] | None = None  # reports it
        self._registration = LlmRegistration(
            context_length=llm.max_model_len,
            kv_cache_block_size=self._block_size,
            total_kv_blocks=None if self._blocks is None else self._blocks.count,
            max_num_seqs=plan.limits.sequences,
            max_num_batched_tokens=plan.limits.tokens,
        )

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> "tuple[DynamoWorker, WorkerConfig]":
        """Opens the engine that the command line names, so that its errors come before Dynamo begins.

        Args:
            argv: the arguments; None: those of this process.

        Returns:
            The worker, which is not registered yet, and Dynamo's settings for it.

        Raises:
            EngineError: an option is wrong, or the engine cannot be opened.
        """
        options = parse_options(argv)
        engine = open_engine(options.engine, options.limits.device, verify=options.verify)
        folder = TemporaryDirectory(prefix="enginewright-dynamo-")
        try:
            refuse_answers(engine)
            model_files = write_model_files(engine, options.model_files)
            limits = options.limits
            if _shared_block_size(options, engine) is not None:
                limits = replace(limits, kv_events=_kv_events(folder))
            worker = cls(options, await AsyncLLM.open(engine, limits), model_files, folder)
        except BaseException:
            engine.close()
            folder.cleanup()
            raise
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        dynamo = options.dynamo
        if "chat_template" not in engine.file.sections and dynamo.custom_jinja_template is None:
            dynamo.endpoint_types = "completions"
        config = WorkerConfig.from_runtime_config(
            dynamo, model_name=str(model_files), served_model_name=worker._names[0], disaggregation_mode=options.mode
        )
        return worker, config

    async def start(self, worker_id: int) -> EngineConfig:
        """Tells Dynamo what it registers. Requests are answered from now on.

        Args:
            worker_id: Dynamo's id of the worker, which the engine does not need.
        """
        if self._blocks is not None and self._llm is not None:
            self._loads = asyncio.create_task(self._report_loads(self._llm, self._blocks.count))
        name, *aliases = self._names
        return EngineConfig(
            model=str(self._model_files), served_model_name=name, model_aliases=aliases, llm=self._registration
        )

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the chunks of an answer.

        Args:
            request: Dynamo's PreprocessedRequest.
            context: its id, and whether its client has left.

        Raises:
            InvalidArgument: the request asks for something that is not possible.
            EngineShutdown: the engine has failed, or the worker ends.
            Unknown: the answer has failed.
        """
        try:
            async for chunk in self._chunks(request, context):
                yield chunk
        except UsageError as error:
            raise InvalidArgument(str(error)) from error
        except EngineDeadError as error:
            if self._llm is not None and not self._llm.is_alive and not self._failed:
                self._failed = True
                logger.error("the worker ends, since its engine has failed")
                os.kill(os.getpid(), signal.SIGTERM)  # Dynamo takes the worker out, and the process ends
            raise EngineShutdown(str(error)) from error
        except EngineError as error:
            raise Unknown(str(error)) from error

    async def _chunks(self, request: dict[str, Any], context: Context) -> AsyncGenerator[dict[str, Any], None]:
        llm, prefills = self._llm, self._options.mode is DisaggregationMode.PREFILL
        if llm is None:
            raise EngineDeadError("the worker ends")
        arrived, params = time.perf_counter(), sampling_params(request, self._engine)
        transfer = remote_prefix(request)
        if prefills:
            params, transfer = SamplingParams(temperature=0.0, max_tokens=1), {"do_remote_decode": True}
        prepared = await llm.prepare(
            token_ids_to_list(request["token_ids"]),
            params,
            cache_salt=cache_salt(request),
            work=work_class(request),
            kv_transfer_params=transfer,
        )
        if context.is_stopped():  # its client has left meanwhile
            yield {"index": 0, "token_ids": [], "finish_reason": CANCELLED}
            return
        llm.start(prepared)
        measured = _Measured(self._metrics, arrived)
        self._running[context.id()] = prepared
        self._idle.clear()
        try:
            async for (delta,) in prepared:  # of its only choice
                measured.add(delta)
                if delta.finish_reason == "abort" and not context.is_stopped():
                    raise EngineDeadError("the worker ends")
                chunk = chunk_of(delta)
                if delta.finish_reason is not None:
                    chunk |= last_part(prepared.request, measured.num_tokens)
                    if prefills:
                        chunk["disaggregated_params"] = handover(prepared.request)
                yield chunk
            measured.request_done(prepared.request)
        finally:
            prepared.abort()
            del self._running[context.id()]
            if not self._running:
                self._idle.set()

    async def abort(self, context: Context) -> None:
        """Ends a request whose client has left."""
        running = self._running.get(context.id())
        if running is not None:
            running.abort()

    async def is_quiescent(self) -> bool:
        """True once no prompt waits to be fetched by another worker."""
        transfer = None if self._llm is None else self._llm.stats().transfer
        return transfer is None or transfer.leased_bytes == 0

    async def cleanup(self) -> None:
        """Lets running requests finish for the time of the drain, then aborts the others and frees the memory."""
        llm, self._llm = self._llm, None
        if llm is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._options.drain_seconds):
                    await self._idle.wait()
            await llm.close()
        if self._loads is not None:
            self._loads.cancel()
        self._engine.close()
        self._folder.cleanup()

    async def kv_event_sources(self) -> list[KvEventSource]:
        """The socket on which the engine sends the changes of its prefix cache, if it has one."""
        return [] if self._block_size is None else [ZmqSource(_kv_events(self._folder), dp_rank=RANK)]

    async def register_prometheus(self, metrics: Any) -> None:
        """Adds the engine's metrics to those of Dynamo's system server, with their names at `engine run`."""
        registry = CollectorRegistry()
        registry.register(_EngineMetrics(self._metrics))
        register_engine_registry(metrics, registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        """The only rank, if the engine has a paged cache, whose load is reported."""
        return [] if self._blocks is None else [RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        """Takes the object that reports of the KV cache's load are given to.

        Args:
            publisher: the object.
        """
        self._publisher = publisher

    async def health_check_payload(self) -> dict[str, Any]:
        """The request by which Dynamo checks an idle worker, if DYN_HEALTH_CHECK_ENABLED is set."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    async def _report_loads(self, llm: AsyncLLM, num_blocks: int) -> None:
        last = None
        while True:
            stats = llm.stats()
            hits = stats.cached_prompt_tokens / stats.prompt_tokens if stats.prompt_tokens else None
            load = ComponentSnapshot(
                kv_used_blocks=round(stats.kv_usage * num_blocks),
                kv_total_blocks=num_blocks,
                gpu_cache_usage=stats.kv_usage,
                dp_rank=RANK,
                kv_cache_hit_rate=hits,
            )
            if load != last and self._publisher is not None:
                self._publisher.publish(RANK, load)
                last = load
            await asyncio.sleep(LOAD_INTERVAL_S)


def _shared_block_size(options: WorkerOptions, engine: Engine) -> int | None:
    """Number of tokens of a block of the prefix cache; None if there is none."""
    return shared_block_size(engine.plan.caches) if options.limits.enable_prefix_caching else None


def _kv_events(folder: "TemporaryDirectory[str]") -> str:
    """Address of the socket of the KV events: in a folder that only this user may enter, since they reveal prompts."""
    return f"ipc://{folder.name}/kv-events"


class _Measured:
    """Counts the tokens and times of a request in the engine's metrics."""

    def __init__(self, metrics: Metrics, arrived: float) -> None:
        self._metrics, self._arrived = metrics, arrived
        self._last: float | None = None  # time of the last delta by time.perf_counter, in seconds
        self.num_tokens = 0

    def add(self, delta: Delta) -> None:
        """Counts a delta."""
        metrics, now, count = self._metrics, time.perf_counter(), len(delta.tokens)
        if self._last is None:
            metrics.first_token.observe(now - self._arrived)
        elif count:
            metrics.between_tokens.observe((now - self._last) / count, count)
        self._last = now
        self.num_tokens += count
        if delta.finish_reason is not None:
            metrics.finished[delta.finish_reason] += 1

    def request_done(self, request: Request) -> None:
        """Counts a request that has ended by itself."""
        self._metrics.e2e.observe(time.perf_counter() - self._arrived)
        self._metrics.request_done(request, [self.num_tokens])


class _EngineMetrics(Collector):
    """The engine's metrics, as Dynamo collects them, in a thread of its own."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """All metrics of the engine."""
        yield from self._metrics.collect(is_open=True)

    def describe(self) -> list[Metric]:
        """An empty list; otherwise prometheus_client would collect once to learn the names."""
        return []
