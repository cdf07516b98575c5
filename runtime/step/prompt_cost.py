"""Cost of a prompt's token by its position: attention reads more for later positions."""

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import Plan

# Time of an operation in attention, with its reads of the KV cache, relative to one in a GEMM: about what was measured
# for chunks of 16 to 128 tokens at positions up to 4000. It need not be exact: it only affects the size of chunks.
ATTENTION_FACTOR = 3.0


class PromptCost:
    """Estimates the cost of tokens from the operations of a plan. The unit is the cost of a token at position 0."""

    def __init__(self, plan: Plan) -> None:
        costs = [call.cost for call in plan.calls]
        of_token = max(sum(cost.of_token for cost in costs), 1)
        slopes: dict[int, float] = {}  # cost for each position that a token sees, by window
        for cost in costs:
            if cost.of_position:
                slopes[cost.window] = slopes.get(cost.window, 0.0) + ATTENTION_FACTOR * cost.of_position / of_token
        self._slopes = tuple(slopes.items())

    def at(self, position: int) -> float:
        """Cost of one token at a position."""
        return 1.0 + sum(slope * (min(position, window) if window else position) for window, slope in self._slopes)

    def of(self, positions: NDArray[np.int32]) -> float:
        """Cost of tokens at these positions together."""
        sums = (slope * np.minimum(positions, window or positions).sum() for window, slope in self._slopes)
        return len(positions) + float(sum(sums))
