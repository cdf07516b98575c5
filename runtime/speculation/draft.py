"""Draft tokens by a draft model: a smaller model in the same engine, or the first layers of the model itself.

The draft model samples with the same noise and by the same rules as the model will. A draft token is accepted wherever
this noise selects the same token from the probabilities of both models (https://arxiv.org/abs/2408.07978).
"""

import math
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.devices import Executor, open_executor
from enginewright.runtime.device.memory_plan import sequence_bytes
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import DraftRow, SamplingRequest
from enginewright.runtime.sampling.sampler import Logits, SampledToken, Sampler
from enginewright.runtime.speculation.proposer import DraftToken, Proposer
from enginewright.runtime.step.inputs import StepInputs, StepOutputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_plan import ScheduledTokens

# Number of unread tokens up to which the draft model reads a sequence together with its draft run; more than these are
# read in steps of their own.
MAX_UNREAD_TOKENS = 32
WARM_UP = 4  # number of steps that measure the time of a step of the draft model
UNKNOWN = 0  # level of confidence in a draft token that is not sampled yet
LEVELS = (0.25, 0.5, 0.7, 0.85, 0.95, 0.99)  # minimum probabilities of a draft token for the levels 2 to 7


@dataclass(eq=False, slots=True)
class Row:
    """The draft run of one sequence while it grows."""

    sequence: TokenSequence  # the model's sequence
    own: TokenSequence  # the draft model's sequence
    draft_tokens: list[int] = field(default_factory=list)  # token ids sampled so far
    ended: bool = False  # true after a token that ends the sequence, or where nothing can be sampled yet

    def take(self, token: SampledToken) -> DraftToken | None:
        """Appends a sampled token to the draft run.

        Args:
            token: the sampled token, with its log-probability.

        Returns:
            The draft token; None if nothing could be sampled.
        """
        self.ended = token.is_nan or token.token in self.sequence.stop_token_ids
        if token.is_nan:
            return None
        self.draft_tokens.append(token.token)
        self.own.token_ids.append(token.token)
        request = self.sequence.request
        if request is not None and request.grammar is not None:
            request.grammar.look(self.draft_tokens)  # its masks are computed while the draft model runs
        assert token.logprob is not None, "its row asks for it"
        return DraftToken(token.token, 1 + bisect(LEVELS, math.exp(token.logprob)))


class DraftModel(Proposer):
    """Proposes draft tokens by a second plan of the engine, which has KV caches of its own.

    A sequence for which these caches have no free blocks gets no draft tokens. A long prompt is read in chunks, one in
    each step, before the first draft token.

    Args:
        executor: runs the plan of the draft model.
        cost: time of its steps.
    """

    # Measured with Qwen2.5-Coder 0.5B as draft model of 1.5B; code and prose give the same (benchmarks/coupling.py).
    first_rates = (0.8, 0.35, 0.53, 0.64, 0.81, 0.94, 0.99, 0.99)

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self._executor, self._cost = executor, cost
        plan, memory = executor.plan, executor.memory_plan
        self._limits, self._longest = memory.limits, memory.max_model_len
        self._cache = Cache(plan.caches, memory.num_blocks, memory.limits.tokens, memory.limits.sequences)
        self._packer = Packer(plan.caches, memory.limits)
        self._sampler = Sampler(executor.draw)
        self._num_groups = len(plan.caches)
        self._copies = self._nothing()  # copies of cache blocks before the next step, by cache group
        self._own: dict[TokenSequence, TokenSequence] = {}  # the draft model's sequences, by the model's
        self._rows: dict[TokenSequence, Row] = {}  # draft runs of this step, by the model's sequence
        self._begun: dict[TokenSequence, int] = {}  # rollback positions, by the draft model's sequence
        self._measure()

    @classmethod
    def open(cls, role: str, engine: Engine, config: RuntimeConfig, executor: Executor) -> Self:
        """Opens a draft model whose KV caches hold as many tokens as those of the model.

        Args:
            role: role of the draft model in the engine.
            engine: the engine.
            config: limits of the model.
            executor: runs the model itself.

        Raises:
            UsageError: the engine has no draft model in this role.
        """
        draft, limits = engine.for_role(role), config_of_draft(role, engine, config, executor.memory_plan.kv_bytes)
        return cls(open_executor(draft, limits, executor.weights), StepCost.of(draft))

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [UNKNOWN if len(sequence.token_ids) < self._longest else None for sequence in sequences]

    def begin(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in [one for one in self._own if not one.is_running]:
            self.end(sequence)
        followed = {sequence: self._follow(sequence) for sequence in sequences}
        ready = [one for one in followed.values() if one is not None]
        # A rollback returns to the start of the draft run, which needs at least one computed token before it.
        self._read([one for one in ready if _num_unread(one) > MAX_UNREAD_TOKENS or not one.num_computed_tokens])
        self._rows, self._begun = {}, {}
        room = self._limits.tokens
        for sequence, own in followed.items():
            if own is not None and _num_unread(own) <= min(MAX_UNREAD_TOKENS, room) and self._mark(own):
                room -= _num_unread(own)
                self._begun[own] = own.num_computed_tokens
                self._rows[sequence] = Row(sequence, own)

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        wanted = [self._rows[sequence] for sequence in sequences if sequence in self._rows]
        going = [row for row in wanted if not row.ended and self._grow(row.own)]
        sampled = self._sample(going, self._begun) if going else []
        draft_tokens = {row.sequence: row.take(token) for row, token in zip(going, sampled, strict=True)}
        return [draft_tokens.get(sequence) for sequence in sequences]

    def catch_up_s(self, sequence: TokenSequence) -> float:
        return max(self._num_unread(sequence) - 1, 0) * self._cost.of_token

    @property
    def cost_s(self) -> tuple[float, float]:
        return self._cost.fixed, self._cost.of_token

    def end(self, sequence: TokenSequence) -> None:
        own = self._own.pop(sequence, None)
        if own is not None:
            self._release(own)

    def close(self) -> None:
        self._executor.close()

    def _num_unread(self, sequence: TokenSequence) -> int:
        own = self._own.get(sequence)
        return len(sequence.token_ids) - (0 if own is None else own.num_computed_tokens)

    def _nothing(self) -> tuple[list[tuple[int, int]], ...]:
        return tuple([] for _ in range(self._num_groups))

    def _open(self, token_ids: Sequence[int]) -> TokenSequence | None:
        """Opens a sequence of which nothing is computed; None if there are no free blocks."""
        held = self._cache.admit(len(token_ids), copies=self._copies)
        if held is None:
            return None
        own = TokenSequence(list(token_ids), len(token_ids), self._longest)
        own.held = held
        self._packer.place(own)
        return own

    def _release(self, own: TokenSequence) -> None:
        self._cache.release(own.held)
        own.held = []
        self._packer.remove(own)

    def _follow(self, sequence: TokenSequence) -> TokenSequence | None:
        """Brings the draft model's sequence up to date with the model's; None where there are no free blocks for it."""
        own, known = self._own.get(sequence), sequence.token_ids
        if own is None:
            own = self._open(known)
            if own is not None:
                self._own[sequence] = own
            return own
        same = own.num_prompt_tokens  # number of tokens that were known at the last draft run
        while same < min(len(own.token_ids), len(known)) and own.token_ids[same] == known[same]:
            same += 1
        computed = own.num_computed_tokens
        own.num_computed_tokens = self._cache.roll_back(
            own.held, computed, min(computed, same, len(known) - 1), self._copies
        )
        own.token_ids[same:] = known[same:]
        own.num_prompt_tokens = len(known)
        return own if self._grow(own) else None

    def _grow(self, own: TokenSequence) -> bool:
        return len(own.token_ids) <= self._longest and self._cache.grow(own.held, len(own.token_ids))

    def _mark(self, own: TokenSequence) -> bool:
        """Makes a checkpoint before the draft run, to which the sequence can be rolled back; False: no free blocks."""
        return self._cache.checkpoint(own.held, own.num_computed_tokens, self._copies)

    def _read(self, sequences: Sequence[TokenSequence]) -> None:
        """Runs one step on sequences with many unread tokens, up to the token budget.

        The last token of each is left for the draft run, whose first draft token needs its logits.
        """
        parts, room = [], self._limits.tokens
        for own in sequences:
            count = min(_num_unread(own) - 1, room)
            if count:
                parts.append(ScheduledTokens(own, own.num_computed_tokens, count, 0))
                room -= count
        if parts:
            began = time.perf_counter()
            self._run(parts, {})
            self._cost.learn(self._limits.tokens - room, time.perf_counter() - began)

    def _sample(self, rows: Sequence[Row], begun: Mapping[TokenSequence, int]) -> list[SampledToken]:
        """Samples the next token of each draft run.

        Args:
            rows: the draft runs.
            begun: rollback positions, by the draft model's sequence.
        """
        began = time.perf_counter()
        parts = [ScheduledTokens(row.own, row.own.num_computed_tokens, _num_unread(row.own), 1) for row in rows]
        logits = self._run(parts, begun)
        requests = [DraftRow(row.sequence.request, row.draft_tokens) for row in rows if row.sequence.request]
        sampled = self._sampler.sample(logits, requests)
        if all(part.num_tokens == 1 for part in parts):
            self._cost.learn(len(parts), time.perf_counter() - began)
        return [
            token if request.mask_known else SampledToken(0, is_nan=True)
            for token, request in zip(sampled, requests, strict=True)
        ]

    def _run(self, parts: Sequence[ScheduledTokens], begun: Mapping[TokenSequence, int]) -> Logits:
        new: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
        for part in parts:
            # Blocks that leave a sliding window during the draft run are kept, since a rollback needs them again.
            first = begun.get(part.sequence, part.first)
            self._cache.extend(part.sequence.held, first, part.end, new, self._copies)
            part.sequence.num_computed_tokens = part.end
        sizes, arrays = self._packer.pack(parts, 0, parts)
        copies, self._copies = self._copies, self._nothing()
        outputs = self._executor.run(StepInputs(sizes, arrays, copies, new, self._hidden_before(parts)))
        self._ran(parts, outputs)
        return outputs.logits

    def _hidden_before(self, parts: Sequence[ScheduledTokens]) -> NDArray[np.float32] | None:
        """Hidden states that the plan reads with these tokens; None if it reads none."""
        return None

    def _ran(self, parts: Sequence[ScheduledTokens], outputs: StepOutputs) -> None:
        """Receives the outputs of a finished step."""

    def _measure(self) -> None:
        """Measures the time of a step of the draft model."""
        own = self._open([0])
        if own is None:
            return
        request = SamplingRequest(SamplingParams(temperature=0), [0], self._executor.plan.vocab_size)
        self._run(
            [ScheduledTokens(own, 0, 1, 1)], {}
        )  # Not measured: it reads the weights from disk, which later steps find in memory.
        own.token_ids.append(0)
        for _ in range(WARM_UP):
            if self._grow(own):
                self._sample([Row(TokenSequence([0], 1, 2, request=request), own)], {})
                own.token_ids.append(0)
        self._release(own)


def _num_unread(own: TokenSequence) -> int:
    """Number of tokens of a sequence that are known and not computed."""
    return len(own.token_ids) - own.num_computed_tokens


def config_of_draft(role: str, engine: Engine, config: RuntimeConfig, kv_bytes: int | None = None) -> RuntimeConfig:
    """Limits of a draft model.

    Args:
        role: role of the draft model in the engine.
        engine: the engine.
        config: limits of the model.
        kv_bytes: bytes of the model's KV caches; None: not known yet.

    Raises:
        UsageError: the engine has no draft model in this role.
    """
    length = config.max_model_len or engine.plan.max_seq_len
    return replace(
        config,
        max_model_len=min(length, engine.for_role(role).plan.max_seq_len),
        max_logit_rows=config.max_num_seqs,
        # A draft model without caches takes no memory for them, but a limit has to be at least 1.
        kv_cache_memory=None if kv_bytes is None else max(int(kv_bytes_of_draft(role, engine, config, kv_bytes)), 1),
    )


def kv_bytes_of_draft(role: str, engine: Engine, config: RuntimeConfig, kv_bytes: float) -> float:
    """Bytes of the draft model's KV caches, for which both models can hold the same number of tokens.

    Args:
        role: role of the draft model in the engine.
        engine: the engine.
        config: limits of the model.
        kv_bytes: bytes of the model's KV caches.

    Raises:
        UsageError: the engine has no draft model in this role.
    """
    length = config.max_model_len or engine.plan.max_seq_len
    own, its = (
        sequence_bytes(plan.caches, length, config.max_num_batched_tokens)
        for plan in (engine.plan, engine.for_role(role).plan)
    )
    return kv_bytes * its / own
