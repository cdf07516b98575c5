"""Figures of speculation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals of guesses that were verified."""

    num_drafts: int  # sequences, step by step, that had guesses
    guessed: Sequence[int]  # tokens, by their place among the guesses of a sequence
    accepted: Sequence[int]  # of these, those that were right

    @property
    def mean_length(self) -> float:
        """Tokens that a sequence with guesses gets by a step: those that were right, and the one behind them."""
        return 1 + sum(self.accepted) / max(self.num_drafts, 1)

    def after(self, before: "SpeculationStats") -> "SpeculationStats":
        """The same, going on from those of an earlier run."""

        def both(now: Sequence[int], then: Sequence[int]) -> list[int]:
            return [a + b for a, b in zip_longest(now, then, fillvalue=0)]

        return SpeculationStats(
            self.num_drafts + before.num_drafts,
            both(self.guessed, before.guessed),
            both(self.accepted, before.accepted),
        )
