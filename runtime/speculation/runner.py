"""Runs a draft model on sequences of its own, in caches of its own, and samples draft tokens.

A proposer says which verified tokens a draft sequence lacks (`CatchUp`). The runner rolls the sequence back to what is
still right, reads the tokens, and then extends the sequence by a draft run, one token in each step.

The draft model samples with the same noise and by the same rules as the model will. A draft token is accepted wherever
this noise selects the same token from the probabilities of both models (https://arxiv.org/abs/2408.07978).
"""

import math
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import HIDDEN_BEFORE
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import DraftRow, SamplingRequest
from enginewright.runtime.sampling.sampler import Logits, SampledToken, Sampler
from enginewright.runtime.speculation.hidden_states import HiddenStates
from enginewright.runtime.speculation.proposer import DraftToken
from enginewright.runtime.step.inputs import StepInputs
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
# Initial acceptance rates of UNKNOWN and of the levels 1 to 7. Measured with Qwen2.5-Coder 0.5B as draft model of 1.5B;
# code and prose give the same (benchmarks/coupling.py).
FIRST_RATES = (0.8, 0.35, 0.53, 0.64, 0.81, 0.94, 0.99, 0.99)


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The verified tokens that a draft sequence lacks."""

    target: TokenSequence  # the model's sequence
    first: int  # position of the first of these tokens; what the draft model has computed before it is still right
    token_ids: Sequence[int]  # tokens from `first` on, which replace those that the draft sequence has
    hidden: HiddenStates = field(default_factory=HiddenStates)  # hidden states to read with the draft sequence


@dataclass(eq=False, slots=True)
class DraftSequence:
    """The draft model's sequence for a sequence of the model: verified tokens, and then a draft run."""

    target: TokenSequence  # the model's sequence
    tokens: TokenSequence  # the draft model's tokens, and what they hold of its caches
    hidden: HiddenStates  # hidden states that the plan reads with the tokens
    num_verified: int = 0  # number of its tokens before the draft run
    rollback_position: int = 0  # position that its caches can be rolled back to during the draft run
    drafting: bool = False  # true while its draft run may get another token

    @property
    def num_computed(self) -> int:
        """Number of tokens that the draft model has read."""
        return self.tokens.state.num_computed_tokens

    @property
    def num_unread(self) -> int:
        """Number of tokens that the draft model has not read."""
        return len(self.tokens.token_ids) - self.num_computed

    @property
    def draft_tokens(self) -> list[int]:
        """Token ids of the draft run."""
        return self.tokens.token_ids[self.num_verified :]

    def append(self, token: SampledToken) -> DraftToken | None:
        """Appends a sampled token to the draft run, which ends with NaN or with a token that ends the answer.

        Args:
            token: the sampled token, with its log-probability.

        Returns:
            The draft token; None if nothing could be sampled.
        """
        self.drafting = not token.is_nan and token.token not in self.target.stop_token_ids
        if token.is_nan:
            return None
        self.tokens.token_ids.append(token.token)
        if self.target.grammar is not None:
            self.target.grammar.look(self.draft_tokens)  # its masks are computed while the draft model runs
        assert token.logprob is not None, "its row asks for it"
        return DraftToken(token.token, 1 + bisect(LEVELS, math.exp(token.logprob)))


class DraftRunner:
    """Schedules, packs and runs the steps of a draft model.

    A sequence for which its caches have no free blocks gets no draft tokens. A long prompt is read in chunks, one in
    each step, before the first draft token.

    Args:
        executor: runs the plan of the draft model.
        cost: time of its steps.
    """

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self.executor, self.cost = executor, cost
        plan, memory = executor.plan, executor.memory_plan
        self.max_tokens, self.max_model_len = memory.limits.tokens, memory.max_model_len
        # Number of columns of the hidden states that the plan reads; 0 if it reads none.
        self.hidden_columns = plan.buffers[plan.given[HIDDEN_BEFORE]].columns if plan.given else 0
        self.drafts: dict[TokenSequence, DraftSequence] = {}  # by the model's sequence
        self._cache = Cache(plan.caches, memory.num_blocks, memory.limits.tokens, memory.limits.sequences)
        self._packer = Packer(plan.caches, memory.limits)
        self._sampler = Sampler(executor.draw)
        self._num_groups = len(plan.caches)
        self._copies = self._nothing()  # copies of cache blocks before the next step, by cache group
        self._measure()

    def catch_up(self, updates: Sequence[CatchUp]) -> list[DraftSequence]:
        """Brings draft sequences up to date, and runs one step on those with many unread tokens.

        Args:
            updates: verified tokens, one entry for each sequence.

        Returns:
            The draft sequences. Those for which there are no free blocks are left out.
        """
        for preempted in [target for target in self.drafts if not target.is_running]:
            self.end(preempted)
        ready = [draft for one in updates if (draft := self._update(one)) is not None]
        # A rollback returns to the start of the draft run, which needs at least one computed token before it.
        self._read([one for one in ready if one.num_unread > MAX_UNREAD_TOKENS or not one.num_computed])
        return ready

    def begin(self, updates: Sequence[CatchUp]) -> None:
        """Brings draft sequences up to date, and starts the draft runs of those that have few unread tokens now.

        Args:
            updates: verified tokens, one entry for each sequence.
        """
        budget = self.max_tokens
        for draft in self.catch_up(updates):
            if draft.num_unread <= min(MAX_UNREAD_TOKENS, budget) and self._checkpoint(draft):
                draft.drafting = True
                budget -= draft.num_unread

    def next_tokens(self, targets: Sequence[TokenSequence]) -> Sequence[DraftToken | None]:
        """Runs one step that samples the next token of draft runs.

        Args:
            targets: the model's sequences.

        Returns:
            A draft token for each of them; None where no draft run was started, or where it ends.
        """
        drafts = [self.drafts[target] for target in targets if target in self.drafts]
        growing = [draft for draft in drafts if draft.drafting and self._grow(draft)]
        sampled = self._sample(growing) if growing else []
        tokens = {draft.target: draft.append(token) for draft, token in zip(growing, sampled, strict=True)}
        return [tokens.get(target) for target in targets]

    def catch_up_s(self, target: TokenSequence, num_verified: int) -> float:
        """Estimated seconds to read a sequence before its first draft token.

        Args:
            target: the model's sequence.
            num_verified: number of tokens that its draft sequence will have before the draft run.
        """
        draft = self.drafts.get(target)
        num_computed = 0 if draft is None else draft.num_computed
        return max(num_verified - num_computed - 1, 0) * self.cost.of_token

    def end(self, target: TokenSequence) -> None:
        """Releases the draft sequence of a sequence, if it has one."""
        draft = self.drafts.pop(target, None)
        if draft is not None:
            self._cache.release(draft.tokens.cache.held)
            self._packer.remove(draft.tokens)

    def close(self) -> None:
        """Releases the memory of the draft model."""
        self.executor.close()

    def _nothing(self) -> tuple[list[tuple[int, int]], ...]:
        return tuple([] for _ in range(self._num_groups))

    def _update(self, update: CatchUp) -> DraftSequence | None:
        """Brings a draft sequence up to date; None where there are no free blocks for it."""
        draft = self.drafts.get(update.target) or self._open(update)
        if draft is None:
            return None
        tokens, draft.drafting = draft.tokens, False
        tokens.token_ids[update.first :] = update.token_ids
        draft.num_verified = len(tokens.token_ids)
        # The last token is read by the draft run, whose first draft token needs its logits.
        kept = min(tokens.state.num_computed_tokens, update.first, draft.num_verified - 1)
        tokens.state.num_computed_tokens = self._cache.roll_back(
            tokens.cache.held, draft.num_computed, kept, self._copies
        )
        draft.hidden = update.hidden
        draft.hidden.drop_before(draft.num_computed)
        return draft if self._grow(draft) else None

    def _open(self, update: CatchUp) -> DraftSequence | None:
        """Opens a draft sequence without tokens; None if there are no free blocks for those of the update."""
        held = self._cache.admit(len(update.token_ids), copies=self._copies)
        if held is None:
            return None
        tokens = TokenSequence([], 0, self.max_model_len)
        tokens.cache.held = held
        self._packer.place(tokens)
        draft = self.drafts[update.target] = DraftSequence(update.target, tokens, update.hidden)
        return draft

    def _grow(self, draft: DraftSequence) -> bool:
        """Reserves blocks for all tokens; False if there are none, or if the sequence has become too long."""
        length = len(draft.tokens.token_ids)
        return length <= self.max_model_len and self._cache.grow(draft.tokens.cache.held, length)

    def _checkpoint(self, draft: DraftSequence) -> bool:
        """Makes a checkpoint before the draft run, for the rollback after it; False if there are no free blocks."""
        draft.rollback_position = draft.num_computed
        return self._cache.checkpoint(draft.tokens.cache.held, draft.rollback_position, self._copies)

    def _read(self, drafts: Sequence[DraftSequence]) -> None:
        """Runs one step on unread tokens, up to the token budget, except for the last token of each sequence."""
        counts, budget = dict[DraftSequence, int](), self.max_tokens
        for draft in drafts:
            count = min(draft.num_unread - 1, budget)
            if count:
                counts[draft], draft.rollback_position = count, draft.num_computed
                budget -= count
        if counts:
            began = time.perf_counter()
            self._run(counts, 0)
            self.cost.learn(self.max_tokens - budget, time.perf_counter() - began)

    def _sample(self, drafts: Sequence[DraftSequence]) -> list[SampledToken]:
        """Reads all unread tokens of draft runs, and samples the next token of each."""
        began, counts = time.perf_counter(), {draft: draft.num_unread for draft in drafts}
        logits = self._run(counts, 1)
        requests = [DraftRow(one.target.request, one.draft_tokens) for one in drafts if one.target.request]
        sampled = self._sampler.sample(logits, requests)
        if all(count == 1 for count in counts.values()):
            self.cost.learn(len(counts), time.perf_counter() - began)
        return [
            token if request.mask_known else SampledToken(0, is_nan=True)
            for token, request in zip(sampled, requests, strict=True)
        ]

    def _run(self, counts: Mapping[DraftSequence, int], num_logit_rows: int) -> Logits:
        """Runs one step.

        Args:
            counts: number of tokens to read of each draft sequence.
            num_logit_rows: 1 for logits after the last of these tokens, or 0.

        Returns:
            The logits, [draft sequences, vocab_size] if `num_logit_rows` is 1.
        """
        new: tuple[list[int], ...] = tuple([] for _ in range(self._num_groups))
        parts: list[ScheduledTokens] = []
        hidden: list[NDArray[np.float32]] = []
        for draft, count in counts.items():
            tokens, first = draft.tokens, draft.num_computed
            parts.append(ScheduledTokens(tokens, first, count, num_logit_rows))
            hidden += draft.hidden.at(first, count)
            # Blocks that leave a sliding window during the draft run are kept, since a rollback needs them again.
            self._cache.extend(tokens.cache.held, draft.rollback_position, first + count, new, self._copies)
            tokens.state.num_computed_tokens += count
        sizes, arrays = self._packer.pack(parts, 0, parts)
        copies, self._copies = self._copies, self._nothing()
        inputs = StepInputs(sizes, arrays, copies, new, np.stack(hidden) if hidden else None)
        outputs = self.executor.run(inputs)
        if outputs.hidden is not None and num_logit_rows:
            # The draft token that follows is read with the draft model's own hidden state, in the last columns.
            for draft, own in zip(counts, np.asarray(outputs.hidden)[arrays["logit_rows"]], strict=True):
                row = np.zeros(self.hidden_columns, np.float32)
                row[-len(own) :] = own
                draft.hidden.rows.append(row)
        return outputs.logits

    def _measure(self) -> None:
        """Measures the time of a step of the draft model."""
        request = SamplingRequest(SamplingParams(temperature=0), [0], self.executor.plan.vocab_size)
        target = TokenSequence([0], 1, self.max_model_len, request=request)
        rows = list(np.zeros((WARM_UP + 1, self.hidden_columns), np.float32)) if self.hidden_columns else []
        draft = self._update(CatchUp(target, 0, [0], HiddenStates(rows=rows)))
        if draft is None:
            return
        # Not measured: it reads the weights from disk, which later steps find in memory.
        self._run({draft: 1}, 1)
        draft.tokens.token_ids.append(0)
        for _ in range(WARM_UP):
            if self._grow(draft):
                draft.rollback_position = draft.num_computed
                self._sample([draft])
                draft.tokens.token_ids.append(0)
        self.end(target)
