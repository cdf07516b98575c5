"""Draft heads: small models that predict draft tokens from the hidden states of the model.

They are MTP layers (builder/models/blocks/mtp.py) and EAGLE-3 heads (builder/heads/eagle.py).

Token i of the head's sequence is token i + 1 of the model's, and is read together with the model's hidden state i.
During a draft run, the head's own hidden states replace the model's. Once the draft tokens are verified, the head reads
the accepted tokens again, with the model's hidden states.
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


class HeadModel(ModelProposer):
    """Proposes draft tokens by a plan that reads hidden states, and outputs its own.

    In a row that the plan reads, the first columns are the model's hidden state, or the last columns are the head's
    own; both may be the same columns. The other columns are zero.

    Positions that come from the prefix cache have no hidden states. The head's sequence starts after these, at the
    first position that a step has computed (`HiddenStates.first`).

    Args:
        runner: runs the head.
    """

    def __init__(self, runner: DraftRunner) -> None:
        super().__init__(runner)
        self._hidden: dict[TokenSequence, HiddenStates] = {}  # hidden states that the head has still to read

    def observe(self, plan: StepPlan, outputs: StepOutputs) -> None:
        for preempted in [one for one in self._hidden if not one.is_running]:
            self.end(preempted)
        hidden, row = np.asarray(outputs.hidden), 0
        for part in plan.scheduled:
            if len(part.sequence.token_ids) >= self.runner.max_model_len:  # there is no space for draft tokens
                self.end(part.sequence)
            elif part.sequence.is_running and not part.sequence.is_beam:
                self._put(part.sequence, part.first, hidden[row : row + part.num_tokens])
            row += part.num_tokens
        # Sequences that get no draft tokens are read from time to time, or their hidden states would fill the memory.
        full = [one for one, states in self._hidden.items() if len(states.rows) > self.runner.max_tokens]
        read = {draft.target for draft in self.runner.catch_up([self._catch_up(one) for one in full])}
        for sequence in full:
            if sequence not in read:
                self.end(sequence)

    def confidences(self, sequences: Sequence[TokenSequence]) -> Sequence[int | None]:
        return [UNKNOWN if self._is_ready(sequence) else None for sequence in sequences]

    def catch_up_s(self, sequence: TokenSequence) -> float:
        return self.runner.catch_up_s(sequence, self._num_known(sequence))

    def end(self, sequence: TokenSequence) -> None:
        self._hidden.pop(sequence, None)
        super().end(sequence)

    def _put(self, sequence: TokenSequence, position: int, hidden: NDArray[np.float32]) -> None:
        """Keeps hidden states that the model has computed.

        Args:
            sequence: the model's sequence.
            position: position of the first hidden state in it.
            hidden: hidden states, [positions, columns].
        """
        states = self._hidden.get(sequence)
        if states is None or position > states.first + states.end:  # the hidden states between are not known
            self.end(sequence)
            states = self._hidden[sequence] = HiddenStates(position)
        rows = np.zeros((len(hidden), self.runner.hidden_columns), np.float32)
        rows[:, : hidden.shape[1]] = hidden
        states.put(position - states.first, rows)

    def _num_known(self, sequence: TokenSequence) -> int:
        """Number of tokens of the head's sequence that are known together with their hidden states."""
        states = self._hidden[sequence]
        return min(states.end, len(sequence.token_ids) - 1 - states.first)

    def _is_ready(self, sequence: TokenSequence) -> bool:
        """True if all hidden states but that of the last token are known, and there is space for a draft token."""
        states, last = self._hidden.get(sequence), len(sequence.token_ids) - 1
        return states is not None and 0 < last - states.first <= states.end and last + 1 < self.runner.max_model_len

    def _catch_up(self, sequence: TokenSequence) -> CatchUp:
        """Verified tokens from the first draft token on: accepted ones are read again, with other hidden states."""
        states, draft = self._hidden[sequence], self.runner.drafts.get(sequence)
        first, end = 0 if draft is None else draft.num_verified, self._num_known(sequence)
        states.truncate(end)
        return CatchUp(sequence, first, sequence.token_ids[states.first + 1 + first : states.first + 1 + end], states)
