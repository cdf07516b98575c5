"""The order in which cached content is evicted: the least recently used first, but for hints of clients.

A hint gives a time to live, within which a client expects to continue a prompt. Content with a hint counts as used
later than it was, by this time. So it outlives content without a hint, but not for ever: what was used after its time
is over goes after it.

All hints together hold for at most half of the places, in equal parts for the tenants that have some. What a tenant has
beyond its part, its least recently used content first, counts as used when it was. So whatever the clients of others
hint, content without a hint stays at least as long as in a cache of half the size that knows no hints.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MAX_RETAINED_SHARE = 0.5  # share of the places for which hints hold
TTLS_S = (10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)  # times to live, in seconds; each tenant has a queue for each
MAX_TTL_S = TTLS_S[-1]


@dataclass(frozen=True, slots=True)
class Retention:
    """A hint that a prompt is likely to be continued soon."""

    ttl_s: float = 0.0  # seconds within which that is expected, from the last use; 0: there is no hint
    tenant: str = ""  # name of the tenant whose request gave it

    @classmethod
    def of(cls, ttl_s: float, tenant: str) -> "Retention":
        """The hint with the shortest of TTLS_S that is no less than `ttl_s`, or with the longest; none for 0."""
        return cls(next((one for one in TTLS_S if one >= ttl_s), MAX_TTL_S), tenant) if ttl_s else NOT_RETAINED


NOT_RETAINED = Retention()


class EvictionOrder:
    """The free places with content, in the order in which it is evicted.

    Args:
        num_places: number of places, free or not.
        clock: gives the time in seconds.
    """

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._max_retained, self._clock = num_places * MAX_RETAINED_SHARE, clock
        self._retentions: dict[int, Retention] = {}  # hint of each place
        # Places by hint, the least recently used first, with the time of their last use. Each has some, but the first.
        self._queues: dict[Retention, dict[int, float]] = {NOT_RETAINED: {}}
        self._num_retained: Counter[str] = Counter()  # number of places with a hint, by tenant
        self.num_early = 0  # places that were evicted before the time of their hint was over

    def __len__(self) -> int:
        return len(self._retentions)

    def __contains__(self, place: int) -> bool:
        return place in self._retentions

    @property
    def num_retained(self) -> int:
        """Number of places with a hint."""
        return len(self._retentions) - len(self._queues[NOT_RETAINED])

    def add(self, place: int, retention: Retention) -> None:
        """Adds a place, whose last use ends now.

        Args:
            place: the place.
            retention: the hint of its content.
        """
        self._retentions[place] = retention
        self._queues.setdefault(retention, {})[place] = self._clock()
        if retention is not NOT_RETAINED:
            self._num_retained[retention.tenant] += 1

    def remove(self, place: int) -> Retention:
        """Removes a place, and returns the hint of its content, which is none once its time is over."""
        retention = self._retentions.pop(place)
        queue = self._queues[retention]
        used_at = queue.pop(place)
        if retention is NOT_RETAINED:
            return retention
        if not queue:
            del self._queues[retention]
        self._num_retained[retention.tenant] -= 1
        if not self._num_retained[retention.tenant]:
            del self._num_retained[retention.tenant]
        return retention if self._clock() < used_at + retention.ttl_s else NOT_RETAINED

    def pop(self) -> int:
        """Removes the place that is evicted first, and returns it."""
        place = self._first(NOT_RETAINED) if len(self._queues) == 1 else self._first(self._next_queue())
        self.num_early += self.remove(place) is not NOT_RETAINED
        return place

    def _first(self, retention: Retention) -> int:
        """The least recently used of the places with a hint."""
        return next(iter(self._queues[retention]))

    def _next_queue(self) -> Retention:
        """The hint of the place that is evicted first."""
        part = self._max_retained / max(len(self._num_retained), 1)

        def counts_as_used_at(retention: Retention) -> float:
            used_at = self._queues[retention][self._first(retention)]
            return used_at + (retention.ttl_s if self._num_retained[retention.tenant] <= part else 0.0)

        return min((retention for retention, queue in self._queues.items() if queue), key=counts_as_used_at)
