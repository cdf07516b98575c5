"""Which KV blocks belong to whom: a free list and block tables for each KV group."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from enginewright.plan import KvGroup
from enginewright.runtime.envelope import blocks_of


@dataclass
class BlockTable:
    """The blocks of one sequence in one group, by logical block; those that fell out of the window are 0.

    reserved: blocks that the sequence may hold at once. dropped: logical blocks that it has given back.
    """

    reserved: int
    blocks: list[int] = field(default_factory=list)
    dropped: int = 0


class KvCache:
    """Blocks are promised when a sequence is admitted, so that one that runs never lacks any.

    Args:
        groups, num_blocks: the plan's KV groups and how many blocks each has.
        chunk: tokens of a sequence that are computed at once, at most.
    """

    def __init__(self, groups: Sequence[KvGroup], num_blocks: Sequence[int], chunk: int) -> None:
        self._groups = tuple(groups)
        self._chunk = chunk
        # Taken from the end, so that low blocks are used first and memory is committed as it is needed.
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self._unpromised = list(num_blocks)

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks in no table, a group."""
        return tuple(len(free) for free in self._free)

    def admit(self, length: int) -> list[BlockTable] | None:
        """Tables for a sequence that grows to `length` positions, or None if there is no room now."""
        needs = [blocks_of(group, length, self._chunk) for group in self._groups]
        if any(need > left for need, left in zip(needs, self._unpromised, strict=True)):
            return None
        self._unpromised = [left - need for need, left in zip(needs, self._unpromised, strict=True)]
        return [BlockTable(need) for need in needs]

    def extend(self, tables: Sequence[BlockTable], computed: int, length: int) -> list[list[int]]:
        """Make room for positions up to `length`; positions before `computed` are there already.

        Returns:
            The blocks that were taken for it, a group.
        """
        taken = []
        for group, table, free in zip(self._groups, tables, self._free, strict=True):
            if group.window:
                self._drop(table, free, max(computed - group.window + 1, 0) // group.block_size)
            old = len(table.blocks)
            while len(table.blocks) * group.block_size < length:
                table.blocks.append(free.pop())
            taken.append(table.blocks[old:])
        return taken

    def release(self, tables: Sequence[BlockTable]) -> None:
        """Take everything back."""
        for index, (table, free) in enumerate(zip(tables, self._free, strict=True)):
            free.extend(reversed(table.blocks[table.dropped :]))
            self._unpromised[index] += table.reserved
            table.blocks, table.dropped, table.reserved = [], 0, 0

    @staticmethod
    def _drop(table: BlockTable, free: list[int], first_needed: int) -> None:
        while table.dropped < min(first_needed, len(table.blocks)):
            free.append(table.blocks[table.dropped])
            table.blocks[table.dropped] = 0
            table.dropped += 1
