"""How a step's sizes are counted, by the names that a plan has for them."""

from collections.abc import Callable, Mapping, Sequence

from enginewright.errors import NoCodeForMachineError
from enginewright.plan import COMMON_DIMS, CacheGroup, PagedCache, StepSizes

SPLIT_TOKENS = 256  # positions of one partial result of attention


def widest_block_table(caches: Sequence[CacheGroup]) -> int:
    """Tokens of a block of the group whose block tables are the widest; 1 where no group has block tables."""
    return min((cache.block_size for cache in caches if isinstance(cache, PagedCache)), default=1)


# The dims behind COMMON_DIMS that this release knows: how many positions of the step's longest sequence count as one.
POSITIONS: Mapping[str, Callable[[Sequence[CacheGroup]], int]] = {
    "kv_blocks": widest_block_table,  # the width of the widest block table
    "kv_splits": lambda caches: SPLIT_TOKENS,
}


class StepCounter:
    """Counts the sizes of a plan's steps.

    Args:
        dims, caches: the plan's.

    Raises:
        NoCodeForMachineError: the plan counts something that this release does not know.
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
        """longest: positions of the longest sequence, after the step."""
        others = [-(-longest // positions) for positions in self._positions]
        return StepSizes(self._dims, (tokens, sequences, logit_rows, *others))

    def unchanged_up_to(self, longest: int) -> int:
        """The length up to which a sequence that grows from `longest` gives the same sizes."""
        return min((-(-longest // positions) * positions for positions in self._positions), default=1 << 62)
