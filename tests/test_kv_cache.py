"""Blocks of KV caches: promised at once, taken as they are needed, given back, and never in two tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.plan import KvGroup
from enginewright.runtime.envelope import blocks_of
from enginewright.runtime.kv_cache import BlockTable, KvCache


def group(window: int, block_size: int) -> KvGroup:
    return KvGroup((0,), 1, 8, window, "bf16", block_size, 32)


def seen_blocks(kv: KvGroup, first: int, end: int) -> set[int]:
    """Logical blocks that queries at [first, end) read or write."""
    lowest = max(0, first - kv.window + 1) if kv.window else 0
    return {position // kv.block_size for position in range(lowest, end)}


@settings(max_examples=300, deadline=None)
@given(
    windows=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    block_size=st.integers(1, 7),
    chunk=st.integers(1, 11),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    spare=st.integers(0, 20),
    data=st.data(),
)
def test_invariants(
    windows: list[int], block_size: int, chunk: int, lengths: list[int], spare: int, data: st.DataObject
) -> None:
    groups = [group(window, block_size) for window in windows]
    num_blocks = [blocks_of(kv, max(lengths), chunk) + spare for kv in groups]
    cache = KvCache(groups, num_blocks, chunk)
    waiting, running = list(lengths), list[tuple[int, int, list[BlockTable]]]()
    while waiting or running:
        if waiting and (tables := cache.admit(waiting[0])) is not None:
            running.append((waiting.pop(0), 0, tables))
        assert running, "an empty cache takes one text, whatever its length"
        at = data.draw(st.integers(0, len(running) - 1))
        length, computed, tables = running.pop(at)
        end = min(length, computed + data.draw(st.integers(1, chunk)))
        before = [list(table.blocks) for table in tables]
        taken = cache.extend(tables, computed, end)
        assert taken == [table.blocks[len(old) :] for table, old in zip(tables, before, strict=True)]
        for kv, table, old in zip(groups, tables, before, strict=True):
            wanted = seen_blocks(kv, computed, end)
            assert wanted <= set(range(table.dropped, len(table.blocks)))
            assert all(table.blocks[n] == old[n] for n in wanted if n < len(old)), "a block moved"
            assert len(table.blocks) - table.dropped <= table.reserved == blocks_of(kv, length, chunk)
            assert not any(table.blocks[: table.dropped])
        running.append((length, end, tables))
        for index, count in enumerate(num_blocks):
            held = [block for _, _, each in running for block in each[index].blocks[each[index].dropped :]]
            assert len(held) == len(set(held)) and cache.num_free[index] == count - len(held)
            assert all(0 <= block < count for block in held)
        if end == length or data.draw(st.booleans()):
            _, _, tables = running.pop()
            cache.release(tables)
            free = cache.num_free
            cache.release(tables)
            assert cache.num_free == free, "a second time gives nothing back"
    assert cache.num_free == tuple(num_blocks)
    tables = cache.admit(max(lengths))
    assert tables is not None, "promises are given back, too"


@pytest.mark.parametrize(("window", "chunk", "block_size"), [(7, 1, 4), (7, 5, 4), (1, 3, 2), (8, 8, 4), (5, 2, 1)])
def test_a_window_holds_no_more_than_is_promised(window: int, chunk: int, block_size: int) -> None:
    """At any cut of the text, and the promise is not larger than some cut needs, by more than a block."""
    kv, most = group(window, block_size), 0
    for first_chunk in range(1, chunk + 1):
        cache = KvCache([kv], [1000], chunk)
        tables = cache.admit(200)
        assert tables is not None
        cache.extend(tables, 0, first_chunk)
        for start in range(first_chunk, 200 - chunk, chunk):
            cache.extend(tables, start, start + chunk)
            most = max(most, len(tables[0].blocks) - tables[0].dropped)
    promised = blocks_of(kv, 200, chunk)
    assert promised - 1 <= most <= promised


def test_what_was_promised_to_one_is_not_promised_to_another() -> None:
    cache = KvCache([group(0, 4), group(6, 4)], [10, 100], chunk=8)
    first = cache.admit(30)
    assert first is not None and cache.num_free == (10, 100), "nothing is taken yet"
    assert cache.admit(9) is None and cache.admit(8) is not None
