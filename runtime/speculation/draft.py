"""A smaller model that the engine holds beside its own, or the first layers of its own, guess what comes next.

It samples its guesses with the noise that the model's own tokens will be sampled with, and by the same rules: a guess
is right wherever both models' probabilities put that noise on the same token (https://arxiv.org/abs/2408.07978).
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

# Tokens that the draft may lack of a sequence and still guess in the same step; more are read in steps of their own.
MOST_BEHIND = 32
WARM_UP = 4  # steps that tell what a step of the draft takes
UNKNOWN = 0  # the confidence of a guess that is not made yet
LEVELS = (0.25, 0.5, 0.7, 0.85, 0.95, 0.99)  # probabilities from which on a guess is of the next level


@dataclass(eq=False, slots=True)
class Row:
    """Guesses for one sequence in the making."""

    sequence: TokenSequence  # the model's
    own: TokenSequence  # the draft's
    draft_tokens: list[int] = field(default_factory=list)
    ended: bool = False  # none comes after a token that ends the sequence, or where nothing can be sampled yet

    def take(self, token: SampledToken) -> DraftToken | None:
        """One guess more."""
        self.ended = token.is_nan or token.token in self.sequence.stop_token_ids
        if token.is_nan:
            return None
        self.draft_tokens.append(token.token)
        self.own.token_ids.append(token.token)
        request = self.sequence.request
        if request is not None and request.grammar is not None:
            request.grammar.look(self.draft_tokens)  # while the draft computes what comes after them
        assert token.logprob is not None, "its row asks for it"
        return DraftToken(token.token, 1 + bisect(LEVELS, math.exp(token.logprob)))


class DraftModel(Proposer):
    """Guesses by a plan beside the engine's own, with caches of its own.

    Where these have no room for a sequence, it guesses nothing for it. A long prompt is read in chunks, one a step,
    before the first guess.

    Args:
        executor: of the draft's plan.
        cost: of its steps.
    """

    # Those of Qwen2.5-Coder 0.5B for 1.5B, which are the same in code and prose (benchmarks/coupling.py).
    first_rates = (0.8, 0.35, 0.53, 0.64, 0.81, 0.94, 0.99, 0.99)

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self._executor, self._cost = executor, cost
        plan, memory = executor.plan, executor.memory_plan
        self._limits, self._longest = memory.limits, memory.max_model_len
        self._cache = Cache(plan.caches, memory.num_blocks, memory.limits.tokens, memory.limits.sequences)
        self._packer = Packer(plan.caches, memory.limits)
        self._sampler = Sampler(executor.draw)
        self._num_groups = len(plan.caches)
        self._copies = self._nothing()  # for the next step
        self._own: dict[TokenSequence, TokenSequence] = {}  # with the draft's caches, by the model's
        self._rows: dict[TokenSequence, Row] = {}  # that guesses are made for now, by the model's
        self._begun: dict[TokenSequence, int] = {}  # the position that each may go back to, by the draft's
        self._measure()

    @classmethod
    def open(cls, role: str, engine: Engine, config: RuntimeConfig, executor: Executor) -> Self:
        """With room for as many tokens as the model that `executor` runs has.

        Args:
            role: of the draft in the engine.

        Raises:
            UsageError: the engine has no draft in this role.
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
        # A state goes back to where the guesses begin, which is behind some token at least.
        self._read([one for one in ready if _behind(one) > MOST_BEHIND or not one.num_computed_tokens])
        self._rows, self._begun = {}, {}
        room = self._limits.tokens
        for sequence, own in followed.items():
            if own is not None and _behind(own) <= min(MOST_BEHIND, room) and self._mark(own):
                room -= _behind(own)
                self._begun[own] = own.num_computed_tokens
                self._rows[sequence] = Row(sequence, own)

    def next_tokens(self, sequences: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        wanted = [self._rows[sequence] for sequence in sequences if sequence in self._rows]
        going = [row for row in wanted if not row.ended and self._grow(row.own)]
        sampled = self._sample(going, self._begun) if going else []
        guesses = {row.sequence: row.take(token) for row, token in zip(going, sampled, strict=True)}
        return [guesses.get(sequence) for sequence in sequences]

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
        """A sequence of which nothing is computed; None if there is no room."""
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
        """The draft's sequence with the tokens that the model's has by now; None where there is no room for it."""
        own, known = self._own.get(sequence), sequence.token_ids
        if own is None:
            own = self._open(known)
            if own is not None:
                self._own[sequence] = own
            return own
        same = own.num_prompt_tokens  # those that were known when it guessed last
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
        """Make ready for guesses, which may be taken back."""
        return self._cache.checkpoint(own.held, own.num_computed_tokens, self._copies)

    def _read(self, behind: Sequence[TokenSequence]) -> None:
        """One step of those that lack many tokens, as far as it goes; the last token is left for the guesses."""
        parts, room = [], self._limits.tokens
        for own in behind:
            count = min(_behind(own) - 1, room)
            if count:
                parts.append(ScheduledTokens(own, own.num_computed_tokens, count, 0))
                room -= count
        if parts:
            began = time.perf_counter()
            self._run(parts, {})
            self._cost.learn(self._limits.tokens - room, time.perf_counter() - began)

    def _sample(self, rows: Sequence[Row], begun: Mapping[TokenSequence, int]) -> list[SampledToken]:
        """A token behind each.

        Args:
            begun: the position that each may go back to.
        """
        began = time.perf_counter()
        parts = [ScheduledTokens(row.own, row.own.num_computed_tokens, _behind(row.own), 1) for row in rows]
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
            # What falls out of a window meanwhile would be missed if the guesses are wrong.
            first = begun.get(part.sequence, part.first)
            self._cache.extend(part.sequence.held, first, part.end, new, self._copies)
            part.sequence.num_computed_tokens = part.end
        sizes, arrays = self._packer.pack(parts, 0, parts)
        copies, self._copies = self._copies, self._nothing()
        outputs = self._executor.run(StepInputs(sizes, arrays, copies, new, self._hidden_before(parts)))
        self._ran(parts, outputs)
        return outputs.logits

    def _hidden_before(self, parts: Sequence[ScheduledTokens]) -> NDArray[np.float32] | None:
        """What the plan is given with these parts, if anything."""
        return None

    def _ran(self, parts: Sequence[ScheduledTokens], outputs: StepOutputs) -> None:
        """A step of these parts is done."""

    def _measure(self) -> None:
        """What a step takes, from some of them."""
        own = self._open([0])
        if own is None:
            return
        request = SamplingRequest(SamplingParams(temperature=0), [0], self._executor.plan.vocab_size)
        self._run(
            [ScheduledTokens(own, 0, 1, 1)], {}
        )  # reads the weights from the disk, which the others find in memory
        own.token_ids.append(0)
        for _ in range(WARM_UP):
            if self._grow(own):
                self._sample([Row(TokenSequence([0], 1, 2, request=request), own)], {})
                own.token_ids.append(0)
        self._release(own)


def _behind(own: TokenSequence) -> int:
    """Tokens that are known and not computed."""
    return len(own.token_ids) - own.num_computed_tokens


def config_of_draft(role: str, engine: Engine, config: RuntimeConfig, kv_bytes: int | None = None) -> RuntimeConfig:
    """Limits of a draft.

    Args:
        config: those of the model.
        kv_bytes: that the model's KV caches take; None: nobody knows yet.

    Raises:
        UsageError: the engine has no draft in this role.
    """
    length = config.max_model_len or engine.plan.max_seq_len
    return replace(
        config,
        max_model_len=min(length, engine.for_role(role).plan.max_seq_len),
        max_logit_rows=config.max_num_seqs,
        # A draft without caches takes none of it, and a limit is 1 at least.
        kv_cache_memory=None if kv_bytes is None else max(int(kv_bytes_of_draft(role, engine, config, kv_bytes)), 1),
    )


def kv_bytes_of_draft(role: str, engine: Engine, config: RuntimeConfig, kv_bytes: float) -> float:
    """What its caches take where those of the model take `kv_bytes`, so that both have room for as many tokens.

    Raises:
        UsageError: the engine has no draft in this role.
    """
    length = config.max_model_len or engine.plan.max_seq_len
    own, its = (
        sequence_bytes(plan.caches, length, config.max_num_batched_tokens)
        for plan in (engine.plan, engine.for_role(role).plan)
    )
    return kv_bytes * its / own
