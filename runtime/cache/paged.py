"""Paged KV caches: blocks of a fixed number of tokens with reference counts (PagedAttention, Kwon et al. 2023).

Sequences with the same prefix hold the same full blocks. A sibling gets a copy of a block that is not full, since it
writes into that block next.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from enginewright.plan import PagedCache
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.kind import CacheKind, Copies
from enginewright.runtime.cache.pool import Pool, Tag


def blocks_of(group: PagedCache, length: int, chunk: int) -> int:
    """Maximum number of blocks that a sequence of `length` positions holds, computed `chunk` tokens at a time."""
    whole = -(-length // group.block_size)
    if not group.window:
        return whole
    # A chunk's first token sees the window before it, and the first of these positions may be the last of a block.
    positions = group.window + chunk - 1
    return min(whole, _num_kept(group) - (-(positions - 1) // group.block_size) + 1)


def _num_kept(group: PagedCache) -> int:
    """Number of first blocks that a group with a window never releases (attention sinks)."""
    return -(-group.kept_tokens // group.block_size) if group.window else 0


@dataclass
class BlockTable:
    """The blocks of one sequence in one group."""

    # Without a window, number of blocks that it may still take; with one, number of blocks that it may hold at once.
    reserved: int
    num_kept: int  # number of first blocks that are never released
    blocks: list[int] = field(default_factory=list)  # block by logical block; 0 where it was released
    dropped: int = 0  # end of the logical blocks, from num_kept on, that were released
    num_tagged: int = 0  # number of logical blocks whose content has a key
    pending: list[tuple[int, Tag]] = field(default_factory=list)  # blocks with a key that is not published yet
    retention: Retention = NOT_RETAINED  # hint for what it holds at its end

    @property
    def held(self) -> list[int]:
        """Blocks that have not been released, in order."""
        return self.blocks[: min(self.num_kept, self.dropped)] + self.blocks[self.dropped :]


class PagedBlocks(CacheKind[BlockTable]):
    """The blocks of one paged group. They are reserved before they are taken, so a planned step never lacks any.

    In a group without a window, a reservation counts the blocks still to be taken: shared blocks of a prefix are not
    counted twice. In a group with a window it counts all blocks that a sequence may hold: a shared block that one
    sequence releases is still held by another, so nobody can rely on what sharing saves.

    Args:
        group: the plan's cache group.
        num_blocks: number of its blocks.
        chunk: maximum number of tokens of a sequence that one step computes.
        clock: gives the time in seconds.
    """

    def __init__(
        self, group: PagedCache, num_blocks: int, chunk: int, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.pool = Pool(num_blocks, clock)
        self._group, self._chunk = group, chunk
        self._block_size, self._window = group.block_size, group.window
        self._num_kept = _num_kept(group)
        self._reserved = 0

    def num_shared(self, keys: Sequence[bytes], max_blocks: int, also: Container[bytes] = ()) -> int:
        pool = self.pool
        if not self._window:
            missing = (place for place in range(max_blocks) if keys[place] not in pool and keys[place] not in also)
            return next(missing, max_blocks)
        count = max_blocks
        while count and not all(key in pool or key in also for key in self.begins_with(keys[:count])):
            count -= 1
        return count

    def begins_with(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return [keys[place] for place in self._needed(len(keys), len(keys) * self._block_size)]

    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        pool = self.pool
        revived = 0 if self._window else sum(not pool.is_held(pool.place_of(key)) for key in self.begins_with(keys))
        return self._to_reserve(length, len(keys)) + revived + watermark_blocks <= self._room

    def open(
        self,
        length: int,
        keys: Sequence[bytes],
        copies: Copies,
        *,
        shares: bool,
        divergence_position: int,
        retention: Retention,
    ) -> BlockTable:
        blocks = [0] * len(keys)
        for place in self._needed(len(keys), len(keys) * self._block_size):
            blocks[place] = self.pool.place_of(keys[place])
        return self._open(length, blocks, len(keys) * self._block_size, retention)

    def can_fork(self, held: BlockTable, computed: int, shared: int, length: int, watermark_blocks: int) -> bool:
        full = shared // self._block_size
        return self._sees(held, shared) and self._to_reserve(length, full) + watermark_blocks <= self._room

    def fork(self, held: BlockTable, shared: int, length: int, copies: Copies) -> BlockTable:
        full, partial = divmod(shared, self._block_size)
        blocks = [0] * full
        for place in self._needed(full, shared):
            blocks[place] = held.blocks[place]
        sibling = self._open(length, blocks, shared, held.retention)
        if partial:
            sibling.blocks.append(self._take(sibling))
            copies.append((held.blocks[full], sibling.blocks[full]))
        return sibling

    def missing(self, held: BlockTable, length: int) -> int | None:
        taken = 0 if self._window else len(held.blocks)
        more = blocks_of(self._group, length, self._chunk) - taken - held.reserved
        return None if more > 0 and more > self._room else max(more, 0)

    def reserve(self, held: BlockTable, count: int) -> None:
        held.reserved += count
        self._reserved += count

    def extend(self, held: BlockTable, computed: int, length: int, new: list[int], copies: Copies) -> None:
        if self._window:
            self._drop_unseen(held, computed)
        while len(held.blocks) * self._block_size < length:
            block = self._take(held)
            held.blocks.append(block)
            new.append(block)

    def tag(self, held: BlockTable, keys: Sequence[bytes]) -> None:
        for place in range(held.num_tagged, len(keys)):
            if not held.num_kept <= place < held.dropped:
                block = held.blocks[place]
                held.pending.append((block, self.pool.tag(block, keys[place])))
        held.num_tagged = max(held.num_tagged, len(keys))

    def publish(self, held: BlockTable) -> None:
        for block, tag in held.pending:
            self.pool.publish(block, tag)
        held.pending.clear()

    def can_truncate(self, held: BlockTable, computed: int, length: int, keys: Sequence[bytes]) -> bool:
        """False if a block that would be seen was released, or if a block that others hold would be overwritten."""
        full, partial = divmod(length, self._block_size)
        rewrites_shared = partial and full < len(held.blocks) and self.pool.is_shared(held.blocks[full])
        return self._sees(held, length) and not rewrites_shared

    def truncate(self, held: BlockTable, computed: int, length: int, keys: Sequence[bytes], copies: Copies) -> None:
        pool = self.pool
        full, partial = divmod(length, self._block_size)
        after = set(held.blocks[full:])
        for block, tag in held.pending:
            if block in after:
                pool.forget(block, tag)
        held.pending = [(block, tag) for block, tag in held.pending if block not in after]
        held.num_tagged = min(held.num_tagged, full)
        if partial and full < len(held.blocks):
            pool.overwrite(held.blocks[full])
        while len(held.blocks) > full + (partial > 0):
            block = held.blocks.pop()
            if not self._window and not pool.is_shared(block):
                self.reserve(held, 1)
            pool.drop(block)
        held.dropped = min(held.dropped, len(held.blocks))

    def release(self, held: BlockTable) -> None:
        """Releases the last blocks first, so that they are evicted before the prefix that more sequences share."""
        for block, tag in held.pending:
            self.pool.forget(block, tag)
        for block in reversed(held.held):
            self.pool.drop(block, held.retention)
        self._reserved -= held.reserved
        held.reserved, held.blocks, held.dropped, held.num_tagged, held.pending = 0, [], 0, 0, []

    @property
    def _room(self) -> int:
        """Number of blocks that may still be reserved."""
        return (self.pool.num_places if self._window else self.pool.num_free) - self._reserved

    def _to_reserve(self, length: int, shared: int) -> int:
        return blocks_of(self._group, length, self._chunk) - (0 if self._window else shared)

    def _first_seen(self, position: int) -> int:
        """The first logical block in the window of a position; 0 without a window."""
        return max(position - self._window + 1, 0) // self._block_size if self._window else 0

    def _needed(self, count: int, position: int) -> Sequence[int]:
        """The subset of the first `count` logical blocks that attention at `position`, after them, reads."""
        kept = min(self._num_kept, count)
        return [*range(kept), *range(max(self._first_seen(position), kept), count)]

    def _sees(self, held: BlockTable, position: int) -> bool:
        """True if no block has been released that attention at a position reads."""
        return held.dropped <= max(self._first_seen(position), held.num_kept)

    def _open(self, length: int, blocks: list[int], position: int, retention: Retention) -> BlockTable:
        shared = len(blocks)
        dropped = min(self._first_seen(position), shared)
        table = BlockTable(0, self._num_kept, blocks, dropped, shared, retention=retention)
        self.reserve(table, self._to_reserve(length, shared))
        for block in table.held:
            self.pool.hold(block)
        return table

    def _drop_unseen(self, held: BlockTable, computed: int) -> None:
        """Releases the blocks before the window of position `computed`, the next to be computed."""
        end = min(self._first_seen(computed), len(held.blocks))
        for place in range(max(held.dropped, held.num_kept), end):
            self.pool.drop(held.blocks[place], held.retention)  # a text that continues may begin at an earlier block
            held.blocks[place] = 0
        held.dropped = max(held.dropped, end)

    def _take(self, held: BlockTable) -> int:
        if not self._window:
            held.reserved -= 1
            self._reserved -= 1
        return self.pool.take()
