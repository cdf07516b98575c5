"""Decode-only steps: the same sequences as in the step before, each one position further."""

from collections.abc import Sequence

from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.step.inputs import StepInputs
from enginewright.runtime.step.packer import Packer
from enginewright.runtime.step.step_plan import StepPlan


class RepeatedDecodes:
    """A step that decodes one token of each running sequence, and the steps that repeat it at later positions.

    Args:
        first: the plan of the first step.
        stride: number of positions after which a sequence may need a new block.
    """

    def __init__(self, first: StepPlan, stride: int) -> None:
        self.first = first
        self._stride = stride  # a sequence begins a block where its position is a multiple of it
        self._states = [sequence.state for sequence in first.rows.sequences]
        self._num_planned = 0  # steps after the first
        # Number of repeats after which a sequence, or several, end by their length.
        self._max_repeats = min(sequence.max_tokens - sequence.state.num_tokens for sequence in first.rows.sequences)
        self._growing: dict[int, list[int]] = {}  # rows whose token is the first of a block, by step modulo the stride
        for row, sequence in enumerate(first.rows.sequences):
            self._growing.setdefault((1 - sequence.state.num_computed_tokens) % stride, []).append(row)

    @property
    def are_over(self) -> bool:
        """True if the step cannot be repeated again, since a sequence ends by its length."""
        return self._num_planned == self._max_repeats

    def growing_next(self) -> Sequence[int]:
        """Rows that begin a block in the next step."""
        return self._growing.get((self._num_planned + 1) % self._stride, ())

    def plan_next(
        self,
        packer: Packer,
        growing: Sequence[int],
        new_blocks: tuple[list[int], ...],
        copies: tuple[Copies, ...],
    ) -> StepPlan:
        """Plans the next step. The blocks that it writes are allocated already.

        Args:
            packer: holds the arrays of the step before.
            growing: rows that begin a block, from `growing_next`.
            new_blocks: blocks to zero before the step, by cache group.
            copies: copies of blocks to make before the step, by cache group.
        """
        first, sequences = self.first, self.first.rows.sequences
        sizes, arrays = packer.advance(sequences, growing)
        for state in self._states:
            state.num_computed_tokens += 1
            state.num_tokens += 1
        self._num_planned += 1
        return StepPlan(
            StepInputs(sizes, arrays, copies, new_blocks),
            first.first_scheduled,
            first.num_decodes,
            first.rows,
            num_repeats=self._num_planned,
        )
