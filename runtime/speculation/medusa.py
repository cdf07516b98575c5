"""Medusa heads (builder/heads/medusa.py): each head predicts one of several draft tokens from the same hidden state.

The plan of the heads runs on a sequence that starts again at position 0 with each hidden state of the model. Position i
stands for head i, whose logits give draft token i. The heads read no tokens, and have no caches.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from enginewright.runtime.speculation.draft import ModelProposer
from enginewright.runtime.speculation.hidden_states import HiddenStates
from enginewright.runtime.speculation.runner import UNKNOWN, CatchUp, DraftRunner
from enginewright.runtime.step.inputs import StepOutputs
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.step_plan import StepPlan


class MedusaModel(ModelProposer):
    """Proposes draft tokens by Medusa heads.

    Args:
        runner: runs the heads.
    """

    def __init__(self, runner: DraftRunner) -> None:
        super().__init__(runner)
        # For each sequence, hidden states of its last step, [positions, columns], and the position of the first one.
        self._hidden: dict[TokenSequence, tuple[int, NDArray[np.float32]]] = {}

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        hidden, end = np.asarray(outputs.hidden), 0
        for part in plan.scheduled:
            end += part.num_tokens
            if part.num_logit_rows and part.sequence.is_running and not part.sequence.is_beam:
                rows = hidden[end - part.num_logit_rows : end].copy()
                self._hidden[part.sequence] = part.end - part.num_logit_rows, rows

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [None if self._last_hidden(sequence) is None else UNKNOWN for sequence in sequences]

    def end(self, sequence: TokenSequence) -> None:
        self._hidden.pop(sequence, None)
        super().end(sequence)

    def _last_hidden(self, sequence: TokenSequence) -> NDArray[np.float32] | None:
        """Hidden state at the last token but one, from which the model sampled the last one; None: not known."""
        first, rows = self._hidden.get(sequence, (0, ()))
        row = len(sequence.token_ids) - 2 - first
        return rows[row] if 0 <= row < len(rows) else None

    def _catch_up(self, sequence: TokenSequence) -> CatchUp:
        """Rows of all heads: 1 in the column of the head, the hidden state in the last columns, and 0 elsewhere."""
        hidden = self._last_hidden(sequence)
        assert hidden is not None, "nothing is drafted for a sequence whose hidden state is not known"
        rows = np.zeros((self.runner.max_model_len, self.runner.hidden_columns), np.float32)
        np.fill_diagonal(rows, 1.0)
        rows[:, -len(hidden) :] = hidden
        return CatchUp(sequence, 0, [0], HiddenStates(rows=list(rows)))
