"""Blocks, windows and recurrent states in one cache, against what would be there if nothing was shared or copied."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.plan import CacheGroup, PagedCache, RecurrentState
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.paged import BlockTable
from enginewright.runtime.cache.recurrent import StateSlot
from tests.helpers.scheduler_watch import BLOCK, group, recurrent

CHUNK, LONGEST, SEQUENCES = 9, 40, 4
BLANK = -1


@dataclass(eq=False)
class Running:
    tokens: list[int]
    held: list[BlockTable | StateSlot]
    computed: int = 0
    keys: PrefixKeys = field(default_factory=lambda: PrefixKeys(BLOCK))

    def digest(self, length: int) -> int:
        """Stands for all tokens up to there; that of none is 0."""
        return hash(tuple(self.tokens[:length])) if length else 0


class Model:
    """A cache, and memory that holds a digest in place of each key, value and state."""

    def __init__(self, groups: tuple[CacheGroup, ...], num_places: list[int]) -> None:
        self.groups, self.num_places = groups, tuple(num_places)
        self.cache = Cache(groups, num_places, CHUNK, SEQUENCES)
        self.memory = [
            np.full(count * (kv.block_size if isinstance(kv, PagedCache) else 1), BLANK)
            for kv, count in zip(groups, num_places, strict=True)
        ]
        self.running: list[Running] = []

    def lists(self) -> list[list[tuple[int, int]]]:
        return [[] for _ in self.groups]

    def copy(self, copies: list[list[tuple[int, int]]]) -> None:
        for kv, memory, pairs in zip(self.groups, self.memory, copies, strict=True):
            size = kv.block_size if isinstance(kv, PagedCache) else 1
            for source, target in pairs:
                memory[target * size :][:size] = memory[source * size :][:size]

    def admit(self, tokens: list[int]) -> Running | None:
        one, copies = Running(tokens, []), self.lists()
        keys = one.keys.of(tokens, (len(tokens) - 1) // BLOCK)
        shared = self.cache.num_shared(keys)
        divergence_position = self.cache.divergence_position(keys)
        held = self.cache.admit(
            len(tokens), keys[:shared], 0, copies, shares=True, divergence_position=divergence_position
        )
        if held is None:
            return None
        one.held, one.computed = held, shared * BLOCK
        self.copy(copies)
        self.running.append(one)
        self.check(one)
        return one

    def extend(self, one: Running, count: int) -> None:
        end = self.cache.chunk_end(one.held, one.computed, min(one.computed + count, len(one.tokens)))
        new: list[list[int]] = [[] for _ in self.groups]
        copies = self.lists()
        self.cache.extend(one.held, one.computed, end, new, copies)
        self.copy(copies)
        for kv, memory, places, mine in zip(self.groups, self.memory, new, one.held, strict=True):
            if isinstance(mine, StateSlot):
                memory[places] = 0
                assert memory[mine.slot] == one.digest(one.computed), "a state of other tokens"
                memory[mine.slot] = one.digest(end)
            else:
                assert isinstance(kv, PagedCache)
                for position in range(one.computed, end):
                    block, offset = divmod(position, kv.block_size)
                    memory[mine.blocks[block] * kv.block_size + offset] = one.digest(position + 1)
        one.computed = end
        self.cache.tag(one.held, one.keys.of(one.tokens, end // BLOCK))
        self.check(one)

    def truncate(self, one: Running, length: int) -> bool:
        copies, keys = self.lists(), one.keys.of(one.tokens, one.computed // BLOCK)
        if not self.cache.truncate(one.held, one.computed, length, keys, copies):
            assert not any(copies)
            return False
        self.copy(copies)
        one.computed = length
        return True

    def fork(self, one: Running, shared: int) -> Running | None:
        copies = self.lists()
        held = self.cache.fork(one.held, one.computed, shared, len(one.tokens), 0, copies)
        if held is None:
            return None
        self.copy(copies)
        sibling = Running(list(one.tokens), held, shared)
        self.running.append(sibling)
        self.check(sibling)
        return sibling

    def release(self, one: Running) -> None:
        self.running.remove(one)
        self.cache.release(one.held)

    def check(self, one: Running) -> None:
        """Checks that the memory which the next position reads was written by the sequence's own tokens."""
        for kv, memory, mine in zip(self.groups, self.memory, one.held, strict=True):
            if isinstance(mine, StateSlot):
                assert not one.computed or memory[mine.slot] == one.digest(one.computed)
                continue
            assert isinstance(kv, PagedCache)
            lowest = max(one.computed - kv.window + 1, 0) if kv.window else 0
            for position in (*range(min(kv.kept_tokens, lowest)), *range(lowest, one.computed)):
                block, offset = divmod(position, kv.block_size)
                assert memory[mine.blocks[block] * kv.block_size + offset] == one.digest(position + 1)


MIXTURES: list[tuple[CacheGroup, ...]] = [
    (recurrent(2 * BLOCK),),
    (group(0), recurrent(2 * BLOCK)),
    (group(5), recurrent(3 * BLOCK), group(0)),
    (group(5, kept_tokens=6), recurrent(BLOCK), recurrent(2 * BLOCK)),
    (group(0), group(3)),
]


@settings(max_examples=150, deadline=None)
@given(groups=st.sampled_from(MIXTURES), slots=st.integers(1, 8), data=st.data())
def test_nobody_sees_the_difference(groups: tuple[CacheGroup, ...], slots: int, data: st.DataObject) -> None:
    """Sequences begin with what others left, grow, are copied, are taken back and go on with other tokens, and end."""
    model = Model(groups, [slots if isinstance(kv, RecurrentState) else 25 for kv in groups])
    beginnings = np.random.default_rng(0).integers(0, 50, (2, LONGEST)).tolist()
    # The block size of keys is that of the blocks, or where there are none, that of the snapshots.
    if model.cache.block_size != BLOCK:
        groups = (group(0), *groups)
        model = Model(groups, [slots if isinstance(kv, RecurrentState) else 25 for kv in groups])
    for _ in range(data.draw(st.integers(5, 40))):
        action = data.draw(st.sampled_from(("admit", "extend", "extend", "publish", "truncate", "fork", "release")))
        if action == "admit" and len(model.running) < SEQUENCES:
            length = data.draw(st.integers(1, LONGEST))
            model.admit(beginnings[data.draw(st.integers(0, 1))][:length])
        if not model.running:
            continue
        one = model.running[data.draw(st.integers(0, len(model.running) - 1))]
        if action == "extend" and one.computed < len(one.tokens):
            model.extend(one, data.draw(st.integers(1, CHUNK)))
        elif action == "publish":
            model.cache.publish(one.held)
        elif action == "truncate":
            length = data.draw(st.integers(0, one.computed))
            if model.truncate(one, length):
                one.tokens[length:] = data.draw(st.lists(st.integers(60, 70), min_size=1, max_size=LONGEST - length))
                one.keys = PrefixKeys(BLOCK)
                model.cache.grow(one.held, len(one.tokens)) or model.release(one)
        elif action == "fork" and len(model.running) < SEQUENCES:
            model.fork(one, data.draw(st.integers(0, one.computed)))
        elif action == "release":
            model.release(one)
    for one in list(model.running):
        model.release(one)
    assert model.cache.num_free == model.num_places


def ready(tokens: list[int], *, slots: int = 8, until: int | None = None) -> tuple[Model, Running]:
    """A sequence that has computed its text up to `until`, in a model of blocks and states; nothing is published."""
    model = Model((group(0), recurrent(3 * BLOCK)), [30, slots])
    one = model.admit(tokens)
    assert one is not None
    end = len(tokens) if until is None else until
    while one.computed < end:
        model.extend(one, end - one.computed)
    return model, one


def test_a_beginning_ends_where_a_snapshot_is() -> None:
    """Prefixes end at multiples of 12 tokens, and at the last full block of a sequence's tokens at admission."""
    tokens = list(range(35))
    model, one = ready(tokens)
    keys = PrefixKeys(BLOCK).of(tokens, 8)
    assert model.cache.num_shared(keys) == 0, "numbers have not been seen"
    model.cache.publish(one.held)
    assert [model.cache.num_shared(keys[:count]) for count in range(9)] == [0, 0, 0, 3, 3, 3, 6, 6, 8]
    again = model.admit(tokens)
    assert again is not None and again.computed == 32
    assert model.cache.num_free == (30 - 9, 8 - 2), "a slot each; snapshots are held by nobody"


def test_a_snapshot_is_taken_where_texts_part() -> None:
    """The second of two that begin alike takes one at the last block that they share, and the third begins there."""
    beginning, interval = list(range(23)), 7 * BLOCK
    model = Model((group(0), recurrent(interval)), [60, 8])
    for text, begun in (([*beginning, 50, 51, 52], 0), ([*beginning, 60, 61], 0), ([*beginning, 70, 71, 72, 73], 20)):
        one = model.admit(text)
        assert one is not None and one.computed == begun
        while one.computed < len(text):
            model.extend(one, len(text))
        model.cache.publish(one.held)
        model.release(one)


def test_snapshots_make_way() -> None:
    """The least recently used first; a sequence always gets its slot, and the last snapshot itself if no other is."""
    model, one = ready(list(range(35)), slots=SEQUENCES + 2)
    keys = PrefixKeys(BLOCK).of(one.tokens, 8)
    assert len(one.held[1].pending) == 2, "three stops, and room for the last two"  # type: ignore[union-attr]
    model.cache.publish(one.held)
    model.release(one)
    assert [model.cache.num_shared(keys[:count]) for count in (3, 6, 8)] == [0, 6, 8]
    others = [model.admit([40 + index]) for index in range(SEQUENCES)]
    assert all(others) and [model.cache.num_shared(keys[:count]) for count in (6, 8)] == [6, 8]
    model.release(others[0])  # type: ignore[arg-type]
    model, one = ready(list(range(17)), slots=1, until=16)
    assert not one.held[1].pending and model.admit([1, 2]) is None, "one slot is one sequence"  # type: ignore[union-attr]


def test_the_last_snapshot_is_used_up_where_no_slot_is_free() -> None:
    model, one = ready(list(range(17)), slots=SEQUENCES + 1)
    model.cache.publish(one.held)
    model.release(one)
    others = [model.admit([40 + index]) for index in range(SEQUENCES)]
    assert all(others)
    last = model.admit(list(range(17)))
    assert last is not None and last.computed == 16 and model.cache.num_free[1] == 0


def test_a_state_is_taken_back_to_a_snapshot_or_not_at_all() -> None:
    model, one = ready(list(range(35)))
    assert not model.truncate(one, 34) and not model.truncate(one, 20)
    assert model.truncate(one, 24), "its own snapshot, which nobody else may use yet"
    model.extend(one, 3)
    model.cache.publish(one.held)
    assert model.truncate(one, 12), "one that is everybody's"
    model.check(one)
    assert model.truncate(one, 0), "nothing needs no snapshot"
    model.extend(one, 5)


def test_a_state_is_copied_for_a_sibling_where_it_stands() -> None:
    model, one = ready(list(range(20)), until=14)
    assert model.fork(one, 13) is None
    sibling = model.fork(one, 14)
    assert sibling is not None
    sibling.tokens[14:] = [50, 51, 52]
    model.extend(sibling, 3)
    model.extend(one, 3)


@pytest.mark.parametrize(("sizes", "interval", "expected"), [((4,), 6, None), ((4, 8), 8, None), ((4, 4), 8, 4)])
def test_groups_that_do_not_fit_together_share_nothing(
    sizes: tuple[int, ...], interval: int, expected: int | None
) -> None:
    groups = (*(group(0, size) for size in sizes), recurrent(interval))
    cache = Cache(groups, [30] * len(groups), CHUNK, SEQUENCES)
    assert cache.block_size == expected and cache.has_snapshots == (expected is not None)
