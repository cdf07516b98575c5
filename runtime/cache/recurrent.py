"""Recurrent states: a slot for each sequence that runs, and snapshots for those that will begin alike.

A state is of all tokens up to a position and of no other, so a sequence can only begin where somebody has kept a copy:
at multiples of a group's `snapshot_tokens`, at the last full block of the text that it was admitted with, and where
that text parts from one that came before it, which the blocks of other groups show: others are likely to part there,
too (https://arxiv.org/abs/2411.19379). A snapshot is found by the key of the block that ends there, and is kept, as
blocks are, until its slot is needed.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from enginewright.plan import RecurrentState
from enginewright.runtime.cache.kind import CacheKind, Copies
from enginewright.runtime.cache.pool import Pool, Tag


def slots_of(length: int) -> int:
    """Slots for a sequence of `length` positions: its own, and a snapshot that others may begin with."""
    return 2 if length else 0


@dataclass
class Snapshot:
    """A copy of a sequence's state that nobody else may use yet."""

    position: int  # tokens that it has seen
    slot: int
    tag: Tag | None = None  # None: its last tokens are not known


@dataclass
class StateSlot:
    """What one sequence holds in one group."""

    slot: int
    snapshots_end: int  # no snapshot is taken up to this position: one is there, or there was no room for it
    # Where it takes snapshots beside multiples of the interval: behind the last full block of what it was admitted with
    # and that at least one token follows, and where it parts from others.
    stops: tuple[int, ...]
    shares: bool  # it takes snapshots
    pending: list[Snapshot] = field(default_factory=list)
    checkpoint: Snapshot | None = None  # what it was before the guesses that are being computed

    @property
    def held(self) -> list[int]:
        return [self.slot]


class StateSlots(CacheKind[StateSlot]):
    """A sequence never lacks its slot once it is admitted. Snapshots take what those that may still come leave.

    Args:
        sequences: that run at once, at most.
        block_size: tokens of a block with a key; None if no beginning can be shared.
    """

    def __init__(self, group: RecurrentState, num_slots: int, sequences: int, block_size: int | None) -> None:
        self.pool = Pool(num_slots)
        self._interval, self._block_size = group.snapshot_tokens, block_size or 1
        self._may_share = block_size is not None
        self._max_pending = max(num_slots - sequences, 0)
        self._num_pending = 0

    def num_shared(self, keys: Sequence[bytes], most: int, also: Container[bytes] = ()) -> int:
        there = (count for count in range(most, 0, -1) if keys[count - 1] in self.pool or keys[count - 1] in also)
        return next(there, 0)

    def begins_with(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        return keys[-1:]

    def has_room(self, length: int, keys: Sequence[bytes], watermark_blocks: int) -> bool:
        return self.pool.num_free > 0

    def open(
        self, length: int, keys: Sequence[bytes], copies: Copies, *, shares: bool, divergence_position: int
    ) -> StateSlot:
        """It begins with a copy of a snapshot, or with the snapshot itself if no other slot is free."""
        pool, shared = self.pool, len(keys) * self._block_size
        if not keys:
            slot = pool.take()
        else:
            slot = pool.place_of(keys[-1])
            pool.hold(slot)
            if pool.num_free:
                snapshot, slot = slot, pool.take()
                copies.append((snapshot, slot))
                pool.drop(snapshot)
            else:
                pool.overwrite(slot)
        last_block = (length - 1) // self._block_size * self._block_size
        return StateSlot(slot, shared, (divergence_position, last_block), shares and self._may_share)

    def can_fork(self, held: StateSlot, computed: int, shared: int, length: int, watermark_blocks: int) -> bool:
        """Only where the state stands: what it was before is gone."""
        return shared == computed and self.pool.num_free > 0

    def fork(self, held: StateSlot, shared: int, length: int, copies: Copies) -> StateSlot:
        slot = self.pool.take()
        copies.append((held.slot, slot))
        return StateSlot(slot, shared, held.stops, held.shares)

    def extend(self, held: StateSlot, computed: int, length: int, new: list[int], copies: Copies) -> None:
        """Steps before this one have brought the state to `computed`: if that is a stop, a copy is made now."""
        if computed == 0:
            new.append(held.slot)
        elif held.shares and computed > held.snapshots_end and self._is_stop(held, computed):
            if self._num_pending == self._max_pending and held.pending:
                self._forget(held.pending.pop(0))  # the longest beginning is worth most
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
                self._drop(snapshot)
        held.pending = [snapshot for snapshot in held.pending if snapshot.tag is None]

    def can_truncate(self, held: StateSlot, computed: int, length: int, keys: Sequence[bytes]) -> bool:
        """Only to where its state stands, to a snapshot, or to nothing."""
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
        """By a copy, made before the next step."""
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
        """The slot of a snapshot, its own or one that all may use."""
        for snapshot in (*held.pending, held.checkpoint):
            if snapshot is not None and snapshot.position == position:
                return snapshot.slot
        block, rest = divmod(position, self._block_size)
        if rest or not 0 < block <= len(keys) or keys[block - 1] not in self.pool:
            return None
        return self.pool.place_of(keys[block - 1])

    def _drop(self, snapshot: Snapshot) -> None:
        self.pool.drop(snapshot.slot)
        self._num_pending -= 1

    def _forget(self, snapshot: Snapshot) -> None:
        if snapshot.tag is not None:
            self.pool.forget(snapshot.slot, snapshot.tag)
        self._drop(snapshot)
