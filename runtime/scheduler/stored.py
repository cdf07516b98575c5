"""Shared prefixes on disk: saved as they are computed, and read while a sequence with such a prefix waits."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.disk import DiskStore, Entry, ReadEntries
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.step.sequence import TokenSequence

FIRST_S_PER_BYTE = 1 / 500e6  # seconds to read a byte, before any read was measured
LEARNING = 0.3  # weight of a finished read in the estimated seconds per byte
LATE = 2.0  # factor on the time that an unfinished read has taken so far, for the estimate after it
# Factor on the estimated read speed after each skipped read, so that a slow disk is retried.
RETRY_SPEEDUP = 1.05
LONGEST_S = 5.0  # seconds that a sequence waits for the disk, where the time to compute its prefix is not known


class PlaceMemory(Protocol):
    """The memory of a cache group. Each operation is done after all steps that have begun, and before the next one."""

    place_bytes: int  # size of a block or slot, in bytes

    def copy(self, places: Copies) -> None:
        """Copies blocks or slots, each a pair of source and destination."""
        ...

    def read(self, place: int) -> Callable[[], bytes]:
        """Begins to read the present content of a block or slot.

        Returns:
            A function that waits for the content and returns it, in any thread. It has to be called at least once,
            since memory is kept for the content until then.
        """
        ...

    def write(self, place: int, content: bytes | memoryview) -> None:
        """Writes the content of a block or slot."""
        ...


class PrefixWriter:
    """Writes blocks that were read from elsewhere into the KV cache, where sequences find them.

    Args:
        cache: the KV cache.
        prefixes: keys of the sequences.
        memory: memory of each cache group.
    """

    def __init__(self, cache: Cache, prefixes: SharedPrefixes, memory: Sequence[PlaceMemory]) -> None:
        self._cache, self._prefixes, self.memory = cache, prefixes, memory
        self.num_tokens = 0  # number of tokens whose blocks were written, since the start

    def write(
        self,
        sequence: TokenSequence,
        keys: Sequence[bytes],
        contents: Mapping[Entry, bytes | memoryview],
        copies: Sequence[Copies],
    ) -> Sequence[bytes]:
        """Writes the blocks of a sequence's prefix into the cache, which has free blocks for them.

        Args:
            sequence: the sequence that is admitted next.
            keys: keys of its blocks that are in memory already.
            contents: content of blocks and snapshots.
            copies: copies to make before the next step, by cache group. They are made now, since their sources may be
                overwritten.

        Returns:
            Keys of all blocks of its prefix that are in memory now.
        """
        wanted = self._prefixes.keys_of(sequence)
        there = [{key for group, key in contents if group == one} for one in range(len(self.memory))]
        found = wanted[: self._cache.num_shared(wanted, there)]
        if len(found) <= len(keys):
            return keys
        for memory, pending in zip(self.memory, copies, strict=True):
            if pending:
                memory.copy(pending)
                pending.clear()

        def write(group: int, key: bytes, place: int) -> None:
            self.memory[group].write(place, contents[group, key])

        self._cache.restore(found, write)
        self._prefixes.restored(sequence, found)
        self.num_tokens += (len(found) - len(keys)) * (self._cache.block_size or 0)
        return found


class StoredPrefixes:
    """Reads blocks of the sequence that is admitted next from disk, if that takes less time than computing them.

    The blocks are written into the KV cache once it has free blocks for the sequence, which then finds them there.

    Args:
        cache: the KV cache.
        prefixes: keys of the sequences.
        store: the blocks on disk.
        writer: writes blocks into the cache.
        seconds: gives the seconds to compute the tokens from one position up to another; None: not known yet.
    """

    def __init__(
        self,
        cache: Cache,
        prefixes: SharedPrefixes,
        store: DiskStore,
        writer: PrefixWriter,
        seconds: Callable[[int, int], float | None],
    ) -> None:
        self._cache, self._prefixes, self._store, self._writer, self._seconds = cache, prefixes, store, writer, seconds
        self._sequence: TokenSequence | None = None  # sequence that is_read was last called with
        self._reading: Future[ReadEntries] | None = None  # the read for it; None: there is nothing to read
        self._num_bytes = 0  # size of the read
        self._began = self._until = 0.0  # time.monotonic at which the read began, and at which to compute instead
        self._s_per_byte = FIRST_S_PER_BYTE
        cache.save(partial(_save, store, writer.memory))

    def is_read(self, sequence: TokenSequence, keys: Sequence[bytes]) -> bool:
        """Begins to read a sequence's blocks from disk, if it has any there that pay off.

        Args:
            sequence: the sequence that is admitted next.
            keys: keys of its blocks that are in memory.

        Returns:
            True if its admission does not have to wait for the disk any longer.
        """
        if not self._store.is_scanned:
            return False
        if sequence is not self._sequence or self._reading is None:  # its blocks may be evicted while it waits
            self._sequence, self._reading = sequence, self._begin(sequence, len(keys))
        return self._reading is None or self._reading.done() or time.monotonic() > self._until

    def wait(self, seconds: float) -> None:
        """Waits until the disk has been scanned or read, at most this number of seconds."""
        if not self._store.is_scanned:
            self._store.wait_for_scan(seconds)
        elif self._reading is not None:
            futures.wait([self._reading], seconds)

    def forget(self, sequence: TokenSequence) -> None:
        """Drops the read for a sequence that is not admitted next any more."""
        if sequence is self._sequence:
            self._sequence = self._reading = None

    def restore(self, sequence: TokenSequence, keys: Sequence[bytes], copies: Sequence[Copies]) -> Sequence[bytes]:
        """Writes the blocks that were read for a sequence into the KV cache, which has free blocks for it.

        Args:
            sequence: the sequence that is admitted next.
            keys: keys of its blocks that are in memory already.
            copies: copies to make before the next step, by cache group.

        Returns:
            Keys of all blocks of its prefix that are in memory now.
        """
        reading = self._reading
        self.forget(sequence)
        if reading is None:
            return keys
        if not reading.done():
            took = (time.monotonic() - self._began) / self._num_bytes
            self._s_per_byte = max(self._s_per_byte, LATE * took)
            return keys
        read = reading.result()
        if nbytes := sum(len(content) for content in read.contents.values()):
            self._s_per_byte += LEARNING * (read.seconds / nbytes - self._s_per_byte)
        self._store.touch(list(read.contents))
        return self._writer.write(sequence, keys, read.contents, copies)

    def _begin(self, sequence: TokenSequence, num_there: int) -> "Future[ReadEntries] | None":
        wanted = self._prefixes.keys_of(sequence)
        found = self._cache.num_shared(wanted, self._store.keys)
        if found <= num_there:
            return None
        absent, block_size = self._cache.missing_blocks(wanted[:found]), self._cache.block_size or 0
        seconds = self._seconds(num_there * block_size, found * block_size)
        nbytes = sum(self._writer.memory[group].place_bytes for group, _ in absent)
        if seconds is not None and nbytes * self._s_per_byte > seconds:
            self._s_per_byte /= RETRY_SPEEDUP
            return None
        self._num_bytes, self._began = nbytes, time.monotonic()
        self._until = self._began + (LONGEST_S if seconds is None else seconds)
        return self._store.read(absent)


def _save(store: DiskStore, memory: Sequence[PlaceMemory], group: int, key: bytes, place: int) -> None:
    """Saves a block that others may share from now on, or whose memory is about to be reused."""
    if key in store.keys[group]:
        store.touch([(group, key)])
    elif store.has_room(group):
        store.save((group, key), memory[group].read(place))
