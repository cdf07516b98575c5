"""Beginnings that are on disk: kept there as they are computed, and read while a sequence waits that begins so."""

import time
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.disk import DiskStore, ReadEntries
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.step.sequence import TokenSequence

FIRST_S_PER_BYTE = 1 / 500e6  # of reading, before anything was read
LEARNING = 0.3  # what a read says of the pace of those to come
LATE = 2.0  # factor on the time that a read was given, for the estimate after one that did not end within it
# Factor on the estimated read speed after each skipped read, so that a slow disk is retried.
RETRY_SPEEDUP = 1.05
LONGEST_S = 5.0  # that a sequence waits for the disk, where nobody knows what computing takes


class PlaceMemory(Protocol):
    """The memory of a cache group. What is asked of it is done after all steps that have begun, and before the next."""

    place_bytes: int

    def copy(self, places: Copies) -> None: ...
    def read(self, place: int) -> Callable[[], bytes]:
        """Begin to read what a place holds now.

        Returns:
            What waits for it and gives it, in any thread. Called at least once, since memory is kept for it until then.
        """
        ...

    def write(self, place: int, content: bytes | memoryview) -> None: ...


class StoredPrefixes:
    """What memory lacks of the sequence that is admitted next is read, if that takes less time than to compute it. It
    comes into memory when there is room for the sequence, which finds it there.

    Args:
        memory: a group.
        seconds: what it takes to compute the tokens from one position up to another; None: nobody knows yet.
    """

    def __init__(
        self,
        cache: Cache,
        prefixes: SharedPrefixes,
        store: DiskStore,
        memory: Sequence[PlaceMemory],
        seconds: Callable[[int, int], float | None],
    ) -> None:
        self._cache, self._prefixes, self._store, self._memory, self._seconds = cache, prefixes, store, memory, seconds
        self._sequence: TokenSequence | None = None  # that was asked for last
        self._reading: Future[ReadEntries] | None = None  # of it; None: nothing is to be read
        self._num_bytes = 0  # that are being read
        self._began = self._until = 0.0  # by time.monotonic: when reading began, and when to compute instead
        self._s_per_byte = FIRST_S_PER_BYTE
        self.num_tokens = 0  # that were not computed, since they were read
        cache.save(partial(_save, store, memory))

    def is_read(self, sequence: TokenSequence, keys: Sequence[bytes]) -> bool:
        """Whether there is nothing to wait for before a sequence is admitted; begins to read what there is.

        Args:
            keys: of the blocks that are in memory.
        """
        if not self._store.is_scanned:
            return False
        if sequence is not self._sequence or self._reading is None:  # memory loses blocks while it waits for room
            self._sequence, self._reading = sequence, self._begin(sequence, len(keys))
        return self._reading is None or self._reading.done() or time.monotonic() > self._until

    def wait(self, seconds: float) -> None:
        """For what is being read."""
        if not self._store.is_scanned:
            self._store.wait_for_scan(seconds)
        elif self._reading is not None:
            futures.wait([self._reading], seconds)

    def forget(self, sequence: TokenSequence) -> None:
        """It is not to be admitted any more."""
        if sequence is self._sequence:
            self._sequence = self._reading = None

    def restore(self, sequence: TokenSequence, keys: Sequence[bytes], copies: Sequence[Copies]) -> Sequence[bytes]:
        """Put into memory what was read of a sequence that there is room for; keys of all that it can begin with.

        Args:
            keys: of those that are in memory already.
            copies: a group, that were to be made before the next step. They are made now, since what they are of may be
                written over.
        """
        reading = self._reading
        self.forget(sequence)
        if reading is None:
            return keys
        if not reading.done():
            took = (time.monotonic() - self._began) / self._num_bytes
            self._s_per_byte = max(self._s_per_byte, LATE * took)
            return keys
        read, wanted = reading.result(), self._prefixes.keys_of(sequence)
        if nbytes := sum(len(content) for content in read.contents.values()):
            self._s_per_byte += LEARNING * (read.seconds / nbytes - self._s_per_byte)
        there = [{key for group, key in read.contents if group == one} for one in range(len(self._memory))]
        found = wanted[: self._cache.num_shared(wanted, there)]
        if len(found) <= len(keys):
            return keys
        for memory, pending in zip(self._memory, copies, strict=True):
            if pending:
                memory.copy(pending)
                pending.clear()

        def write(group: int, key: bytes, place: int) -> None:
            self._memory[group].write(place, read.contents[group, key])

        self._store.touch(self._cache.missing_blocks(found))
        self._cache.restore(found, write)
        self._prefixes.restored(sequence, found)
        self.num_tokens += (len(found) - len(keys)) * (self._cache.block_size or 0)
        return found

    def _begin(self, sequence: TokenSequence, num_there: int) -> "Future[ReadEntries] | None":
        wanted = self._prefixes.keys_of(sequence)
        found = self._cache.num_shared(wanted, self._store.keys)
        if found <= num_there:
            return None
        absent, block_size = self._cache.missing_blocks(wanted[:found]), self._cache.block_size or 0
        seconds = self._seconds(num_there * block_size, found * block_size)
        nbytes = sum(self._memory[group].place_bytes for group, _ in absent)
        if seconds is not None and nbytes * self._s_per_byte > seconds:
            self._s_per_byte /= RETRY_SPEEDUP
            return None
        self._num_bytes, self._began = nbytes, time.monotonic()
        self._until = self._began + (LONGEST_S if seconds is None else seconds)
        return self._store.read(absent)


def _save(store: DiskStore, memory: Sequence[PlaceMemory], group: int, key: bytes, place: int) -> None:
    """Store a block that can be shared from now on, or whose memory is taken for something else."""
    if key in store.keys[group]:
        store.touch([(group, key)])
    elif store.has_room(group):
        store.save((group, key), memory[group].read(place))
