"""The order of evictions under hints, against a list that is searched completely; and what hostile clients can take."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from enginewright.plan import CacheGroup
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.eviction import (
    MAX_RETAINED_SHARE,
    MAX_TTL_S,
    NOT_RETAINED,
    TTLS_S,
    EvictionOrder,
    Retention,
)
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.pool import Pool
from tests.helpers.scheduler_watch import BLOCK, group, recurrent


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Content:
    """Uses of contents by key, in a pool that computes what it does not find."""

    def __init__(self, num_places: int) -> None:
        self.clock = Clock()
        self.pool = Pool(num_places, self.clock)

    def use(self, name: str, retention: Retention = NOT_RETAINED) -> bool:
        """Uses a content for an instant; returns True if it was found."""
        pool, key = self.pool, name.encode()
        if found := key in pool:
            place = pool.place_of(key)
            pool.hold(place)
        else:
            place = pool.take()
            pool.publish(place, pool.tag(place, key))
        pool.drop(place, retention)
        return found

    def has(self, name: str) -> bool:
        return name.encode() in self.pool


@dataclass
class Place:
    """A free place of the model."""

    key: bytes
    retention: Retention
    used_at: float


@dataclass
class Model:
    """Places with one holder at most, as the rules of hints have them, without any order kept."""

    num_places: int
    free: list[Place] = field(default_factory=list)
    hints: dict[bytes, Retention] = field(default_factory=dict)  # of contents in use

    def rank(self, place: Place) -> float:
        """The time that a place counts as used at; the lowest is evicted first."""
        mine = sum(other.retention.tenant == place.retention.tenant for other in self.free if other.retention.ttl_s)
        tenants = {other.retention.tenant for other in self.free if other.retention.ttl_s}
        within = mine * len(tenants) <= MAX_RETAINED_SHARE * self.num_places
        return place.used_at + place.retention.ttl_s * within

    def taken(self, key: bytes, now: float) -> None:
        (place,) = [one for one in self.free if one.key == key]
        self.free.remove(place)
        self.hints[key] = place.retention if now < place.used_at + place.retention.ttl_s else NOT_RETAINED

    def dropped(self, key: bytes, hint: Retention, now: float) -> None:
        old = self.hints.pop(key, NOT_RETAINED)
        self.free.append(Place(key, max(hint, old, key=lambda one: one.ttl_s), now))

    def evicted(self, key: bytes, now: float) -> bool:
        """Removes what was evicted; returns True if a hint should have kept it longer."""
        (place,) = [one for one in self.free if one.key == key]
        assert self.rank(place) == min(map(self.rank, self.free))
        older = [one for one in self.free if one.used_at < place.used_at]
        assert not any(one.retention == place.retention for one in older), "of the same hint, the oldest goes first"
        if not place.retention.ttl_s:
            assert len(older) <= MAX_RETAINED_SHARE * self.num_places, "half a cache without hints would have kept it"
        self.free.remove(place)
        return now < place.used_at + place.retention.ttl_s


@pytest.mark.parametrize("num_places", [*range(1, 10), 23, 41])
def test_evictions_follow_the_rules(num_places: int) -> None:
    rng, clock = random.Random(num_places), Clock()
    tenants = "abc" if num_places < 10 else "abcdefghijklm"
    hints = [Retention.of(ttl_s, tenant) for ttl_s in (0.0, 0.0, *TTLS_S) for tenant in tenants]
    pool, model = Pool(num_places, clock), Model(num_places)
    removed: list[bytes] = []
    pool.watch = lambda key, is_there: None if is_there else removed.append(key)
    held: dict[bytes, int] = {}
    num_early = 0
    for number in range(2000):
        clock.now += rng.choice([0.25, 7.0, 280.0, 4000.0]) * rng.random()
        choice = rng.choice(["drop", "hold", "take"])
        if choice == "drop" and held:
            key, hint = rng.choice(sorted(held)), rng.choice(hints)
            pool.drop(held.pop(key), hint)
            model.dropped(key, hint, clock.now)
        elif choice == "hold" and model.free:
            key = rng.choice(model.free).key
            held[key] = pool.place_of(key)
            pool.hold(held[key])
            model.taken(key, clock.now)
        elif choice == "take" and pool.num_free:
            is_full, key = len(held) + len(model.free) == num_places, b"%d" % number
            place = pool.take()
            assert len(removed) == is_full
            if is_full:
                num_early += model.evicted(removed.pop(), clock.now)
            pool.publish(place, pool.tag(place, key))
            held[key] = place
        assert pool.num_free == num_places - len(held)
        assert pool.num_retained == sum(one.retention.ttl_s > 0 for one in model.free)
    assert pool.num_early_evictions == num_early > 0


class Counted(float):
    """A time whose comparisons are counted."""

    num = 0

    def __add__(self, other: float) -> "Counted":
        return Counted(float(self) + other)

    __radd__ = __add__

    def __lt__(self, other: float) -> bool:
        Counted.num += 1
        return float(self) < other

    def __eq__(self, other: object) -> bool:
        Counted.num += 1
        return float(self) == other

    __hash__ = float.__hash__


@pytest.mark.parametrize("shape", ["equal", "different", "one more and one less"])
def test_the_cost_of_an_eviction_does_not_grow_with_the_tenants(shape: str) -> None:
    """Comparisons of times for each place that is added, evicted or used again, with more and more tenants."""
    worst = []
    for num_tenants in (40, 160, 640):
        clock = Clock()
        order = EvictionOrder(8 * num_tenants, lambda clock=clock: Counted(clock.now))  # type: ignore[misc]
        counts = [2 + tenant % 8 if shape == "different" else 4 for tenant in range(num_tenants)]
        names = [f"tenant {tenant}" for tenant in range(num_tenants)]
        places = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        for place, name in enumerate(places):
            clock.now += 0.1
            order.add(place, Retention.of(TTLS_S[place % len(TTLS_S)], name))
        costs = []
        for number in range(4 * len(places)):
            clock.now += 0.1
            Counted.num = 0
            if shape == "one more and one less" and number % 2:
                order.add(-1, Retention.of(TTLS_S[0], "another"))
                order.remove(-1)
            place = order.pop()
            order.add(place, Retention.of(TTLS_S[number % len(TTLS_S)], places[place]))
            costs.append(Counted.num)
        worst.append(sum(costs) / len(costs))
    assert worst[2] < 3 * worst[0] and worst[2] < 300, worst


def test_a_hint_outlives_its_time_only_by_use() -> None:
    content = Content(4)
    content.use("hinted", Retention.of(300.0, "a"))
    content.clock.now += 299
    content.use("hinted")  # a use without a hint of its own renews the time
    content.clock.now += 299
    assert all(not content.use(f"other {place}") for place in range(9)) and content.has("hinted")
    content.clock.now += 2
    content.use("hinted")  # the time is over, so the content has no hint any more
    content.clock.now += 1
    assert all(not content.use(f"another {place}") for place in range(4)) and not content.has("hinted")
    assert content.pool.num_early_evictions == content.pool.num_retained == 0


def test_a_hint_is_no_privilege_over_what_is_used_after_its_time() -> None:
    content = Content(3)
    content.use("hinted", Retention.of(300.0, "a"))
    content.clock.now += 299
    content.use("within")
    content.clock.now += 2
    content.use("after")
    content.use("new")
    assert not content.has("within") and content.has("hinted")
    content.use("newer")
    assert not content.has("hinted") and content.has("after")


def test_the_longest_hint_counts() -> None:
    content = Content(4)
    for ttl_s in (60.0, 3600.0, 10.0):
        content.use("hinted", Retention.of(ttl_s, "a"))
    content.clock.now += 3000
    assert [content.use(f"{place}") for place in range(4)] == [False] * 4 and content.has("hinted")


def test_times_to_live_are_rounded_up_and_bounded() -> None:
    asked = (0.0, 0.1, 10.0, 12.8, 299.0, 300.0, 3600.0, 1e9)
    assert [Retention.of(seconds, "a").ttl_s for seconds in asked] == [0, 10, 10, 60, 300, 300, 3600, MAX_TTL_S]
    assert Retention.of(0.0, "a") is NOT_RETAINED


def found_by_the_modest(num_places: int, working_set: int, hostile: Sequence[Retention]) -> int:
    """Uses that are found of a client that repeats its contents, while another one hints for ever new ones."""
    content, found = Content(num_places), 0
    for number in range(40 * working_set):
        for flood, hint in enumerate(hostile):
            content.use(f"hostile {flood} {number}", hint)
        content.clock.now += 0.5
        found += content.use(f"modest {number % working_set}")
    return found


@pytest.mark.parametrize("ttl_s", [0.0, *TTLS_S])
def test_a_client_that_hints_everything_takes_no_more_than_half(ttl_s: float) -> None:
    """Another client finds what it would find in half of the places if nobody gave a hint, up to the last use."""
    for working_set, flood in ((8, 1), (4, 3)):  # together 16
        steady = 40 * working_set - working_set
        assert found_by_the_modest(16, working_set, [NOT_RETAINED] * flood) == steady
        assert found_by_the_modest(32, working_set, [Retention.of(ttl_s, "a")] * flood) == steady
        assert found_by_the_modest(15, working_set, [NOT_RETAINED] * flood) == 0


def test_a_client_that_hints_everything_keeps_what_it_used_last() -> None:
    """Beyond its part, its order is that without any hints, and not worse."""
    hinted, plain = Content(16), Content(16)
    for number in range(200):
        name = str(number * number % 23)
        assert hinted.use(name, Retention.of(3600.0, "a")) == plain.use(name), number
        hinted.clock.now += 1
        plain.clock.now += 1


def test_tenants_have_equal_parts() -> None:
    content = Content(40)  # of which 20 are for hints, and 10 for each of two tenants
    mine = [f"mine {place}" for place in range(10)]
    for name in mine:
        content.use(name, Retention.of(3600.0, "modest"))
    for number in range(1000):
        content.clock.now += 1
        content.use(f"hostile {number}", Retention.of(3600.0, "hostile"))
    assert all(map(content.has, mine))
    content.use("one more", Retention.of(3600.0, "modest"))
    for number in range(40):
        content.clock.now += 1
        content.use(f"last {number}", Retention.of(3600.0, "hostile"))
    assert [name for name in mine if not content.has(name)] == mine[:1], "beyond its part, its oldest has no hint"
    assert content.pool.num_early_evictions > 0


def run(cache: Cache, first: int, retention: Retention = NOT_RETAINED) -> int:
    """Runs a text of four blocks and a token, and one more token; returns the number of its blocks that were found."""
    tokens = [first, *range(1, 4 * BLOCK + 1)]
    keys = PrefixKeys(BLOCK).of(tokens, 4)
    shared = cache.num_shared(keys)
    copies: list[list[tuple[int, int]]] = [[] for _ in cache.num_free]
    held = cache.admit(len(tokens), keys[:shared], 0, copies, shares=True, retention=retention)
    assert held is not None
    position, length = shared * BLOCK, len(tokens)
    while position <= length:
        end = cache.chunk_end(held, position, length) if position < length else length + 1
        assert cache.grow(held, end)
        cache.extend(held, position, end, [[] for _ in copies], copies)
        cache.tag(held, keys[: end // BLOCK])
        cache.publish(held)
        position = end
    cache.release(held)
    return shared


@pytest.mark.parametrize(
    "groups",
    [[group(0)], [group(0), group(6)], [group(0), recurrent(BLOCK)]],
    ids=["all", "window", "recurrent"],
)
def test_a_hinted_text_is_found_after_others(groups: list[CacheGroup]) -> None:
    clock = Clock()
    for hint, found in ((NOT_RETAINED, 0), (Retention.of(300.0, "a"), 4)):
        cache = Cache(groups, [40] * len(groups), 4 * BLOCK + 1, 1, clock)
        run(cache, 100, hint)
        for other in range(200, 240):
            clock.now += 1
            assert run(cache, other) == 0
        assert run(cache, 100) == found
        assert (cache.num_retained > 0) == (found > 0) and cache.num_evictions > 0
