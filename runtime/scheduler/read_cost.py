"""Predicts how long a store of prefixes takes, and learns from what it took: slow stores are left alone for a while."""

FIRST_S_PER_BYTE = 1 / 500e6  # seconds to read a byte, before any read was measured
LEARNING = 0.3  # weight of a new measurement in the estimates
LATE = 2.0  # factor on the time that something unfinished has taken so far, for the estimate after it
# Factor on the estimated speed after each time that it did not pay, so that a slow store is retried.
RETRY_SPEEDUP = 1.05


class ReadCost:
    """Seconds to search one store, and to read a number of bytes from it: a search and `n · s_per_byte`."""

    def __init__(self) -> None:
        self.search_s = 0.0  # of a search, which also stands for the latency of a read
        self._s_per_byte = FIRST_S_PER_BYTE

    def of_read(self, num_bytes: int) -> float:
        """Predicts the duration of a read."""
        return self.search_s + num_bytes * self._s_per_byte

    def search_ended(self, seconds: float) -> None:
        """Learns from a search that took `seconds`; 0 if nothing was waited for, which says nothing."""
        if seconds:
            self.search_s += LEARNING * (seconds - self.search_s)

    def read_ended(self, num_bytes: int, seconds: float) -> None:
        """Learns from a read of `num_bytes` that took `seconds`."""
        if num_bytes:
            self._s_per_byte += LEARNING * (max(seconds - self.search_s, 0.0) / num_bytes - self._s_per_byte)

    def search_is_late(self, seconds: float) -> None:
        """Learns from a search that has not ended after `seconds`."""
        self.search_s = max(self.search_s, LATE * seconds)

    def read_is_late(self, num_bytes: int, seconds: float) -> None:
        """Learns from a read of `num_bytes` that has not ended after `seconds`."""
        self._s_per_byte = max(self._s_per_byte, LATE * seconds / num_bytes)

    def did_not_pay(self) -> None:
        """Expects a faster store the next time, after computing was expected to take less time."""
        self.search_s /= RETRY_SPEEDUP
        self._s_per_byte /= RETRY_SPEEDUP
