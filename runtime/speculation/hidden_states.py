"""Hidden states that the plan of a draft model reads together with its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(eq=False, slots=True)
class HiddenStates:
    """Rows that a draft sequence is read with, one for each of its positions; none if the plan reads no hidden states.

    The model's hidden states come first. A draft head appends its own during a draft run. All positions but `first` are
    those of the draft sequence.
    """

    first: int = 0  # position in the model's sequence of the hidden state that the first token is read with
    rows: list[NDArray[np.float32]] = field(default_factory=list)  # rows of the positions from `begin` on, [columns]
    begin: int = 0  # position of the first row that is kept
    end: int = 0  # position after the last hidden state of the model

    def put(self, position: int, rows: NDArray[np.float32]) -> None:
        """Adds rows that the model has computed. They replace known rows at the same positions, and all rows after.

        Args:
            position: position of the first row, at most `end`. Rows before `begin` are ignored.
            rows: rows to add, [positions, columns].
        """
        num_ignored = max(self.begin - position, 0)
        if num_ignored < len(rows):
            self.truncate(position + num_ignored)
            self.rows += list(rows[num_ignored:])
            self.end = position + len(rows)

    def truncate(self, end: int) -> None:
        """Drops all rows from a position on."""
        del self.rows[end - self.begin :]
        self.end = min(self.end, end)

    def drop_before(self, begin: int) -> None:
        """Drops all rows before a position."""
        del self.rows[: begin - self.begin]
        self.begin = begin

    def at(self, position: int, count: int) -> Sequence[NDArray[np.float32]]:
        """Rows of `count` positions from `position` on."""
        return self.rows[position - self.begin : position - self.begin + count]
