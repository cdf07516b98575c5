"""Blocks of KV caches: reserved before they are taken, shared, kept, given back, and never lost."""

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.plan import PagedCache
from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.events import BlocksStored, CacheEvent, CacheEvents
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.cache.paged import BlockTable, blocks_of
from enginewright.runtime.cache.pool import Pool
from tests.helpers.scheduler_watch import group


def seen_blocks(kv: PagedCache, first: int, end: int) -> set[int]:
    """Logical blocks that queries at [first, end) read or write."""
    lowest = max(0, first - kv.window + 1) if kv.window else 0
    positions = [*range(min(kv.kept_tokens, end)), *range(lowest, end)]
    return {position // kv.block_size for position in positions}


def extended(cache: Cache, held: list[BlockTable], computed: int, length: int) -> list[list[int]]:
    """Extends a sequence's tables; gives the new blocks of each group."""
    new: list[list[int]] = [[] for _ in held]
    cache.extend(held, computed, length, new, [[] for _ in held])
    return new


def truncated(cache: Cache, held: list[BlockTable], length: int) -> bool:
    return cache.truncate(held, 12, length, (), [[] for _ in held])


def opened(cache: Cache, length: int, keys: list[bytes] | None = None) -> list[BlockTable]:
    tables = cache.admit(length, keys or [])
    assert tables is not None
    return tables


@given(
    windows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 13)), min_size=1, max_size=3),
    block_size=st.integers(1, 7),
    chunk=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    spare=st.integers(0, 20),
    data=st.data(),
)
def check_reserved(
    windows: list[tuple[int, int]],
    block_size: int,
    chunk: int,
    lengths: list[int],
    spare: int,
    data: st.DataObject,
) -> None:
    """Sequences that grow in any order, admitted for a part of their length or for all of it."""
    groups = [group(window, block_size, kept) for window, kept in windows]
    num_blocks = [blocks_of(kv, max(lengths), chunk) + spare for kv in groups]
    cache = Cache(groups, num_blocks, chunk)
    waiting, running = list(lengths), list[tuple[int, int, int, list[BlockTable]]]()
    while waiting or running:
        if waiting:
            known = data.draw(st.integers(1, waiting[0]))
            tables = cache.admit(known)
            assert tables is not None or running, "an empty cache takes one sequence, whatever its length"
            if tables is not None:
                running.append((waiting.pop(0), known, 0, tables))
        length, known, computed, tables = running.pop(data.draw(st.integers(0, len(running) - 1)))
        if computed == known:
            if not cache.grow(tables, known + 1):
                cache.release(tables)
                waiting.append(length)
                continue
            known += 1
        end = min(known, computed + data.draw(st.integers(1, chunk)))
        before = [list(table.blocks) for table in tables]
        taken = extended(cache, tables, computed, end)
        assert taken == [table.blocks[len(old) :] for table, old in zip(tables, before, strict=True)]
        for kv, table, old in zip(groups, tables, before, strict=True):
            wanted = seen_blocks(kv, computed, end)
            kept = range(min(table.num_kept, len(table.blocks)))
            assert wanted <= {*kept, *range(table.dropped, len(table.blocks))}
            assert all(table.blocks[n] == old[n] for n in wanted if n < len(old)), "a block moved"
            assert len(table.held) <= blocks_of(kv, known, chunk)
            assert not any(table.blocks[table.num_kept : table.dropped])
        if end < length:
            running.append((length, known, end, tables))
        else:
            cache.release(tables)
            free = cache.num_free
            cache.release(tables)
            assert cache.num_free == free, "a second time gives nothing back"
        for index, count in enumerate(num_blocks):
            held = [block for *_, each in running for block in each[index].held]
            assert len(held) == len(set(held)) and cache.num_free[index] == count - len(held)
            assert all(0 <= block < count for block in held)
    assert cache.num_free == tuple(num_blocks)
    assert cache.admit(max(lengths)) is not None, "reservations are given back, too"


def test_what_is_reserved_is_there() -> None:
    """tests/long has more examples."""
    settings(max_examples=60, deadline=None)(check_reserved)()


@pytest.mark.parametrize(("window", "chunk", "block_size"), [(7, 1, 4), (7, 5, 4), (1, 3, 2), (8, 8, 4), (5, 2, 1)])
def test_a_window_holds_no_more_than_is_reserved(window: int, chunk: int, block_size: int) -> None:
    """A window stays within its reservation however the text is split, and some split needs all but a block of it."""
    kv, max_held = group(window, block_size), 0
    for first_chunk in range(1, chunk + 1):
        cache = Cache([kv], [1000], chunk)
        tables = opened(cache, 200)
        extended(cache, tables, 0, first_chunk)
        for start in range(first_chunk, 200 - chunk, chunk):
            extended(cache, tables, start, start + chunk)
            max_held = max(max_held, len(tables[0].held))
    reserved = blocks_of(kv, 200, chunk)
    assert reserved - 1 <= max_held <= reserved


def test_what_was_reserved_to_one_is_not_reserved_to_another() -> None:
    cache = Cache([group(0), group(6)], [10, 100], chunk=8)
    opened(cache, 30)
    assert cache.num_free == (10, 100), "nothing is taken yet"
    assert cache.admit(9) is None and cache.admit(8, watermark_blocks=1) is None
    second = opened(cache, 8)
    assert not cache.grow(second, 9) and cache.grow(second, 8)


def test_events_name_an_adapter_where_it_begins() -> None:
    found = list[CacheEvent]()
    events, keys = CacheEvents(4, found.extend), PrefixKeys(4, "salt", 32 * "00", 9).of(range(16), 4)
    for key in keys:
        events.changed(0, key, True)
    events.published(keys, range(16), "salt", "judge", 9 // 4)
    events.flush()
    assert found == [
        BlocksStored(0, keys[:2], None, range(8), "salt"),
        BlocksStored(0, keys[2:], keys[1], range(8, 16), "salt", "judge"),
    ]


def test_keys_are_chained_hashes() -> None:
    keys = PrefixKeys(4, "salt").of(range(10), 2)
    first = sha256(sha256(b"salt").digest() + np.arange(4, dtype=np.int32).tobytes()).digest()
    assert keys == [first, sha256(first + np.arange(4, 8, dtype=np.int32).tobytes()).digest()]
    one, other = (PrefixKeys(4, "salt", 32 * byte).of(range(10), 2) for byte in ("00", "01"))
    assert len({keys[0], keys[1], one[0], one[1], other[0], other[1]}) == 6, "an adapter has keys of its own"
    assert PrefixKeys(4, "other", 32 * "00").of(range(10), 1)[0] not in {*keys, *one}
    assert PrefixKeys(4, "other").of(range(10), 1) != keys[:1]
    later = [PrefixKeys(4, "salt", 32 * "00", first).of(range(10), 2) for first in (4, 5)]
    assert [late[0] for late in later] == keys[:1] * 2, "blocks before an adapter are those of sequences without one"
    assert len({keys[1], one[1], *(late[1] for late in later)}) == 4, "the same tokens may have it from another on"
    assert PrefixKeys(4).of([1, 0, 0, 0, 1, 2, 3, 4], 2)[1] != PrefixKeys(4).of([2, 0, 0, 0, 1, 2, 3, 4], 2)[1]


def written(cache: Cache, length: int, keys: list[bytes], *, published: bool = True) -> list[BlockTable]:
    """A sequence whose blocks are full of what `keys` stand for."""
    tables = opened(cache, length)
    for start in range(0, length, 4):
        extended(cache, tables, start, min(start + 4, length))
        cache.tag(tables, keys[: (start + 4) // 4])
        if published:
            cache.publish(tables)
    return tables


def test_a_prefix_needs_all_blocks_without_a_window_and_the_last_window_with_one() -> None:
    keys = PrefixKeys(4).of(range(40), 8)
    cache = Cache([group(0), group(5)], [20, 20], chunk=4)
    cache.release(written(cache, 32, keys))
    assert cache.num_shared(keys) == 8 and cache.num_shared(keys[:3]) == 3
    assert cache.num_shared([*keys[:5], b"another"]) == 5
    held = opened(cache, 33, keys)
    assert [len(table.blocks) for table in held] == [8, 8] and [table.dropped for table in held] == [0, 7]
    cache.release(held)
    # The window's blocks 2 and 3 are reused for something else: a prefix can end before them, or two blocks after.
    pool = cache._kinds[1].pool
    for block in (pool.place_of(keys[2]), pool.place_of(keys[3])):
        pool.forget(block, pool._tags[block])
    assert [cache.num_shared(keys[:n]) for n in range(1, 9)] == [1, 2, 2, 2, 5, 6, 7, 8]


def test_a_prefix_needs_the_first_tokens_that_are_kept() -> None:
    """The blocks of attention sinks are never given back, and a sequence that begins alike holds them, too."""
    keys = PrefixKeys(4).of(range(40), 8)
    cache = Cache([group(5, kept_tokens=6)], [20], chunk=4)
    (table,) = tables = written(cache, 32, keys)
    assert table.held == [table.blocks[place] for place in (0, 1, 6, 7)]
    cache.release(tables)
    assert cache.num_free == (20,)
    (held,) = opened(cache, 33, keys)
    pool = cache._kinds[0].pool
    assert held.held == [pool.place_of(keys[place]) for place in (0, 1, 7)] and cache.num_free == (17,)
    block = pool.place_of(keys[1])
    pool.forget(block, pool._tags[block])
    assert [cache.num_shared(keys[:n]) for n in range(1, 9)] == [1] * 8


def test_pending_blocks_are_nobody_elses() -> None:
    keys = PrefixKeys(4).of(range(40), 3)
    cache = Cache([group(0), group(4)], [20, 20], chunk=4)
    tables = written(cache, 12, keys, published=False)
    assert cache.num_shared(keys) == 0
    cache.release(tables)
    assert cache.num_shared(keys) == 0 and cache.num_free == (20, 20)
    tables = written(cache, 12, keys, published=False)
    cache.publish(tables)
    assert cache.num_shared(keys) == 3, "also what has fallen out of the window meanwhile"


def test_the_last_tokens_are_taken_back() -> None:
    """Blocks of removed tokens are free, but reserved for their sequence; only unchanged full blocks are shared."""
    keys = PrefixKeys(4).of(range(40), 3)
    cache = Cache([group(0)], [5], chunk=12)
    (table,) = tables = written(cache, 12, keys)
    assert truncated(cache, tables, 6)
    assert (len(table.blocks), table.reserved, cache.num_free) == (2, 1, (3,))
    assert cache.num_shared(keys) == 1, "the second block will be written into"
    assert cache.admit(9) is None and cache.admit(8) is not None, "one is reserved"
    cache = Cache([group(0)], [5], chunk=12)
    (table,) = tables = written(cache, 12, keys, published=False)
    assert truncated(cache, tables, 8) and len(table.pending) == 2
    cache.publish(tables)
    assert cache.num_shared(keys) == 2


def test_what_others_hold_or_a_window_has_dropped_is_not_taken_back() -> None:
    keys = PrefixKeys(4).of(range(40), 3)
    cache = Cache([group(0), group(5)], [9, 9], chunk=4)
    tables = written(cache, 12, keys)
    assert not truncated(cache, tables, 6), "the window has moved on"
    cache = Cache([group(0)], [9], chunk=12)
    tables, others = written(cache, 12, keys), opened(cache, 13, keys)
    before = list(tables[0].blocks)
    assert not truncated(cache, tables, 6) and tables[0].blocks == before
    assert truncated(cache, tables, 8) and others[0].blocks == before


def test_what_has_fallen_out_of_a_window_untagged_is_not_found() -> None:
    """A step may be planned, and drop the block, before the tokens that fill it are known."""
    keys = PrefixKeys(4).of(range(40), 2)
    cache = Cache([group(1)], [20], chunk=4)
    tables = opened(cache, 12)
    for start in (0, 4, 8):
        extended(cache, tables, start, start + 4)
    assert tables[0].dropped == 2
    cache.tag(tables, keys)
    cache.publish(tables)
    assert not any(key in cache._kinds[0].pool for key in keys) and not cache._kinds[0].pool._tags


def test_a_pool_takes_the_least_recently_used() -> None:
    pool = Pool(3)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        pool.publish(block, pool.tag(block, bytes([block])))
    for block in (1, 0, 2):
        pool.drop(block)
    pool.hold(1)
    pool.drop(1)
    assert [pool.take() for _ in range(3)] == [0, 2, 1]
    assert not any(bytes([block]) in pool for block in blocks) and pool.num_free == 0


def test_the_same_tokens_written_twice_are_kept_once() -> None:
    pool = Pool(2)
    for block in (pool.take(), pool.take()):
        pool.publish(block, pool.tag(block, b"same"))
    assert pool.place_of(b"same") == 0
    pool.drop(0)
    pool.drop(1)
    assert pool.take() == 1 and pool.place_of(b"same") == 0
