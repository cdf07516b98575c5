"""What runs in the next step: decodes first, then as much of the prompts as the token budget takes.

plan = scheduler.schedule()
logits = executor.run(plan)
scheduler.commit(plan, sampler.sample(logits, plan.requests))
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import KvGroup, Sizes
from enginewright.runtime.envelope import SPLIT_TOKENS, Envelope
from enginewright.runtime.kv_cache import BlockTable, KvCache
from enginewright.runtime.sampling import SampledToken, SamplingRequest


@dataclass(eq=False)
class Text:
    """One sequence of tokens in the making: a prompt and what was drawn after it.

    token_ids: prompt, then output. max_tokens: of the whole. stop_token_ids: tokens that end it. request: how its
    tokens are drawn; None draws none, and the text ends with its prompt. every_logit: the step gives logits for each
    position, not for the last alone.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    request: SamplingRequest | None = None
    every_logit: bool = False
    num_computed_tokens: int = 0
    tables: list[BlockTable] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "error", "abort"

    @property
    def num_pending_tokens(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True)
class Part:
    """The tokens of one text that a step computes. num_logit_rows: how many of them, from the end, give logits."""

    text: Text
    num_tokens: int
    num_logit_rows: int


@dataclass(frozen=True)
class StepPlan:
    """One step.

    inputs: int32 arrays by the names of the plan's inputs (enginewright/plan.py). new_blocks: KV blocks, a group, that
    a text holds from this step on. Zero them first: kernels read whole blocks, and whoever had one may have left NaN.
    """

    parts: tuple[Part, ...]
    sizes: Sizes
    inputs: dict[str, NDArray[np.int32]]
    new_blocks: tuple[list[int], ...]

    @property
    def requests(self) -> list[SamplingRequest]:
        """Of the texts that get a token, in the order of their rows of logits."""
        return [part.text.request for part in self.drawing if part.text.request is not None]

    @property
    def drawing(self) -> list[Part]:
        return [part for part in self.parts if part.num_logit_rows and part.text.request is not None]


class Scheduler:
    """First come, first served. A text is admitted when the KV cache can hold all of it, and then runs to its end."""

    def __init__(self, groups: Sequence[KvGroup], envelope: Envelope) -> None:
        self._groups = tuple(groups)
        self._limits = envelope.limits
        self._cache = KvCache(groups, envelope.num_blocks, envelope.limits.tokens)
        self._waiting: deque[Text] = deque()
        self._running: list[Text] = []

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        return self._cache.num_free

    def add(self, text: Text) -> None:
        self._waiting.append(text)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing waits or runs."""
        self._admit()
        budget, rows = self._limits.tokens, self._limits.logit_rows
        parts = []
        # Stable: among decodes, and among prompts, the order of arrival.
        for text in sorted(self._running, key=lambda text: text.num_pending_tokens > 1):
            pending = text.num_pending_tokens
            count = min(pending, budget, rows) if text.every_logit else min(pending, budget)
            wanted = count if text.every_logit else int(count == pending)
            if count == 0 or wanted > rows:
                continue
            parts.append(Part(text, count, wanted))
            budget -= count
            rows -= wanted
        return self._pack(parts) if parts else None

    def commit(self, plan: StepPlan, sampled: Sequence[SampledToken]) -> list[Text]:
        """Take up what a step drew, one token for each of `plan.requests`; the texts that ended with it."""
        for part in plan.parts:
            part.text.num_computed_tokens += part.num_tokens
        for part, drawn in zip(plan.drawing, sampled, strict=True):
            text = part.text
            if text.finish_reason is not None:  # by finish(), while the step was computed
                continue
            if drawn.is_nan:
                text.finish_reason = "error"
                continue
            text.token_ids.append(drawn.token)
            if drawn.token in text.stop_token_ids:
                text.finish_reason = "stop"
            elif len(text.token_ids) >= text.max_tokens:
                text.finish_reason = "length"
        for part in plan.parts:
            if part.text.request is None and part.text.num_pending_tokens == 0:
                part.text.finish_reason = part.text.finish_reason or "length"
        return self._retire()

    def finish(self, text: Text, reason: str) -> None:
        """End a text now, wherever it is; its blocks are free again."""
        text.finish_reason = text.finish_reason or reason
        if text in self._waiting:
            self._waiting.remove(text)
        self._retire()

    def _retire(self) -> list[Text]:
        done = [text for text in self._running if text.finish_reason is not None]
        if done:
            self._running = [text for text in self._running if text.finish_reason is None]
            for text in done:
                self._cache.release(text.tables)
        return done

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._limits.sequences:
            text = self._waiting[0]
            tables = self._cache.admit(text.max_tokens)
            if tables is None:
                return
            text.tables = tables
            self._running.append(self._waiting.popleft())

    def _pack(self, parts: Sequence[Part]) -> StepPlan:
        starts = [0, *accumulate(part.num_tokens for part in parts)]
        tokens = np.empty(starts[-1], np.int32)
        positions = np.empty(starts[-1], np.int32)
        kv_len = np.empty(len(parts), np.int32)
        rows: list[int] = []
        new_blocks: tuple[list[int], ...] = tuple([] for _ in self._groups)
        for index, part in enumerate(parts):
            text, first, here = part.text, part.text.num_computed_tokens, slice(starts[index], starts[index + 1])
            end = first + part.num_tokens
            for blocks, taken in zip(new_blocks, self._cache.extend(text.tables, first, end), strict=True):
                blocks += taken
            tokens[here] = text.token_ids[first:end]
            positions[here] = np.arange(first, end, dtype=np.int32)
            kv_len[index] = end
            rows.extend(range(starts[index + 1] - part.num_logit_rows, starts[index + 1]))
        longest = int(kv_len.max())
        sizes = Sizes(
            tokens=starts[-1],
            sequences=len(parts),
            logit_rows=len(rows),
            kv_blocks=max(-(-longest // group.block_size) for group in self._groups),
            kv_splits=-(-longest // SPLIT_TOKENS),
        )
        inputs = {
            "tokens": tokens,
            "positions": positions,
            "query_start": np.array(starts, np.int32),
            "kv_len": kv_len,
            "logit_rows": np.array(rows, np.int32),
        }
        for index, group in enumerate(self._groups):
            table = np.zeros((len(parts), sizes.kv_blocks), np.int32)
            for row, part in enumerate(parts):
                blocks = part.text.tables[index].blocks
                table[row, : len(blocks)] = blocks
            own = np.repeat(np.arange(len(parts)), np.diff(starts))
            block, place = np.divmod(positions, group.block_size)
            inputs[f"slots.{index}"] = (table[own, block] * group.block_size + place).astype(np.int32)
            inputs[f"block_table.{index}"] = table
        return StepPlan(tuple(parts), sizes, inputs, new_blocks)
