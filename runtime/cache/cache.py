"""The caches of all sequences, in all groups of a plan: what the scheduler talks to."""

from collections.abc import Callable, Container, Sequence
from functools import partial
from math import gcd
from typing import Any

from enginewright.plan import CacheGroup, PagedCache
from enginewright.runtime.cache.events import CacheEvents
from enginewright.runtime.cache.kind import CacheKind, Copies
from enginewright.runtime.cache.paged import PagedBlocks
from enginewright.runtime.cache.pool import Pool
from enginewright.runtime.cache.recurrent import StateSlots


class Cache:
    """Each method takes what one sequence holds, a group: a list that `admit` or `fork` made.

    A beginning is shared where all groups have it. So it ends with a block, which is of one size in all paged groups,
    and where there are recurrent groups, at one of their snapshots.

    Args:
        groups, num_places: the plan's cache groups, and how many blocks or slots each has.
        chunk: tokens of a sequence that are computed at once, at most.
        sequences: that run at once, at most.
    """

    def __init__(self, groups: Sequence[CacheGroup], num_places: Sequence[int], chunk: int, sequences: int = 1) -> None:
        paged = {group.block_size for group in groups if isinstance(group, PagedCache)}
        snapshots = {group.snapshot_tokens for group in groups if not isinstance(group, PagedCache)}
        self.stride = gcd(*paged, *snapshots)  # what a sequence holds changes at multiples of it alone
        # Tokens of a block that can be shared, which has one key; None if there are no groups that fit together.
        self.block_size: int | None = min(paged or snapshots, default=None)
        if len(paged) > 1 or any(tokens % (self.block_size or 1) for tokens in snapshots):
            self.block_size = None
        self.has_snapshots = self.block_size is not None and len(snapshots) > 0
        self._kinds: list[CacheKind[Any]] = [
            PagedBlocks(group, count, chunk)
            if isinstance(group, PagedCache)
            else StateSlots(group, count, sequences, self.block_size)
            for group, count in zip(groups, num_places, strict=True)
        ]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks or slots that nobody holds, a group."""
        return tuple(kind.pool.num_free for kind in self._kinds)

    def watch(self, events: CacheEvents) -> None:
        """Let it know from now on what can be found."""
        for group, kind in enumerate(self._kinds):
            kind.pool.watch = partial(events.changed, group)

    def save(self, save: Callable[[int, bytes, int], None]) -> None:
        """Let it have, from now on, what can be found, and what is taken for something else: a group, key and place."""
        for group, kind in enumerate(self._kinds):
            kind.pool.save = partial(save, group)

    def num_shared(self, keys: Sequence[bytes], also: Sequence[Container[bytes]] = ()) -> int:
        """Blocks of the longest beginning that is there in all groups.

        Args:
            also: keys that count as there, a group.
        """
        shared = len(keys)
        while shared:
            shorter = shared
            for kind, elsewhere in zip(self._kinds, also or [()] * len(self._kinds), strict=True):
                shorter = kind.num_shared(keys, shorter, elsewhere)
            if shorter == shared:
                break
            shared = shorter
        return shared

    def missing_blocks(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        """What a sequence that begins with these blocks reads and what is not there: groups and keys, by block."""
        places = {key: place for place, key in enumerate(keys)}
        read = [(group, key) for group, kind in enumerate(self._kinds) for key in kind.begins_with(keys)]
        found = [(group, key) for group, key in read if key not in self._kinds[group].pool]
        return sorted(found, key=lambda entry: places[entry[1]])

    def restore(self, keys: Sequence[bytes], write: Callable[[int, bytes, int], None]) -> None:
        """Have all there that a sequence reads which begins with these blocks; there is room for it.

        Args:
            write: puts there what was absent: a group, key and place.
        """
        held: list[tuple[Pool, int]] = []
        for kind in self._kinds:  # first what is there, so that nothing of it is taken
            for key in kind.begins_with(keys):
                if key in kind.pool:
                    held.append((kind.pool, kind.pool.place_of(key)))
                    kind.pool.hold(held[-1][1])
        for group, key in self.missing_blocks(keys):
            pool = self._kinds[group].pool
            place = pool.take()
            held.append((pool, place))
            write(group, key, place)
            pool.publish(place, pool.tag(place, key))
        for pool, place in held:
            pool.drop(place)

    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        """Whether `admit` finds room."""
        return all(kind.has_room(length, keys, watermark_blocks) for kind in self._kinds)

    def divergence_position(self, keys: Sequence[bytes]) -> int:
        """The position up to which a sequence that came before has the tokens of these blocks, as far as a group still
        shows it; 0 where it does not matter, since all groups can begin anywhere.
        """
        if not self.has_snapshots:
            return 0
        return max(kind.num_shared(keys, len(keys)) for kind in self._kinds) * (self.block_size or 0)

    def admit(
        self,
        length: int,
        keys: Sequence[bytes] = (),
        watermark_blocks: int = 0,
        copies: Sequence[Copies] | None = None,
        *,
        shares: bool = False,
        divergence_position: int = 0,
    ) -> list[Any] | None:
        """What a sequence of `length` positions so far holds, or None if there is no room now.

        Args:
            keys: of the full blocks that it begins with and that are there (`num_shared`).
            watermark_blocks: blocks, a group, that must be left over.
            copies: gets, a group, the copies to make before anything else is written.
            shares, divergence_position: as CacheKind.open has them.
        """
        if not self.has_room(length, keys, watermark_blocks):
            return None
        copies = copies or [[] for _ in self._kinds]
        return [
            kind.open(length, keys, mine, shares=shares, divergence_position=divergence_position)
            for kind, mine in zip(self._kinds, copies, strict=True)
        ]

    def fork(
        self,
        held: Sequence[Any],
        computed: int,
        shared: int,
        length: int,
        watermark_blocks: int,
        copies: Sequence[Copies],
    ) -> list[Any] | None:
        """What a sibling holds that shares the first `shared` of the positions that are computed.

        None if there is no room now, or if what the sibling would see has been given back.
        """
        if self.block_size is None:
            return None
        pairs = list(zip(self._kinds, held, strict=True))
        if not all(kind.can_fork(mine, computed, shared, length, watermark_blocks) for kind, mine in pairs):
            return None
        return [kind.fork(mine, shared, length, to_make) for (kind, mine), to_make in zip(pairs, copies, strict=True)]

    def grow(self, held: Sequence[Any], length: int) -> bool:
        """Reserve what `length` positions take; False, and no more than before, if there is no room now."""
        missing = [kind.missing(mine, length) for kind, mine in zip(self._kinds, held, strict=True)]
        if None in missing:
            return False
        for kind, mine, count in zip(self._kinds, held, missing, strict=True):
            if count:
                kind.reserve(mine, count)
        return True

    def extend(
        self,
        held: Sequence[Any],
        computed: int,
        length: int,
        new: Sequence[list[int]],
        copies: Sequence[Copies],
    ) -> None:
        """Make room to write positions from `computed` up to `length`; what lies before is there already.

        Args:
            new: gets, a group, what is to be zeroed.
            copies: gets, a group, the copies to make before it.
        """
        for kind, mine, to_zero, to_copy in zip(self._kinds, held, new, copies, strict=True):
            kind.extend(mine, computed, length, to_zero, to_copy)

    def tag(self, held: Sequence[Any], keys: Sequence[bytes]) -> None:
        """The steps planned so far write the blocks of `keys`, the sequence's first ones."""
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.tag(mine, keys)

    def publish(self, held: Sequence[Any]) -> None:
        """No NaN came out of what has a key, so others may share it; until then it is nobody else's."""
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.publish(mine)

    def truncate(
        self, held: Sequence[Any], computed: int, length: int, keys: Sequence[bytes], copies: Sequence[Copies]
    ) -> bool:
        """Of the positions that are computed, take back what those from `length` on have left.

        False, and nothing has changed, if a group cannot: what it needs has been given back, or others hold it.

        Args:
            keys: of the full blocks that the sequence begins with.
        """
        pairs = list(zip(self._kinds, held, strict=True))
        if not all(kind.can_truncate(mine, computed, length, keys) for kind, mine in pairs):
            return False
        for (kind, mine), to_make in zip(pairs, copies, strict=True):
            kind.truncate(mine, computed, length, keys, to_make)
        return True

    def checkpoint(self, held: Sequence[Any], computed: int, copies: Sequence[Copies]) -> bool:
        """The next step computes guesses behind `computed`: keep what it takes to go back there.

        False, and nothing is kept, if there is no room for it.
        """
        pairs = list(zip(self._kinds, held, strict=True))
        if all(kind.checkpoint(mine, computed, to_make) for (kind, mine), to_make in zip(pairs, copies, strict=True)):
            return True
        self._unmark(held)
        return False

    def roll_back(self, held: Sequence[Any], computed: int, length: int, copies: Sequence[Copies]) -> int:
        """Guesses from position `length` on were wrong; how many positions are computed now.

        They are fewer than `length` where a state was only kept before the first guess.
        """
        for kind, mine in zip(self._kinds, held, strict=True):
            length = min(length, kind.rollback_position(mine, computed, length))
        taken_back = self.truncate(held, computed, length, (), copies)
        assert taken_back, "nobody else has blocks of a step that is not committed"
        self._unmark(held)
        return length

    def _unmark(self, held: Sequence[Any]) -> None:
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.drop_checkpoint(mine)

    def release(self, held: Sequence[Any]) -> None:
        """Take everything back."""
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.release(mine)

    def chunk_end(self, held: Sequence[Any], first: int, end: int) -> int:
        """Where a chunk of a prompt from `first` has to end, `end` at the latest: at the first snapshot to take."""
        for kind, mine in zip(self._kinds, held, strict=True):
            end = kind.chunk_end(mine, first, end)
        return end
