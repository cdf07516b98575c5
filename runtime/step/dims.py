"""Counts the sizes of a step, which a plan names: tokens, sequences, rows of logits, and others."""

from collections.abc import Callable, Mapping, Sequence

from enginewright.errors import NoCodeForMachineError
from enginewright.plan import COMMON_DIMS, CacheGroup, PagedCache, StepSizes

SPLIT_TOKENS = 256  # number of positions that one partial result of attention covers


def widest_block_table(caches: Sequence[CacheGroup]) -> int:
    """Block size, in tokens, of the group with the widest block tables; 1 if no group has block tables."""
    return min((cache.block_size for cache in caches if isinstance(cache, PagedCache)), default=1)


# Dimensions after COMMON_DIMS that this release knows. Each function returns how many positions of the step's longest
# sequence count as 1.
POSITIONS: Mapping[str, Callable[[Sequence[CacheGroup]], int]] = {
    "kv_blocks": widest_block_table,  # the width of the widest block table
    "kv_splits": lambda caches: SPLIT_TOKENS,
}


class StepCounter:
    """Counts the sizes of a plan's steps.

    Args:
        dims: names of the plan's dimensions.
        caches: the plan's cache groups.

    Raises:
        NoCodeForMachineError: the plan has a dimension that this release does not know.
    """

    def __init__(self, dims: Sequence[str], caches: Sequence[CacheGroup]) -> None:
        self._dims = tuple(dims)
        others = self._dims[len(COMMON_DIMS) :]
        for dim in others:
            if dim not in POSITIONS:
                raise NoCodeForMachineError(
                    f"the engine's plan has sizes that follow {dim!r}",
                    f"this release knows {', '.join((*COMMON_DIMS, *POSITIONS))}",
                    "Run it with the release that built it, or build it again.",
                )
        self._positions = tuple(POSITIONS[dim](caches) for dim in others)

    def sizes(self, tokens: int, sequences: int, logit_rows: int, longest: int) -> StepSizes:
        """Sizes of a step.

        Args:
            tokens: number of tokens that it computes.
            sequences: number of sequences that they belong to.
            logit_rows: number of tokens that give logits.
            longest: number of positions of the longest sequence, after the step.
        """
        others = [-(-longest // positions) for positions in self._positions]
        return StepSizes(self._dims, (tokens, sequences, logit_rows, *others))

    def unchanged_up_to(self, longest: int) -> int:
        """Maximum length that gives the same sizes as `longest` does, in positions of the longest sequence."""
        return min((-(-longest // positions) * positions for positions in self._positions), default=1 << 62)
