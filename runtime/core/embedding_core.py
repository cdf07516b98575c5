"""The core of an engine for embeddings and scores, the counterpart of `EngineCore`: texts in, vectors out."""

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

    ids: list[int]  # token ids
    second_from: int | None = None  # position of the first token of type 1, which starts the second text; None: none


@dataclass(eq=False, slots=True)
class TextRequest:
    """A text, and the vector that is computed from it. Its only delta says that the vector is computed."""

    sink: OutputSink  # gets the delta
    sequence: TokenSequence  # the tokens of the text
    arrived_at: float  # time of arrival by time.perf_counter, in seconds
    vector: NDArray[np.float32] | None = None  # row of the plan's result, [columns]; None: not computed yet

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the text."""
        return self.sequence.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens from the prefix cache: always 0, since a vector is computed from all tokens."""
        return 0

    @property
    def finished(self) -> bool:
        """True once the vector is computed, or the request is aborted."""
        return self.sequence.finish_reason is not None


class EmbeddingCore:
    """Runs the steps of an engine for embeddings and scores.

    `text` and `stats` may be called from any thread, all other methods from a single one.

    Args:
        engine: the engine.
        config: limits; see RuntimeConfig.
    """

    def __init__(self, engine: Engine, config: RuntimeConfig) -> None:
        self.engine = engine
        if config.kv_events is not None:
            raise UsageError("kv_events is for engines that write", "an embedding model keeps no blocks")
        if config.kv_cache_disk is not None:
            raise UsageError("kv_cache_disk is for engines that write", "an embedding model keeps nothing")
        if config.shares_kv_cache:
            raise UsageError("kv_cache_remote is for engines that write", "an embedding model keeps no blocks")
        if config.kv_role is not None:
            raise UsageError("kv_role is for engines that write", "an embedding model keeps no blocks")
        _ = engine.tokenizer, engine.embedding  # Read now, since the file may be changed later.
        self.executor = open_executor(engine, config)
        try:
            self._open(engine, config)
        except BaseException:
            self.executor.close()
            raise

    def _open(self, engine: Engine, config: RuntimeConfig) -> None:
        """Opens what uses the executor."""
        self._scheduler = Scheduler(
            engine.plan.caches,
            self.executor.memory_plan.limits,
            self.executor.memory_plan.num_blocks,
            chunk=config.prefill_chunk_size,
            cost=PromptCost(engine.plan).at,
            whole_texts=engine.plan.whole_texts,
        )
        self._requests: dict[TokenSequence, TextRequest] = {}
        self._counts = StepCounts(self._scheduler, self.executor.memory_plan)

    def close(self) -> None:
        """Releases memory and threads."""
        self.executor.close()

    max_loras: int | None = None  # embedding models have no adapters

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a text."""
        return self.executor.memory_plan.max_model_len

    @property
    def has_work(self) -> bool:
        """True as long as `step` has something to do."""
        return self._scheduler.num_unfinished > 0

    def stats(self) -> Stats:
        """Statistics of the engine; the numbers may be one step apart from each other."""
        return self._counts.stats()

    def request(self, *arguments: object, **options: object) -> Request:
        """Raises UsageError, since such an engine generates no text."""
        refuse_answers(self.engine)
        raise AssertionError("an engine that writes has another core")

    def text(self, tokens: TextTokens, sink: OutputSink, work: WorkClass = DEFAULT_WORK) -> TextRequest:
        """Creates a request that can be added.

        Args:
            tokens: the text, or the pair of texts.
            sink: gets the delta.
            work: class of work of the request.

        Raises:
            UsageError: the text is empty, too long, or has a token id that is not in the vocabulary.
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
        """Queues a request that `text` has created."""
        self._requests[request.sequence] = request
        self._scheduler.add(request.sequence)

    def abort(self, request: TextRequest) -> list[tuple[TextRequest, Delta]]:
        """Ends a request and returns its last delta; nothing if it has ended before."""
        if self._requests.pop(request.sequence, None) is None:
            return []
        self._scheduler.finish(request.sequence, "abort")
        return [(request, Delta(0, "", (), "abort"))]

    def step(self) -> list[tuple[TextRequest, Delta]]:
        """Runs one step; returns the requests that it has completed, each with its delta."""
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
    """Opens the core for an engine: an EngineCore if it generates text, else an EmbeddingCore.

    Args:
        engine: the engine.
        config: limits; see RuntimeConfig.
    """
    return EngineCore(engine, config) if engine.plan.generates else EmbeddingCore(engine, config)


def too_long(what: str, max_model_len: int) -> PromptTooLongError:
    """Creates the error for a text that is too long.

    Args:
        what: names the text and its length.
        max_model_len: maximum number of tokens. Clients look for the words "maximum context length is N tokens".
    """
    return PromptTooLongError(
        what,
        f"this model's maximum context length is {max_model_len} tokens",
        "Shorten it, or let truncate_prompt_tokens do so.",
    )
