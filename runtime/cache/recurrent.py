"""Recurrent states: a slot for each running sequence, and snapshots for later sequences with the same prefix.

A state is that of one position, so a new sequence can only start from a position where a copy was kept, a snapshot.
Snapshots are taken at multiples of a group's `snapshot_tokens`, after the last full block of the text that a sequence
was admitted with, and where that text diverges from an earlier one, as the blocks of other groups show: later sequences
are likely to diverge there, too (https://arxiv.org/abs/2411.19379). A snapshot is found by the key of the block that
ends there, and is kept, as blocks are, until its slot is needed.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from enginewright.plan import RecurrentState
from enginewright.runtime.cache.eviction import NOT_RETAINED, Retention
from enginewright.runtime.cache.kind import CacheKind, Copies
from enginewright.runtime.cache.pool import Pool, Tag


def slots_of(length: int) -> int:
    """Number of slots for a sequence of `length` positions: its own, and a snapshot that other sequences share."""
    return 2 if length else 0


@dataclass
class Snapshot:
    """A copy of a sequence's state that no other sequence may use yet."""

    position: int  # number of tokens that the state has seen
    slot: int  # slot of the copy
    tag: Tag | None = None  # key of the state; None: its last tokens are not known yet


@dataclass
class StateSlot:
    """The slots of one sequence in one group."""

    slot: int  # slot of its state
    snapshots_end: int  # position up to which no snapshot is taken any more: one exists, or there was no room for it
    # Positions of snapshots in addition to multiples of the interval: the end of the last full block of the text that
    # it was admitted with and that at least one token follows, and the position where it diverges from other texts.
    stops: tuple[int, ...]
    shares: bool  # true of a sequence that takes snapshots
    retention: Retention = NOT_RETAINED  # hint for its snapshots
    pending: list[Snapshot] = field(default_factory=list)  # snapshots that are not published yet
    checkpoint: Snapshot | None = None  # state before the draft tokens that are being computed

    @property
    def held(self) -> list[int]:
        """The slot of the state, in a list as for BlockTable.held."""
        return [self.slot]


class StateSlots(CacheKind[StateSlot]):
    """The slots of one recurrent group: one for each running sequence, and the rest for snapshots.

    An admitted sequence always has its slot: snapshots that are not published, and checkpoints, leave enough slots for
    all sequences that may run.

    Args:
        group: the plan's cache group.
        num_slots: number of its slots.
        sequences: maximum number of sequences that run at once.
        block_size: number of tokens of a block with a key; None if no prefix can be shared.
        clock: gives the time in seconds.
    """

    def __init__(
        self,
        group: RecurrentState,
        num_slots: int,
        sequences: int,
        block_size: int | None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.pool = Pool(num_slots, clock)
        self._interval, self._block_size = group.snapshot_tokens, block_size or 1
        self._may_share = block_size is not None
        self._max_pending = max(num_slots - sequences, 0)
        self._num_pending = 0

    def num_shared(self, keys: Sequence[bytes], max_blocks: int, also: Container[bytes] = ()) -> int:
        there = (count for count in range(max_blocks, 0, -1) if keys[count - 1] in self.pool or keys[count - 1] in also)
        return next(there, 0)

    def begins_with(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys[-1:]

    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        return self.pool.num_free > 0

    def open(
        self,
        length: int,
        keys: Sequence[bytes],
        copies: Copies,
        *,
        shares: bool,
        divergence_position: int,
        retention: Retention,
    ) -> StateSlot:
        """Starts with a copy of a snapshot, or with the snapshot itself if no other slot is free."""
        pool, shared = self.pool, len(keys) * self._block_size
        if not keys:
            slot = pool.take()
        else:
            slot = pool.place_of(keys[-1])
            pool.hold(slot)
            if pool.num_free:
                snapshot, slot = slot, pool.take()
                copies.append((snapshot, slot))
                pool.drop(snapshot, retention)
            else:
                pool.overwrite(slot)
        last_block = (length - 1) // self._block_size * self._block_size
        return StateSlot(slot, shared, (divergence_position, last_block), shares and self._may_share, retention)

    def can_fork(self, held: StateSlot, computed: int, shared: int, length: int, watermark_blocks: int) -> bool:
        """True at the state's own position only: earlier states are gone."""
        return shared == computed and self.pool.num_free > 0

    def fork(self, held: StateSlot, shared: int, length: int, copies: Copies) -> StateSlot:
        slot = self.pool.take()
        copies.append((held.slot, slot))
        return StateSlot(slot, shared, held.stops, held.shares, held.retention)

    def extend(self, held: StateSlot, computed: int, length: int, new: list[int], copies: Copies) -> None:
        """Takes a snapshot if position `computed`, which the state has reached, is one of its stops."""
        if computed == 0:
            new.append(held.slot)
        elif held.shares and computed > held.snapshots_end and self._is_stop(held, computed):
            if self._num_pending == self._max_pending and held.pending:
                self._forget(held.pending.pop(0))  # the snapshot of the longest prefix is worth most
            if self._num_pending < self._max_pending:
                self._num_pending += 1
                held.pending.append(Snapshot(computed, self.pool.take()))
                copies.append((held.slot, held.pending[-1].slot))
            held.snapshots_end = computed

    def tag(self, held: StateSlot, keys: Sequence[bytes]) -> None:
        for snapshot in held.pending:
            block = snapshot.position // self._block_size
            if snapshot.tag is None and block <= len(keys):
                snapshot.tag = self.pool.tag(snapshot.slot, keys[block - 1])

    def publish(self, held: StateSlot) -> None:
        for snapshot in held.pending:
            if snapshot.tag is not None:
                self.pool.publish(snapshot.slot, snapshot.tag)
                self._drop(snapshot, held.retention)
        held.pending = [snapshot for snapshot in held.pending if snapshot.tag is None]

    def can_truncate(self, held: StateSlot, computed: int, length: int, keys: Sequence[bytes]) -> bool:
        """True for the state's own position, a snapshot's position, and 0."""
        return length in (0, computed) or self._snapshot_at(held, length, keys) is not None

    def truncate(self, held: StateSlot, computed: int, length: int, keys: Sequence[bytes], copies: Copies) -> None:
        if length not in (0, computed):
            slot = self._snapshot_at(held, length, keys)
            assert slot is not None, "can_truncate said so"
            copies.append((slot, held.slot))
        for snapshot in held.pending:
            if snapshot.position > length:
                self._forget(snapshot)
        held.pending = [snapshot for snapshot in held.pending if snapshot.position <= length]
        held.snapshots_end = min(held.snapshots_end, length)

    def checkpoint(self, held: StateSlot, computed: int, copies: Copies) -> bool:
        """Copies the state before the next step; False if no slot is left for it."""
        if self._num_pending == self._max_pending:
            return False
        self._num_pending += 1
        held.checkpoint = Snapshot(computed, self.pool.take())
        copies.append((held.slot, held.checkpoint.slot))
        return True

    def rollback_position(self, held: StateSlot, computed: int, length: int) -> int:
        return length if length == computed or held.checkpoint is None else held.checkpoint.position

    def drop_checkpoint(self, held: StateSlot) -> None:
        if held.checkpoint is not None:
            self._drop(held.checkpoint)
            held.checkpoint = None

    def release(self, held: StateSlot) -> None:
        for snapshot in held.pending:
            self._forget(snapshot)
        held.pending = []
        self.drop_checkpoint(held)
        self.pool.drop(held.slot)

    def chunk_end(self, held: StateSlot, first: int, end: int) -> int:
        if not held.shares:
            return end
        interval = first - first % self._interval + self._interval
        return min(end, interval, *(stop for stop in held.stops if stop > first))

    def _is_stop(self, held: StateSlot, position: int) -> bool:
        return position % self._interval == 0 or position in held.stops

    def _snapshot_at(self, held: StateSlot, position: int, keys: Sequence[bytes]) -> int | None:
        """Slot of a snapshot at a position, the sequence's own or a published one; None if there is none."""
        for snapshot in (*held.pending, held.checkpoint):
            if snapshot is not None and snapshot.position == position:
                return snapshot.slot
        block, rest = divmod(position, self._block_size)
        if rest or not 0 < block <= len(keys) or keys[block - 1] not in self.pool:
            return None
        return self.pool.place_of(keys[block - 1])

    def _drop(self, snapshot: Snapshot, retention: Retention = NOT_RETAINED) -> None:
        self.pool.drop(snapshot.slot, retention)
        self._num_pending -= 1

    def _forget(self, snapshot: Snapshot) -> None:
        if snapshot.tag is not None:
            self.pool.forget(snapshot.slot, snapshot.tag)
        self._drop(snapshot)
