"""Draft heads: small models that predict draft tokens from the hidden states of the model.

They are MTP layers (builder/models/blocks/mtp.py) and EAGLE-3 heads (builder/heads/eagle.py).

Token i of the head's sequence is token i + 1 of the model's, and is read together with the model's hidden state i.
During a draft run, the head's own hidden states replace the model's. Once the draft tokens are verified, the head reads
the accepted tokens again, with the model's hidden states.
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
    """Hidden states of a sequence that the head has still to read.

    Positions that come from the prefix cache have no hidden states. The head's sequence starts after these, at the
    first position that a step has computed.
    """

    first: int  # position in the model's sequence of the hidden state that the head's first token is read with
    begin: int  # position of the first row that is kept
    rows: list[Row] = field(default_factory=list)  # one hidden state for each position, each [columns]
    end: int = 0  # position after the last row of the model; rows from there on are the head's own

    def put(self, position: int, rows: NDArray[np.float32]) -> None:
        """Adds rows that the model has computed. They replace known rows at the same positions, and all rows after.

        Args:
            position: position of the first row, at most `end`.
            rows: hidden states, [positions, columns].
        """
        known = max(self.begin - position, 0)
        if known < len(rows):
            del self.rows[position + known - self.begin :]
            self.rows += list(rows[known:])
            self.end = position + len(rows)

    def keep(self, begin: int, end: int) -> None:
        """Drops all rows but those of the positions from `begin` up to `end`, without `end`."""
        self.rows = self.rows[begin - self.begin : end - self.begin]
        self.begin = begin

    def of(self, part: ScheduledTokens) -> list[Row]:
        """Rows that the head reads with some tokens of its sequence."""
        start = self.first + part.first - self.begin
        return self.rows[start : start + part.num_tokens]


class HeadModel(DraftModel):
    """Proposes draft tokens by a plan that reads hidden states, and outputs its own.

    In a row that the plan reads, the first columns are the model's hidden state, or the last columns are the head's
    own; both may be the same columns. The other columns are zero.
    """

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self._states: dict[TokenSequence, HiddenStates] = {}  # by the model's sequence
        self._read_by: dict[TokenSequence, HiddenStates] = {}  # the same objects, by the head's sequence
        self._columns = executor.plan.buffers[executor.plan.given[HIDDEN_BEFORE]].columns
        super().__init__(executor, cost)

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        shown, row = np.asarray(outputs.hidden), 0
        for part in plan.scheduled:
            if len(part.sequence.token_ids) >= self._longest:  # there is no space for draft tokens
                self.end(part.sequence)
            elif part.sequence.is_running and not part.sequence.is_beam:
                rows = np.zeros((part.num_tokens, self._columns), np.float32)
                rows[:, : shown.shape[1]] = shown[row : row + part.num_tokens]
                self._put(part, rows)
            row += part.num_tokens
        # Sequences that get no draft tokens are read from time to time, or their hidden states would fill the memory.
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
        if states is None or part.first > states.end:  # the hidden states between are not known
            self.end(part.sequence)
            states = self._states[part.sequence] = HiddenStates(part.first, part.first)
        states.put(part.first, rows)

    def _num_known(self, sequence: TokenSequence) -> int:
        """Position up to which hidden states and the tokens after them are known; 0 where none are."""
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
            known, computed = own.num_prompt_tokens, own.num_computed_tokens  # tokens from `known` on are draft tokens
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
            if part.num_logit_rows:  # its last token gives a draft token, which is read with this hidden state
                row = np.zeros(self._columns, np.float32)
                row[-shown.shape[1] :] = shown[last]
                self._read_by[part.sequence].rows.append(row)
