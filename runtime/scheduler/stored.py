"""Shared prefixes in stores, such as the disk: saved as they are computed, and read while a sequence waits."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.cache.store import Entry, FoundEntries, PrefixStore, ReadEntries
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.read_cost import ReadCost
from enginewright.runtime.step.sequence import TokenSequence

LONGEST_S = 5.0  # seconds that a sequence waits for stores, where the time to compute its prefix is not known


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


@dataclass(frozen=True, eq=False)
class _Source:
    """A store, and what reading it costs."""

    store: PrefixStore
    cost: ReadCost = field(default_factory=ReadCost)


@dataclass(frozen=True, eq=False)
class _Search:
    """A search for the prefix of a waiting sequence."""

    source: _Source
    found: Future[FoundEntries]


@dataclass(frozen=True, eq=False)
class _Read:
    """A read for the sequence that is admitted next."""

    source: _Source
    num_bytes: int
    entries: Future[ReadEntries]


class _AnyOf:
    """All that is in one of several containers."""

    def __init__(self, *containers: Container[bytes]) -> None:
        self._containers = containers

    def __contains__(self, key: object) -> bool:
        return any(key in one for one in self._containers)


class StoredPrefixes:
    """Reads blocks of the sequence that is admitted next from stores, if that takes less time than computing them.

    The prefix of each sequence is searched for when it arrives, so that the search does not delay its turn. The blocks
    of the next one are written into the KV cache once it has free blocks for the sequence, which then finds them there.

    Args:
        cache: the KV cache.
        prefixes: keys of the sequences.
        stores: the stores, the fastest first. An entry is read from the first one that has it.
        writer: writes blocks into the cache.
        seconds: gives the seconds to compute the tokens from one position up to another; None: not known yet.
    """

    def __init__(
        self,
        cache: Cache,
        prefixes: SharedPrefixes,
        stores: Sequence[PrefixStore],
        writer: PrefixWriter,
        seconds: Callable[[int, int], float | None],
    ) -> None:
        self._cache, self._prefixes, self._writer, self._seconds = cache, prefixes, writer, seconds
        self._sources = [_Source(store) for store in stores]
        self._searches: dict[TokenSequence, list[_Search]] = {}  # for each waiting sequence with a prefix
        self._sequence: TokenSequence | None = None  # sequence that is_read was last called with
        self._reads: list[_Read] = []  # the reads for it; none: there is nothing to read
        self._began = self._until = 0.0  # time.monotonic at which the wait began, and at which to compute instead
        cache.save(partial(_save, stores, writer.memory))

    def search(self, sequence: TokenSequence) -> None:
        """Begins to search for the prefix of a waiting sequence, in stores that may pay off."""
        wanted = tuple(self._prefixes.keys_of(sequence))
        num_there = self._cache.num_shared(wanted)
        if num_there == len(wanted):  # at present: its blocks may be evicted while it waits
            return
        self._searches[sequence] = searches = []
        seconds = self._seconds_of(num_there, len(wanted))
        for source in self._sources:
            if seconds is None or source.cost.search_s <= seconds:
                searches.append(_Search(source, source.store.find(wanted)))
            else:
                source.cost.did_not_pay()

    def is_read(self, sequence: TokenSequence, keys: Sequence[bytes]) -> bool:
        """Begins to read a sequence's blocks from stores, if these have any that pay off.

        Args:
            sequence: the sequence that is admitted next.
            keys: keys of its blocks that are in memory.

        Returns:
            True if its admission does not have to wait for a store any longer.
        """
        now = time.monotonic()
        if sequence not in self._searches:
            self.search(sequence)
        if sequence is not self._sequence:
            self._sequence, self._reads = sequence, []
            self._wait_at_most(self._seconds_of(len(keys), len(self._prefixes.keys_of(sequence))))
        if not self._reads:
            if now <= self._until and not all(one.found.done() for one in self._searches.get(sequence, ())):
                return False
            self._reads = self._begin(sequence, len(keys))
        return all(one.entries.done() for one in self._reads) or now > self._until

    def wait(self, seconds: float) -> None:
        """Waits until the stores have been searched or read, at most this number of seconds."""
        if self._sequence is None:
            return
        pending: list[Future[Any]] = [one.entries for one in self._reads]
        if not pending:
            pending = [one.found for one in self._searches.get(self._sequence, ())]
        if pending:
            futures.wait(pending, seconds)

    def forget(self, sequence: TokenSequence) -> None:
        """Drops searches and reads for a sequence that does not wait any more."""
        for one in self._searches.pop(sequence, ()):
            if one.found.done():
                one.source.cost.search_ended(one.found.result().seconds)
        if sequence is self._sequence:
            self._sequence, self._reads = None, []

    def restore(self, sequence: TokenSequence, keys: Sequence[bytes], copies: Sequence[Copies]) -> Sequence[bytes]:
        """Writes the blocks that were read for a sequence into the KV cache, which has free blocks for it.

        Args:
            sequence: the sequence that is admitted next.
            keys: keys of its blocks that are in memory already.
            copies: copies to make before the next step, by cache group.

        Returns:
            Keys of all blocks of its prefix that are in memory now.
        """
        reads, contents = self._reads, dict[Entry, bytes | memoryview]()
        self.forget(sequence)
        for one in reads:
            if one.entries.done():
                read = one.entries.result()
                one.source.cost.read_ended(sum(map(len, read.contents.values())), read.seconds)
                one.source.store.touch(list(read.contents))
                contents.update(read.contents)
            else:
                one.source.cost.read_is_late(one.num_bytes, time.monotonic() - self._began)
                one.entries.cancel()
        return self._writer.write(sequence, keys, contents, copies) if contents else keys

    def _begin(self, sequence: TokenSequence, num_there: int) -> list[_Read]:
        """Begins the reads that save the most time, if any does."""
        sources, found = self._found(sequence), list[FoundEntries]()
        wanted, num_before = self._prefixes.keys_of(sequence), num_there
        best: dict[_Source, list[Entry]] = {}
        best_s: float | None = None  # seconds to compute what the best reads bring
        most_saved_s = 0.0
        for entries in sources.values():
            found.append(entries)
            also: Sequence[Container[bytes]] = found[0].keys
            if len(found) > 1:
                also = [_AnyOf(*keys) for keys in zip(*(one.keys for one in found), strict=True)]
            num_found = self._cache.num_shared(wanted, also)
            if num_found <= num_before:
                continue
            num_before = num_found
            parts: dict[_Source, list[Entry]] = {}
            for group, key in self._cache.missing_blocks(wanted[:num_found]):
                source = next(source for source, one in sources.items() if key in one.keys[group])
                parts.setdefault(source, []).append((group, key))
            seconds = self._seconds_of(num_there, num_found)
            saved_s = 0.0
            if seconds is not None:
                saved_s = seconds - max(source.cost.of_read(self._bytes_of(part)) for source, part in parts.items())
                if saved_s < most_saved_s:
                    continue
            best, best_s = parts, seconds
            most_saved_s = saved_s
        if not best and num_before > num_there:
            for source in parts:
                source.cost.did_not_pay()
        if best:
            self._wait_at_most(best_s)
        return [_Read(source, self._bytes_of(part), source.store.read(part)) for source, part in best.items()]

    def _found(self, sequence: TokenSequence) -> dict[_Source, FoundEntries]:
        """Results of the searches for a sequence. A search that is late is given up."""
        found = dict[_Source, FoundEntries]()
        for one in list(searches := self._searches.get(sequence, [])):
            if one.found.done():
                found[one.source] = one.found.result()
            else:
                one.source.cost.search_is_late(time.monotonic() - self._began)
                one.found.cancel()
                searches.remove(one)
        return found

    def _wait_at_most(self, seconds: float | None) -> None:
        self._began = time.monotonic()
        self._until = self._began + (LONGEST_S if seconds is None else seconds)

    def _seconds_of(self, first: int, end: int) -> float | None:
        """Seconds to compute the blocks from `first` up to `end`."""
        block_size = self._cache.block_size or 0
        return self._seconds(first * block_size, end * block_size)

    def _bytes_of(self, entries: Sequence[Entry]) -> int:
        return sum(self._writer.memory[group].place_bytes for group, _ in entries)


def _save(stores: Sequence[PrefixStore], memory: Sequence[PlaceMemory], group: int, key: bytes, place: int) -> None:
    """Saves a block that others may share from now on, or whose memory is about to be reused."""
    takers = []
    for store in stores:
        if store.has((group, key)):
            store.touch([(group, key)])
        elif store.has_room(group):
            takers.append(store)
    if takers:
        content = memory[group].read(place)
        for store in takers:
            store.save((group, key), content)
