"""The order in which cached content is evicted: the least recently used first, but for hints of clients.

A hint gives a time to live, within which a client expects to continue a prompt. Content with a hint counts as used
later than it was, by this time. So it outlives content without a hint, but not for ever: what was used after its time
is over goes after it.

All hints together hold for at most half of the places, in equal parts for the tenants that have some. What a tenant has
beyond its part, its least recently used content first, counts as used when it was. So whatever the clients of others
hint, content without a hint stays at least as long as in a cache of half the size that knows no hints.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

MAX_RETAINED_SHARE = 0.5  # share of the places for which hints hold
TTLS_S = (10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)  # times to live, in seconds; each tenant has a queue for each
MAX_TTL_S = TTLS_S[-1]
MIN_OUTDATED = 64  # number of outdated entries of heaps from which they are removed together


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
        self._plain: PlaceQueue = OrderedDict()  # places without a hint
        # Places with a hint, by its tenant and its time to live; none of them is empty.
        self._queues: dict[str, dict[float, PlaceQueue]] = {}
        self._tenants = TenantOrder()
        self.num_early = 0  # places that were evicted before the time of their hint was over

    def __len__(self) -> int:
        return len(self._retentions)

    def __contains__(self, place: int) -> bool:
        return place in self._retentions

    @property
    def num_retained(self) -> int:
        """Number of places with a hint."""
        return len(self._retentions) - len(self._plain)

    def add(self, place: int, retention: Retention) -> None:
        """Adds a place, whose last use ends now.

        Args:
            place: the place.
            retention: the hint of its content.
        """
        self._retentions[place] = retention
        if retention is NOT_RETAINED:
            self._plain[place] = self._clock()
            return
        queues = self._queues.setdefault(retention.tenant, {})
        queues.setdefault(retention.ttl_s, OrderedDict())[place] = self._clock()
        self._count(retention.tenant, 1)

    def remove(self, place: int) -> Retention:
        """Removes a place, and returns the hint of its content, which is none once its time is over."""
        retention = self._retentions.pop(place)
        if retention is NOT_RETAINED:
            del self._plain[place]
            return retention
        queues = self._queues[retention.tenant]
        used_at = queues[retention.ttl_s].pop(place)
        if not queues[retention.ttl_s]:
            del queues[retention.ttl_s]
            if not queues:
                del self._queues[retention.tenant]
        self._count(retention.tenant, -1)
        return retention if self._clock() < used_at + retention.ttl_s else NOT_RETAINED

    def pop(self) -> int:
        """Removes the place that is evicted first, and returns it."""
        place = next(iter(self._plain), None)
        tenant = self._tenants.first(self._max_retained)
        if tenant is not None and (place is None or tenant.counts_as_used_at < self._plain[place]):
            queues = self._queues[tenant.name]
            place = min(
                (_first_of(queue)[1] + (0.0 if tenant.is_beyond else ttl_s), _first_of(queue)[0])
                for ttl_s, queue in queues.items()
            )[1]
        assert place is not None, "the caller has seen that there are places"
        self.num_early += self.remove(place) is not NOT_RETAINED
        return place

    def _count(self, tenant: str, added: int) -> None:
        """Updates the order of the tenants after a tenant's place was added or removed.

        Args:
            tenant: the name of the tenant.
            added: 1 or -1.
        """
        firsts = [(ttl_s, _first_of(queue)[1]) for ttl_s, queue in self._queues.get(tenant, {}).items()]
        if firsts:
            used_at, expected_at = min(one for _, one in firsts), min(ttl_s + one for ttl_s, one in firsts)
            self._tenants.set(tenant, self._tenants.num_places(tenant) + added, used_at, expected_at)
        else:
            self._tenants.remove(tenant)


PlaceQueue = OrderedDict[int, float]  # places with the time of their last use, the least recently used first


def _first_of(queue: PlaceQueue) -> tuple[int, float]:
    """The least recently used place of a queue, and the time of its last use."""
    return next(iter(queue.items()))


@dataclass(frozen=True, slots=True)
class FirstTenant:
    """The tenant with the place with a hint that is evicted first."""

    counts_as_used_at: float  # time as which the last use of this place counts
    name: str
    is_beyond: bool  # true if it has more places than its part, so that its hints do not hold


class TenantOrder:
    """Finds the tenant whose place with a hint is evicted first, by heaps, since there may be very many tenants.

    If a tenant is within its part depends on the number of tenants, so one more tenant may change it for all. So all
    tenants are in a heap by the time up to which their hints hold, and in another one by their last use. There is one
    of the second kind for each number of places that some tenant has. These are few, since as many tenants have at
    least 1, 2, 3, … places: with 10,000 places no more than 140. Outdated entries are dropped when they come first, or
    together once they are the larger part.
    """

    def __init__(self) -> None:
        # Number of places of each tenant, the first time of last use, and the first time up to which a hint holds.
        self._tenants: dict[str, tuple[int, float, float]] = {}
        self._by_hint: list[tuple[float, str]] = []  # heap of the third
        self._by_use: dict[int, list[tuple[float, str]]] = {}  # heaps of the second, by number of places

    def num_places(self, tenant: str) -> int:
        """Number of places of a tenant."""
        return self._tenants[tenant][0] if tenant in self._tenants else 0

    def set(self, tenant: str, num_places: int, used_at: float, expected_at: float) -> None:
        """Sets what is known of a tenant.

        Args:
            tenant: its name.
            num_places: number of its places with a hint, at least 1.
            used_at: the first time of last use of any of them.
            expected_at: the first time up to which the hint of any of them holds.
        """
        self._tenants[tenant] = num_places, used_at, expected_at
        self._push(tenant)
        if len(self._by_hint) > 2 * len(self._tenants) + MIN_OUTDATED:
            self._by_hint, self._by_use = [], {}
            for one in self._tenants:
                self._push(one)

    def remove(self, tenant: str) -> None:
        """Removes a tenant that has no more places with a hint."""
        del self._tenants[tenant]

    def first(self, max_retained: float) -> FirstTenant | None:
        """The tenant whose place is evicted first; None if no place has a hint.

        Args:
            max_retained: number of places for which hints hold, in equal parts for the tenants.
        """
        if not self._tenants:
            return None
        part = max_retained / len(self._tenants)
        while self._tenants.get(self._by_hint[0][1], _NONE)[2] != self._by_hint[0][0]:
            heappop(self._by_hint)
        expected_at, tenant = self._by_hint[0]
        # If this tenant is beyond its part, it was used before, and comes up below, before all that are within theirs.
        found = None if self.num_places(tenant) > part else FirstTenant(expected_at, tenant, is_beyond=False)
        for num_places in [one for one in self._by_use if one > part]:
            heap = self._by_use[num_places]
            while heap and self._tenants.get(heap[0][1], _NONE)[:2] != (num_places, heap[0][0]):
                heappop(heap)
            if not heap:
                del self._by_use[num_places]
            elif found is None or heap[0][0] < found.counts_as_used_at:
                found = FirstTenant(*heap[0], is_beyond=True)
        assert found is not None
        return found

    def _push(self, tenant: str) -> None:
        num_places, used_at, expected_at = self._tenants[tenant]
        heappush(self._by_hint, (expected_at, tenant))
        heappush(self._by_use.setdefault(num_places, []), (used_at, tenant))


_NONE = (0, -inf, -inf)  # of a tenant without places
