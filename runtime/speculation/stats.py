"""Statistics of speculative decoding."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Totals of the draft tokens that were verified."""

    num_drafts: int  # number of draft runs: a sequence that has draft tokens in a step counts once for each such step
    drafted: Sequence[int]  # numbers of verified draft tokens, by their position in the draft run
    accepted: Sequence[int]  # numbers of accepted draft tokens, by their position in the draft run

    @property
    def mean_length(self) -> float:
        """Mean number of tokens that a draft run yields: the accepted ones, and the one sampled after them."""
        return 1 + sum(self.accepted) / max(self.num_drafts, 1)

    def after(self, before: "SpeculationStats") -> "SpeculationStats":
        """Adds the totals of an earlier run of the engine.

        Args:
            before: totals of the earlier run.

        Returns:
            The totals of both runs.
        """

        def both(now: Sequence[int], then: Sequence[int]) -> list[int]:
            return [a + b for a, b in zip_longest(now, then, fillvalue=0)]

        return SpeculationStats(
            self.num_drafts + before.num_drafts,
            both(self.drafted, before.drafted),
            both(self.accepted, before.accepted),
        )
