"""What a token of a prompt costs by its position: the deeper it stands, the more its attention reads."""

import numpy as np
from numpy.typing import NDArray

from enginewright.plan import Plan

# How much longer an operation takes in attention than in a GEMM: about what chunks of 16 to 128 tokens showed at depths
# up to 4000, their pass over the KV included. It need not be exact: it shapes chunks, and no result depends on it.
ATTENTION_FACTOR = 3.0


class PromptCost:
    """In tokens at position 0, from the operations of a plan."""

    def __init__(self, plan: Plan) -> None:
        costs = [call.cost for call in plan.calls]
        of_token = max(sum(cost.of_token for cost in costs), 1)
        slopes: dict[int, float] = {}  # by window
        for cost in costs:
            if cost.of_position:
                slopes[cost.window] = slopes.get(cost.window, 0.0) + ATTENTION_FACTOR * cost.of_position / of_token
        self._slopes = tuple(slopes.items())

    def at(self, position: int) -> float:
        """The cost of one token there."""
        return 1.0 + sum(slope * (min(position, window) if window else position) for window, slope in self._slopes)

    def of(self, positions: NDArray[np.int32]) -> float:
        """The cost of tokens at these positions."""
        sums = (slope * np.minimum(positions, window or positions).sum() for window, slope in self._slopes)
        return len(positions) + float(sum(sums))
