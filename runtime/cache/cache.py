"""The caches of all sequences, in all cache groups of a plan, as the scheduler uses them."""

from collections.abc import Callable, Container, Sequence
from functools import partial
from math import gcd
from time import perf_counter
from typing import Any

from enginewright.plan import CacheGroup, PagedCache
from enginewright.runtime.cache.events import CacheEvents
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.kind import CacheKind, Copies
from enginewright.runtime.cache.paged import PagedBlocks
from enginewright.runtime.cache.pool import Pool
from enginewright.runtime.cache.recurrent import StateSlots


def shared_block_size(groups: Sequence[CacheGroup]) -> int | None:
    """Number of tokens of a block that can be shared, which has one key.

    Args:
        groups: the plan's cache groups.

    Returns:
        None if the groups' sizes do not fit together, so that nothing is shared.
    """
    paged = {group.block_size for group in groups if isinstance(group, PagedCache)}
    snapshots = {group.snapshot_tokens for group in groups if not isinstance(group, PagedCache)}
    size = min(paged or snapshots, default=None)
    if size is None or len(paged) > 1 or any(tokens % size for tokens in snapshots):
        return None
    return size


class Cache:
    """Allocates, shares and releases the blocks and slots of sequences in all cache groups.

    `held`, an argument of most methods, is what one sequence holds: a list with one entry for each group, made by
    `admit` or `fork`.

    A prefix is shared only if all groups have it. It therefore ends at the end of a block, whose size is the same in
    all paged groups, and at a snapshot if there are recurrent groups.

    Args:
        groups: the plan's cache groups.
        num_places: number of blocks or slots of each group.
        chunk: maximum number of tokens of a sequence that one step computes.
        sequences: maximum number of sequences that run at once.
        clock: gives the time in seconds, by which hints expire.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_places: Sequence[int],
        chunk: int,
        sequences: int = 1,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        paged = {group.block_size for group in groups if isinstance(group, PagedCache)}
        snapshots = {group.snapshot_tokens for group in groups if not isinstance(group, PagedCache)}
        self.stride = gcd(*paged, *snapshots)  # what a sequence holds changes only at multiples of this
        self.block_size = shared_block_size(groups)
        self.has_snapshots = self.block_size is not None and len(snapshots) > 0
        self._kinds: list[CacheKind[Any]] = [
            PagedBlocks(group, count, chunk, clock)
            if isinstance(group, PagedCache)
            else StateSlots(group, count, sequences, self.block_size, clock)
            for group, count in zip(groups, num_places, strict=True)
        ]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Number of blocks or slots of each group that no sequence holds."""
        return tuple(kind.pool.num_free for kind in self._kinds)

    @property
    def num_evictions(self) -> int:
        """Number of blocks and slots of all groups whose content was evicted for other content, since the start."""
        return sum(kind.pool.num_evictions for kind in self._kinds)

    @property
    def num_retained(self) -> int:
        """Number of free blocks and slots of all groups whose content a hint keeps."""
        return sum(kind.pool.num_retained for kind in self._kinds)

    @property
    def num_early_evictions(self) -> int:
        """Number of blocks and slots that were evicted before the time of their hint was over, since the start."""
        return sum(kind.pool.num_early_evictions for kind in self._kinds)

    def watch(self, events: CacheEvents) -> None:
        """Reports to `events`, from now on, each block that can be found and each that no longer can."""
        for group, kind in enumerate(self._kinds):
            kind.pool.watch = partial(events.changed, group)

    def save(self, save: Callable[[int, bytes, int], None]) -> None:
        """Calls `save` from now on with each place whose content can be found, and again before it is reused.

        Args:
            save: takes the group's index, the key and the place; the content can be read during the call.
        """
        for group, kind in enumerate(self._kinds):
            kind.pool.save = partial(save, group)

    def num_shared(self, keys: Sequence[bytes], also: Sequence[Container[bytes]] = ()) -> int:
        """Number of blocks of the longest prefix that all groups have.

        Args:
            keys: of the sequence's full blocks.
            also: for each group, keys that count as available, such as those on disk.
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
        """Lists what a sequence with this prefix reads and what memory lacks.

        Returns:
            A group and a key of each entry, in the order of the blocks.
        """
        places = {key: place for place, key in enumerate(keys)}
        read = [(group, key) for group, kind in enumerate(self._kinds) for key in kind.begins_with(keys)]
        found = [(group, key) for group, key in read if key not in self._kinds[group].pool]
        return sorted(found, key=lambda entry: places[entry[1]])

    def entries(self, keys: Sequence[bytes]) -> list[tuple[int, bytes, int]]:
        """Lists what a sequence with this prefix, which is in memory, reads.

        Args:
            keys: of the prefix's blocks.

        Returns:
            A group, a key and a place of each entry.
        """
        return [
            (group, key, kind.pool.place_of(key))
            for group, kind in enumerate(self._kinds)
            for key in kind.begins_with(keys)
        ]

    def has(self, group: int, key: bytes) -> bool:
        """True if content with this key can be found in a group. It may be called in any thread."""
        return key in self._kinds[group].pool

    def restore(self, keys: Sequence[bytes], write: Callable[[int, bytes, int], None]) -> None:
        """Brings into memory all that a sequence with this prefix reads. The caller has checked that it fits.

        Args:
            keys: of the prefix's blocks.
            write: fills a place that was missing; takes the group's index, the key and the place.
        """
        held: list[tuple[Pool, int]] = []
        for kind in self._kinds:  # places that are there are held first, so that none of them is reused
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
        """True if `admit` with these arguments would find enough free places."""
        return all(kind.has_room(length, keys, watermark_blocks) for kind in self._kinds)

    def divergence_position(self, keys: Sequence[bytes]) -> int:
        """Position up to which an earlier sequence has the same tokens, as far as any group still has its blocks.

        0 without recurrent groups: it is of use only to place their snapshots.
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
        retention: Retention = NOT_RETAINED,
    ) -> list[Any] | None:
        """Opens a sequence in all groups.

        Args:
            length: number of its positions so far.
            keys: of the full blocks of its prefix that are in memory (`num_shared`).
            watermark_blocks: number of blocks of each group that must be left over.
            copies: a list for each group, which receives the copies to make before anything else is written.
            shares: True if other sequences may share what this one computes.
            divergence_position: as for CacheKind.open.
            retention: hint for what the sequence leaves in the cache.

        Returns:
            What the sequence holds in each group; None if there is no room now.
        """
        if not self.has_room(length, keys, watermark_blocks):
            return None
        copies = copies or [[] for _ in self._kinds]
        return [
            kind.open(length, keys, mine, shares=shares, divergence_position=divergence_position, retention=retention)
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
        """Opens a sibling that shares the first `shared` of the `computed` positions of a running sequence.

        Args:
            held: what the running sequence holds.
            computed: number of its computed positions.
            shared: number of positions that the sibling shares.
            length: number of positions of the sibling so far.
            watermark_blocks: number of blocks of each group that must be left over.
            copies: a list for each group, which receives the copies to make before anything else is written.

        Returns:
            What the sibling holds in each group; None if there is no room now, or if something that it would read has
            been released.
        """
        if self.block_size is None:
            return None
        pairs = list(zip(self._kinds, held, strict=True))
        if not all(kind.can_fork(mine, computed, shared, length, watermark_blocks) for kind, mine in pairs):
            return None
        return [kind.fork(mine, shared, length, to_make) for (kind, mine), to_make in zip(pairs, copies, strict=True)]

    def grow(self, held: Sequence[Any], length: int) -> bool:
        """Reserves what `length` positions need. Returns False, and reserves nothing, if there is no room now."""
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
        """Allocates what the next step writes: positions `computed` to `length`, from what was reserved.

        Args:
            held: what the sequence holds.
            computed: number of positions that the steps planned so far compute.
            length: number of positions after the next step.
            new: a list for each group, which receives the places to zero.
            copies: a list for each group, which receives the copies to make before places are zeroed.
        """
        for kind, mine, to_zero, to_copy in zip(self._kinds, held, new, copies, strict=True):
            kind.extend(mine, computed, length, to_zero, to_copy)

    def tag(self, held: Sequence[Any], keys: Sequence[bytes]) -> None:
        """Notes the keys of the sequence's first blocks, which the steps planned so far fill."""
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.tag(mine, keys)

    def publish(self, held: Sequence[Any]) -> None:
        """Lets other sequences share the blocks that have a key.

        It is called when a step has given no NaN: content that may hold NaN must not reach other sequences.
        """
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.publish(mine)

    def truncate(
        self, held: Sequence[Any], computed: int, length: int, keys: Sequence[bytes], copies: Sequence[Copies]
    ) -> bool:
        """Shortens a sequence from `computed` to `length` positions.

        Args:
            held: what the sequence holds.
            computed: number of its computed positions.
            length: number of positions to keep.
            keys: of its full blocks.
            copies: a list for each group, which receives the copies to make before the next step.

        Returns:
            False, with nothing changed, if a group cannot: something that it needs has been released, or other
            sequences hold a block that would be overwritten.
        """
        pairs = list(zip(self._kinds, held, strict=True))
        if not all(kind.can_truncate(mine, computed, length, keys) for kind, mine in pairs):
            return False
        for (kind, mine), to_make in zip(pairs, copies, strict=True):
            kind.truncate(mine, computed, length, keys, to_make)
        return True

    def checkpoint(self, held: Sequence[Any], computed: int, copies: Sequence[Copies]) -> bool:
        """Keeps what it takes to return to position `computed`, before a step that computes draft tokens.

        Returns False, and keeps nothing, if there is no room for it.
        """
        pairs = list(zip(self._kinds, held, strict=True))
        if all(kind.checkpoint(mine, computed, to_make) for (kind, mine), to_make in zip(pairs, copies, strict=True)):
            return True
        self._unmark(held)
        return False

    def roll_back(self, held: Sequence[Any], computed: int, length: int, copies: Sequence[Copies]) -> int:
        """Drops the draft tokens from position `length` on, which were wrong.

        Returns:
            Number of positions that are computed now. It is less than `length` if a recurrent state was kept only
            before the first draft token.
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
        """Releases all that the sequence holds."""
        for kind, mine in zip(self._kinds, held, strict=True):
            kind.release(mine)

    def chunk_end(self, held: Sequence[Any], first: int, end: int) -> int:
        """End of a prompt's chunk from `first`: the first position where a snapshot is taken, or else `end`."""
        for kind, mine in zip(self._kinds, held, strict=True):
            end = kind.chunk_end(mine, first, end)
        return end
