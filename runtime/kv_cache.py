"""KV blocks, paged: who holds which, which are shared, and which are kept for prompts that begin alike.

Sequences that begin with the same tokens hold the same full blocks, by reference counts; of a block that is not full,
a sibling gets a copy, since it writes into it next (PagedAttention, Kwon et al. 2023, section 4.4). Full blocks are
found again by a chained hash of all tokens up to their end (`BlockKeys`); those that nobody holds are kept until their
place is needed, the least recently used first.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import gcd

from enginewright.plan import PagedCache
from enginewright.runtime.block_pool import BlockPool, Tag
from enginewright.runtime.envelope import blocks_of


class BlockKeys:
    """Keys of the full blocks of one sequence, each the SHA-256 of the key before it and the block's tokens.

    Args:
        salt: sequences of different salts share nothing, and cannot tell by their times what others have asked.
    """

    def __init__(self, block_size: int, salt: str = "") -> None:
        self._block_size = block_size
        self._root = sha256(salt.encode()).digest()
        self._keys: list[bytes] = []

    def of(self, token_ids: Sequence[int], num_blocks: int) -> Sequence[bytes]:
        """Keys of the first `num_blocks` blocks, to be read before the next call.

        Tokens only ever grow, so what was hashed once is kept.
        """
        while len(self._keys) < num_blocks:
            start = len(self._keys) * self._block_size
            tokens = array("I", token_ids[start : start + self._block_size])
            self._keys.append(sha256((self._keys[-1] if self._keys else self._root) + tokens.tobytes()).digest())
        return self._keys if len(self._keys) == num_blocks else self._keys[:num_blocks]


@dataclass
class BlockTable:
    """The blocks of one sequence in one group."""

    reserved: int  # without a window: blocks that it may still take; with one: blocks that it may hold at once
    blocks: list[int] = field(default_factory=list)  # by logical block; those that fell out of the window are 0
    dropped: int = 0  # logical blocks that it has given back
    num_tagged: int = 0  # logical blocks whose content has a key
    pending: list[tuple[int, Tag]] = field(default_factory=list)  # those with a key that nobody else may use yet


class KvCache:
    """Blocks are reserved before they are taken, so that a step, once planned, never lacks any.

    A reservation in a group without a window counts what is still to be taken: blocks shared at the beginning are not
    paid for twice. In a group with a window it counts all that a sequence may hold: a shared block that one gives back
    is still held by another, so sharing saves nothing there that could be relied upon.

    Args:
        groups, num_blocks: the plan's KV groups and how many blocks each has.
        chunk: tokens of a sequence that are computed at once, at most.
    """

    def __init__(self, groups: Sequence[PagedCache], num_blocks: Sequence[int], chunk: int) -> None:
        self._groups = tuple(groups)
        self._chunk = chunk
        self._pools = [BlockPool(count) for count in num_blocks]
        self._reserved = [0 for _ in groups]
        self._share_prefixes = len({group.block_size for group in groups}) == 1
        self.stride = gcd(*(group.block_size for group in groups))  # blocks begin at multiples of it, in all groups

    @property
    def block_size(self) -> int | None:
        """Tokens a block, where prefixes can be shared: in all groups the same."""
        return self._groups[0].block_size if self._share_prefixes else None

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks that nobody holds, a group."""
        return tuple(pool.num_free for pool in self._pools)

    def admit(self, length: int, keys: Sequence[bytes] = (), spare: int = 0) -> list[BlockTable] | None:
        """Tables for a sequence of `length` positions so far, or None if there is no room now.

        Args:
            keys: of the full blocks that it begins with and that are there (`num_shared`).
            spare: blocks, a group, that must be left over.
        """
        found = [
            [pool.block_of(key) for key in keys[self._first_needed(group, len(keys)) :]]
            for group, pool in zip(self._groups, self._pools, strict=True)
        ]
        return self._open(length, len(keys), found, spare)

    def fork(
        self, tables: Sequence[BlockTable], computed: int, length: int, spare: int = 0
    ) -> tuple[list[BlockTable], list[list[tuple[int, int]]]] | None:
        """Tables that share the first `computed` positions of another sequence.

        None if there is no room now, or if the other has given back what its sibling would see.

        Returns:
            The tables; and in each group the copies, (from, to), to make before anything else is written.
        """
        if self.block_size is None:
            return None
        full, partial = divmod(computed, self.block_size)
        found = []
        for group, table in zip(self._groups, tables, strict=True):
            first = self._first_seen(group, computed)
            if first < table.dropped:
                return None
            found.append(table.blocks[first:full])
        opened = self._open(length, full, found, spare)
        if opened is None:
            return None
        copies: list[list[tuple[int, int]]] = [[] for _ in tables]
        if partial:
            for index, (table, sibling) in enumerate(zip(tables, opened, strict=True)):
                sibling.blocks.append(self._take(index, sibling))
                copies[index].append((table.blocks[full], sibling.blocks[full]))
        return opened, copies

    def grow(self, tables: Sequence[BlockTable], length: int) -> bool:
        """Reserve what `length` positions take; False, and no more than before, if there is no room now."""
        mores = []
        for index, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            held = 0 if group.window else len(table.blocks)
            more = blocks_of(group, length, self._chunk) - held - table.reserved
            if more > 0 and more > self._room(index):
                return False
            mores.append(max(more, 0))
        for index, more in enumerate(mores):
            tables[index].reserved += more
            self._reserved[index] += more
        return True

    def extend(self, tables: Sequence[BlockTable], computed: int, length: int, taken: Sequence[list[int]]) -> None:
        """Make room to write positions from `computed` up to `length`; what lies before is there already.

        Args:
            taken: gets the blocks that were taken for it, a group.
        """
        for index, (group, table, blocks) in enumerate(zip(self._groups, tables, taken, strict=True)):
            if group.window:
                self._drop_unseen(index, table, computed)
            while len(table.blocks) * group.block_size < length:
                blocks.append(self._take(index, table))
                table.blocks.append(blocks[-1])

    def truncate(self, tables: Sequence[BlockTable], length: int) -> bool:
        """Take back what positions from `length` on hold.

        False, and nothing has changed, if what is left lacks a block that has fallen out of a window, or ends within a
        block that others hold.
        """
        for group, pool, table in zip(self._groups, self._pools, tables, strict=True):
            full, partial = divmod(length, group.block_size)
            if self._first_seen(group, length) < table.dropped:
                return False
            if partial and full < len(table.blocks) and pool.is_shared(table.blocks[full]):
                return False
        for index, (group, pool, table) in enumerate(zip(self._groups, self._pools, tables, strict=True)):
            full, partial = divmod(length, group.block_size)
            for block, tag in table.pending:
                if block in table.blocks[full:]:
                    pool.forget(block, tag)
            table.pending = [(block, tag) for block, tag in table.pending if block not in table.blocks[full:]]
            table.num_tagged = min(table.num_tagged, full)
            if partial and full < len(table.blocks):
                pool.overwrite(table.blocks[full])
            while len(table.blocks) > full + (partial > 0):
                block = table.blocks.pop()
                if not group.window and not pool.is_shared(block):
                    table.reserved += 1
                    self._reserved[index] += 1
                pool.drop(block)
        return True

    def tag(self, tables: Sequence[BlockTable], keys: Sequence[bytes]) -> None:
        """The steps planned so far write the blocks of `keys`, the sequence's first ones."""
        for pool, table in zip(self._pools, tables, strict=True):
            for place in range(max(table.num_tagged, table.dropped), len(keys)):
                block = table.blocks[place]
                table.pending.append((block, pool.tag(block, keys[place])))
            table.num_tagged = max(table.num_tagged, len(keys))

    def publish(self, tables: Sequence[BlockTable]) -> None:
        """Numbers came out of all that has a key, so others may share it; until then it is nobody else's."""
        for pool, table in zip(self._pools, tables, strict=True):
            for block, tag in table.pending:
                pool.publish(block, tag)
            table.pending.clear()

    def release(self, tables: Sequence[BlockTable]) -> None:
        """Take everything back. The ends of sequences are forgotten before their beginnings."""
        for index, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            for block, tag in table.pending:
                pool.forget(block, tag)
            for block in reversed(table.blocks[table.dropped :]):
                pool.drop(block)
            self._reserved[index] -= table.reserved
            table.reserved, table.blocks, table.dropped, table.num_tagged, table.pending = 0, [], 0, 0, []

    def num_shared(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest prefix that is there: all of it without a window, its last window otherwise."""
        shared = len(keys)
        for group, pool in zip(self._groups, self._pools, strict=True):
            if not group.window:
                shared = next((place for place in range(shared) if keys[place] not in pool), shared)
        while shared and not all(
            keys[place] in pool
            for group, pool in zip(self._groups, self._pools, strict=True)
            for place in range(self._first_needed(group, shared) if group.window else shared, shared)
        ):
            shared -= 1
        return shared

    @staticmethod
    def _first_needed(group: PagedCache, shared: int) -> int:
        """The first logical block that the first position behind `shared` blocks sees."""
        return KvCache._first_seen(group, shared * group.block_size)

    @staticmethod
    def _first_seen(group: PagedCache, position: int) -> int:
        """The first logical block that a position sees."""
        return max(position - group.window + 1, 0) // group.block_size if group.window else 0

    def _room(self, index: int) -> int:
        """Blocks of a group that may still be reserved."""
        pool = self._pools[index]
        free = pool.num_blocks if self._groups[index].window else pool.num_free
        return free - self._reserved[index]

    def _open(self, length: int, shared: int, found: Sequence[Sequence[int]], spare: int) -> list[BlockTable] | None:
        """Tables that begin with `found`, each group's last blocks before logical block `shared`."""
        tables = []
        for index, (group, pool, held) in enumerate(zip(self._groups, self._pools, found, strict=True)):
            reserved = blocks_of(group, length, self._chunk) - (0 if group.window else shared)
            revived = 0 if group.window else sum(not pool.is_held(block) for block in held)
            if reserved + revived + spare > self._room(index):
                return None
            first = shared - len(held)
            tables.append(BlockTable(reserved, [0] * first + list(held), first, shared))
        for index, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            self._reserved[index] += table.reserved
            for block in table.blocks[table.dropped :]:
                pool.hold(block)
        return tables

    def _drop_unseen(self, index: int, table: BlockTable, computed: int) -> None:
        """Give back what fell out of the window of the first position that is not computed."""
        pool, first_seen = self._pools[index], self._first_seen(self._groups[index], computed)
        while table.dropped < min(first_seen, len(table.blocks)):
            pool.drop(table.blocks[table.dropped])
            table.blocks[table.dropped] = 0
            table.dropped += 1

    def _take(self, index: int, table: BlockTable) -> int:
        if not self._groups[index].window:
            table.reserved -= 1
            self._reserved[index] -= 1
        return self._pools[index].take()
