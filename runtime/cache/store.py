"""Stores of prefixes outside the KV cache: what a scheduler needs of them, and the queue of what they have to write.

An entry is the content of a block or a snapshot. It is found by its cache group and its key (`keys.py`), so equal
tokens of one tenant have equal entries, and a process finds what any other has computed.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import file_digest, sha256
from threading import Lock

import msgspec

from enginewright import _cpu
from enginewright.plan import CacheGroup

FORMAT = 1  # version of the entries' content
MAX_PENDING_BYTES = 64 << 20  # bytes that may wait to be written to a store; entries beyond this are not kept

Entry = tuple[int, bytes]  # the index of a cache group, and the key of a block or snapshot in it


def identity_of(content_hash: str, isa: str, groups: Sequence[CacheGroup]) -> str:
    """Hash of all that an entry's bytes depend on: the engine, the code that computes, and the layout of a place.

    The code for CPUs is in the extension module. That for GPUs is in the engine file, so its content hash covers it.

    Args:
        content_hash: of the engine file.
        isa: instruction set of the CPU, or architecture of the GPU.
        groups: the plan's cache groups.

    Returns:
        64 hexadecimal digits.
    """
    with open(_cpu.__file__, "rb") as code:
        facts = [FORMAT, content_hash, file_digest(code, "sha256").hexdigest(), isa, msgspec.to_builtins(groups)]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class FoundEntries(msgspec.Struct, frozen=True):
    """Result of a search for the entries of a prefix."""

    keys: Sequence[Container[bytes]]  # for each cache group, keys of the entries that can be read
    seconds: float  # duration of the search; 0 if nothing was waited for


class ReadEntries(msgspec.Struct, frozen=True):
    """Result of a read of entries."""

    contents: Mapping[Entry, bytes | memoryview]  # bytes of each entry, without those that are missing
    seconds: float  # duration of the read


class PrefixStore(ABC):
    """Entries outside the KV cache. Threads of its own search, read and write. One other thread calls it.

    Nothing here raises, and nothing waits: a failure is an entry that is missing, and is computed.

    Args:
        entry_bytes: size that an entry of each cache group has in this store.
        name: what its threads are called.
        readers: number of threads that search and read.
        writers: number of threads that write.
    """

    def __init__(self, entry_bytes: Sequence[int], name: str, readers: int, writers: int) -> None:
        self._sizes = list(entry_bytes)
        self._pending: dict[Entry, Callable[[], bytes]] = {}  # content of entries that are not written yet
        self._pending_bytes = 0  # size of these entries
        self._lock = Lock()  # held to change the number
        self._reader = ThreadPoolExecutor(readers, f"{name}-read")
        self._writer = ThreadPoolExecutor(writers, f"{name}-write")

    @property
    @abstractmethod
    def takes_entries(self) -> bool:
        """False if nothing can be written at present."""

    @abstractmethod
    def has(self, entry: Entry) -> bool:
        """True if an entry is known to be here, or waits to be written."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> "Future[FoundEntries]":
        """Begins to search for the entries of a prefix.

        Args:
            keys: of the prefix's blocks.
        """

    @abstractmethod
    def _read(self, entries: Sequence[Entry]) -> Mapping[Entry, bytes | memoryview]:
        """Reads entries in order, up to the first that is missing: those after it are of no use."""

    @abstractmethod
    def _write(self, entry: Entry, content: bytes) -> None:
        """Writes an entry."""

    def touch(self, entries: Sequence[Entry]) -> None:
        """Counts these entries as used now, the first of them last."""
        return

    def read(self, entries: Sequence[Entry]) -> "Future[ReadEntries]":
        """Begins to read entries in order, up to the first that is missing."""
        return self._reader.submit(self._timed_read, entries)

    def has_room(self, group: int) -> bool:
        """True if one more entry of a group can be kept, that is, if not too much waits to be written already.

        If nothing waits, an entry of any size can: a recurrent state may be larger than MAX_PENDING_BYTES.
        """
        pending = self._pending_bytes
        return self.takes_entries and (not pending or pending + self._sizes[group] <= MAX_PENDING_BYTES)

    def save(self, entry: Entry, content: Callable[[], bytes]) -> None:
        """Queues an entry to be written. The caller has checked `has_room`.

        Args:
            entry: group and key.
            content: returns the bytes; it is called in another thread.
        """
        self._pending[entry] = content
        with self._lock:
            self._pending_bytes += self._sizes[entry[0]]
        self._writer.submit(self._write_pending, entry)

    def close(self) -> None:
        """Writes what is queued, and ends the threads."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _timed_read(self, entries: Sequence[Entry]) -> ReadEntries:
        began = time.perf_counter()
        contents = self._read(entries)
        return ReadEntries(contents, time.perf_counter() - began)

    def _write_pending(self, entry: Entry) -> None:
        try:
            content = self._pending[entry]()  # even if nothing can be written: memory is kept for it until then
            if self.takes_entries:
                self._write(entry, content)
        finally:
            del self._pending[entry]
            with self._lock:
                self._pending_bytes -= self._sizes[entry[0]]
