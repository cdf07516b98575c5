"""Percentiles of many gaps, of which only a histogram with bins of 1 % is kept."""

import math
from collections import Counter

BIN = math.log(1.01)


class Gaps:
    """The gaps between tokens."""

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()

    def add(self, seconds: float, count: int) -> None:
        """Adds gaps.

        Args:
            seconds: the length of each.
            count: their number.
        """
        self._bins[round(math.log(seconds) / BIN)] += count

    def percentile(self, percent: float) -> float:
        """The smallest length in seconds that this share of gaps does not exceed, within 1 %; NaN without gaps."""
        left = percent / 100 * self._bins.total()
        for number, count in sorted(self._bins.items()):
            left -= count
            if left <= 0:
                return math.exp(number * BIN)
        return math.nan
