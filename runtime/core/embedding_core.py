"""Texts in, vectors out, one step at a time: what `EngineCore` is to an engine that writes, for one that embeds."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from enginewright.errors import UsageError
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.engine_kind import refuse_answers
from enginewright.runtime.core.outputs import NAN_LOGITS, Delta
from enginewright.runtime.core.prompts import PromptTooLongError, check_tokens
from enginewright.runtime.core.request import OutputSink, Request
from enginewright.runtime.core.stats import Stats, StepCounts
from enginewright.runtime.device.devices import open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.scheduler.scheduler import Scheduler
from enginewright.runtime.step.prompt_cost import PromptCost
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.work_class import DEFAULT_WORK, WorkClass


@dataclass(frozen=True)
class TextTokens:
    """A text, or a pair of texts that a cross-encoder reads as one."""

    ids: list[int]
    second_from: int | None = None  # where tokens of type 1 begin


@dataclass(eq=False, slots=True)
class TextRequest:
    """A text, and the row that is computed of it. Its one delta says that it is there."""

    sink: OutputSink
    sequence: TokenSequence
    arrived_at: float  # by time.perf_counter
    vector: NDArray[np.float32] | None = None  # as the plan gives it; None: not yet

    @property
    def num_prompt_tokens(self) -> int:
        return self.sequence.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """A row is computed of all tokens."""
        return 0

    @property
    def finished(self) -> bool:
        return self.sequence.finish_reason is not None


class EmbeddingCore:
    """An engine with memory to run in. `text` and `stats` may be called from any thread, all else from one.

    Args:
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine = engine
        _ = engine.tokenizer, engine.embedding  # read now, as the file may be changed later
        self.executor = open_executor(engine, config)
        self._scheduler = Scheduler(
            engine.plan.caches,
            self.executor.memory_plan.limits,
            self.executor.memory_plan.num_blocks,
            chunk=config.prefill_chunk_size,
            cost=PromptCost(engine.plan).at,
            whole_texts=engine.plan.whole_texts,
        )
        if config.kv_events is not None:
            raise UsageError("kv_events is for engines that write", "an embedding model keeps no blocks")
        if config.kv_cache_disk is not None:
            raise UsageError("kv_cache_disk is for engines that write", "an embedding model keeps nothing")
        self._requests: dict[TokenSequence, TextRequest] = {}
        self._counts = StepCounts(self._scheduler, self.executor.memory_plan)

    def close(self) -> None:
        """Give back what it runs in."""
        self.executor.close()

    @property
    def max_model_len(self) -> int:
        return self.executor.memory_plan.max_model_len

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_unfinished > 0

    def stats(self) -> Stats:
        """What is going on; its numbers may be a step apart from each other."""
        return self._counts.stats()

    def request(self, *arguments: object, **options: object) -> Request:
        """Raises UsageError: there is no answer to a prompt."""
        refuse_answers(self.engine)
        raise AssertionError("an engine that writes has another core")

    def text(self, tokens: TextTokens, sink: OutputSink, work: WorkClass = DEFAULT_WORK) -> TextRequest:
        """A request that can be added.

        Raises:
            UsageError: it is empty, too long, or holds a token that is none.
        """
        ids = tokens.ids
        check_tokens(ids, self.engine.plan.vocab_size)
        if len(ids) > self.max_model_len:
            raise too_long(f"the prompt has {len(ids)} tokens", self.max_model_len)
        sequence = TokenSequence(list(ids), num_prompt_tokens=len(ids), max_tokens=len(ids), work=work)
        if tokens.second_from is not None:
            sequence.second_from = tokens.second_from
        return TextRequest(sink, sequence, time.perf_counter())

    def add(self, request: TextRequest) -> None:
        self._requests[request.sequence] = request
        self._scheduler.add(request.sequence)

    def abort(self, request: TextRequest) -> list[tuple[TextRequest, Delta]]:
        """End a request; its blocks are free again."""
        if self._requests.pop(request.sequence, None) is None:
            return []
        self._scheduler.finish(request.sequence, "abort")
        return [(request, Delta(0, "", (), "abort"))]

    def step(self) -> list[tuple[TextRequest, Delta]]:
        """One step of all that has arrived; the texts that ended with it."""
        plan, deltas = self._scheduler.schedule(), list[tuple[TextRequest, Delta]]()
        if plan is None:
            return deltas
        began = time.perf_counter()
        rows = np.asarray(self.executor.run(plan.inputs).logits)
        self._scheduler.commit(plan, [])
        self._counts.add(plan.inputs.sizes.tokens, time.perf_counter() - began)
        for row, sequence in zip(rows, plan.ending, strict=True):
            request = self._requests.pop(sequence)
            request.vector = row.copy()
            is_finite = bool(np.isfinite(row).all())
            deltas.append((request, Delta(0, "", (), "stop") if is_finite else Delta(0, "", (), "error", NAN_LOGITS)))
        return deltas


def open_core(engine: Engine, config: RuntimeConfig) -> EngineCore | EmbeddingCore:
    """What runs an engine, whichever it is."""
    return EngineCore(engine, config) if engine.plan.generates else EmbeddingCore(engine, config)


def too_long(what: str, max_model_len: int) -> PromptTooLongError:
    """what: the prompt and its length. Clients look for the words "maximum context length is N tokens"."""
    return PromptTooLongError(
        what,
        f"this model's maximum context length is {max_model_len} tokens",
        "Shorten it, or let truncate_prompt_tokens do so.",
    )
