"""Medusa heads (builder/heads/medusa.py): each head predicts one of several draft tokens from the same hidden state.

The plan of the heads runs on a sequence that starts again at position 0 with each hidden state of the model. Position i
stands for head i, whose logits give draft token i. The heads read no tokens, and have no caches.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import HIDDEN_BEFORE
from enginewright.runtime.device.devices import Executor
from enginewright.runtime.speculation.draft import DraftModel
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_cost import StepCost
from enginewright.runtime.step.step_plan import ScheduledTokens, StepPlan


class MedusaModel(DraftModel):
    """Proposes draft tokens by Medusa heads.

    The plan reads one row for each draft token: [columns], 1 in the column of its head, the hidden state in the last
    columns, and 0 elsewhere.
    """

    def __init__(self, executor: Executor, cost: StepCost) -> None:
        self._shown: dict[TokenSequence, tuple[int, NDArray[np.float32]]] = {}  # position of the first row, and rows
        self._read_by: dict[TokenSequence, NDArray[np.float32]] = {}  # hidden state, by the heads' sequence
        self._columns = executor.plan.buffers[executor.plan.given[HIDDEN_BEFORE]].columns
        super().__init__(executor, cost)

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        shown, end = np.asarray(outputs.hidden), 0
        for part in plan.scheduled:
            end += part.num_tokens
            if part.num_logit_rows and part.sequence.is_running and not part.sequence.is_beam:
                rows = shown[end - part.num_logit_rows : end].copy()
                self._shown[part.sequence] = part.end - part.num_logit_rows, rows

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [None if self._state(sequence) is None else 0 for sequence in sequences]

    def _num_unread(self, sequence: TokenSequence) -> int:
        return 0  # The heads read no tokens, and the hidden state is known.

    def end(self, sequence: TokenSequence) -> None:
        self._shown.pop(sequence, None)
        super().end(sequence)

    def _state(self, sequence: TokenSequence) -> NDArray[np.float32] | None:
        """Hidden state at the token before the last one, from which the model sampled the last one; None: not known."""
        first, rows = self._shown.get(sequence, (0, ()))
        row = len(sequence.token_ids) - 2 - first
        return rows[row] if 0 <= row < len(rows) else None

    def _follow(self, sequence: TokenSequence) -> TokenSequence | None:
        own, state = self._own.get(sequence), self._state(sequence)
        assert state is not None, "nothing is drafted for a sequence whose state is not known"
        if own is None:
            own = self._open([0])
        if own is None:
            return None
        self._own[sequence], self._read_by[own] = own, state
        own.token_ids[:], own.num_computed_tokens = [0], 0
        return own

    def _release(self, own: TokenSequence) -> None:
        self._read_by.pop(own, None)
        super()._release(own)

    def _hidden_before(self, parts: Sequence[ScheduledTokens]) -> NDArray[np.float32]:
        rows = np.zeros((len(parts), self._columns), np.float32)
        for row, part in zip(rows, parts, strict=True):
            row[part.first] = 1.0
            if (state := self._read_by.get(part.sequence)) is not None:  # there is none while DraftModel measures
                row[-len(state) :] = state
        return rows
