"""A head guesses what comes next from the model's own hidden states: MTP layers (builder/models/blocks/mtp.py) and
EAGLE-3 (builder/heads/eagle.py).

Its token i is the model's token i + 1, read together with the model's hidden state i. Guess by guess, its own hidden
states take the place of the model's; once the guesses are verified, it reads the right tokens again with the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import HIDDEN_BEFORE
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.speculation.draft import DraftModel
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_plan import ScheduledTokens, StepPlan

Row = NDArray[np.float32]  # [columns]


@dataclass(eq=False, slots=True)
class HiddenStates:
    """What is still needed of a sequence's hidden states.

    The first position is the first one that was computed while somebody looked: where a prefix cache has others before
    it, the head begins there.
    """

    first: int  # position of the head's first token
    begin: int  # position of the first row that is kept
    rows: list[Row] = field(default_factory=list)
    end: int = 0  # the position behind the last row that is the model's; those behind it are the head's own

    def put(self, position: int, rows: NDArray[np.float32]) -> None:
        """Rows that the model has computed from `position` on, which is `end` at most; they may be there already."""
        known = max(self.begin - position, 0)
        if known < len(rows):
            del self.rows[position + known - self.begin :]
            self.rows += list(rows[known:])
            self.end = position + len(rows)

    def keep(self, begin: int, end: int) -> None:
        """Positions from `begin` up to `end` alone are of use."""
        self.rows = self.rows[begin - self.begin : end - self.begin]
        self.begin = begin

    def of(self, part: ScheduledTokens) -> list[Row]:
        """What a part of the head's sequence reads."""
        start = self.first + part.first - self.begin
        return self.rows[start : start + part.num_tokens]


class HeadModel(DraftModel):
    """Guesses by a plan that is given hidden states, and shows its own.

    In a row that the plan is given, the model's states are the first columns, and the head's own the last ones, which
    may be the same; the other columns are zero.
    """

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self._states: dict[TokenSequence, HiddenStates] = {}  # by the model's sequences
        self._read_by: dict[TokenSequence, HiddenStates] = {}  # the same, by the head's
        self._columns = executor.plan.buffers[executor.plan.given[HIDDEN_BEFORE]].columns
        super().__init__(executor, cost)

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        shown, row = np.asarray(outputs.hidden), 0
        for part in plan.scheduled:
            if len(part.sequence.token_ids) >= self._longest:  # nothing more is guessed for it
                self.end(part.sequence)
            elif part.sequence.is_running and not part.sequence.is_beam:
                rows = np.zeros((part.num_tokens, self._columns), np.float32)
                rows[:, : shown.shape[1]] = shown[row : row + part.num_tokens]
                self._put(part, rows)
            row += part.num_tokens
        # What guesses do not need soon is read meanwhile, or states would add up.
        full = [one for one, states in self._states.items() if len(states.rows) > self._limits.tokens]
        reading = {sequence: self._follow(sequence) for sequence in full}
        for sequence in [one for one, own in reading.items() if own is None]:
            self.end(sequence)
        self._read([own for own in reading.values() if own is not None])

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        confidences = super().confidences(sequences)
        return [
            confidence if self._num_known(one) == len(one.token_ids) - 1 else None
            for confidence, one in zip(confidences, sequences, strict=True)
        ]

    def end(self, sequence: TokenSequence) -> None:
        self._states.pop(sequence, None)
        super().end(sequence)

    def _put(self, part: ScheduledTokens, rows: NDArray[np.float32]) -> None:
        states = self._states.get(part.sequence)
        if states is None or part.first > states.end:  # what is between is not known
            self.end(part.sequence)
            states = self._states[part.sequence] = HiddenStates(part.first, part.first)
        states.put(part.first, rows)

    def _num_known(self, sequence: TokenSequence) -> int:
        """Positions, from the first one on, whose hidden states and next tokens are known; 0 where there are none."""
        states, last = self._states.get(sequence), len(sequence.token_ids) - 1
        return 0 if states is None or states.first >= last else min(states.end, last)

    def _num_unread(self, sequence: TokenSequence) -> int:
        states, own = self._states.get(sequence), self._own.get(sequence)
        if states is None:
            return 0
        return self._num_known(sequence) - states.first - (0 if own is None else own.num_computed_tokens)

    def _follow(self, sequence: TokenSequence) -> TokenSequence | None:
        end = self._num_known(sequence)
        if not end:
            return None
        states, own = self._states[sequence], self._own.get(sequence)
        if own is None:
            own = self._open(sequence.token_ids[states.first + 1 : end + 1])
            if own is None:
                return None
            self._own[sequence], self._read_by[own] = own, states
        else:
            known, computed = own.num_prompt_tokens, own.num_computed_tokens  # behind `known` it has guessed
            own.token_ids[known:] = sequence.token_ids[states.first + 1 + known : end + 1]
            own.num_prompt_tokens = len(own.token_ids)
            own.num_computed_tokens = self._cache.roll_back(
                own.held, computed, min(computed, known, len(own.token_ids) - 1), self._copies
            )
        states.keep(states.first + own.num_computed_tokens, end)
        return own if self._grow(own) else None

    def _open(self, token_ids: Sequence[int]) -> TokenSequence | None:
        own = super()._open(token_ids)
        if own is not None:
            self._read_by[own] = HiddenStates(0, 0, [np.zeros(self._columns, np.float32)])
        return own

    def _release(self, own: TokenSequence) -> None:
        del self._read_by[own]
        super()._release(own)

    def _hidden_before(self, parts: Sequence[ScheduledTokens]) -> NDArray[np.float32]:
        return np.stack([row for part in parts for row in self._read_by[part.sequence].of(part)])

    def _ran(self, parts: Sequence[ScheduledTokens], outputs: StepOutputs) -> None:
        shown, last = np.asarray(outputs.hidden), -1
        for part in parts:
            last += part.num_tokens
            if part.num_logit_rows:  # a guess comes behind it
                row = np.zeros(self._columns, np.float32)
                row[-shown.shape[1] :] = shown[last]
                self._read_by[part.sequence].rows.append(row)
