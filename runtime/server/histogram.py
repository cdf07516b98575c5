"""A histogram for the thread of the event loop."""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from operator import add


class Histogram:
    """A histogram for a single thread; prometheus_client's takes a lock for each observation.

    Args:
        bounds: upper bounds of the buckets, in ascending order.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add(self, other: "Histogram") -> None:
        """Counts the values of another histogram with the same bounds."""
        self._counts = list(map(add, self._counts, other._counts))
        self._sum += other._sum

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by bound, and the sum of all values."""
        return cumulative(self._bounds, self._counts), self._sum


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets of a histogram with cumulative counts.

    Args:
        bounds: upper bounds of the buckets, in ascending order.
        counts: counts of each bucket alone, and of the values above the last bound.
    """
    total, buckets = 0, []
    for bound, count in zip((*bounds, inf), counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
    return buckets
