"""The prefix cache on disk: blocks and snapshots that were evicted from memory, and those of earlier processes.

An entry is a file, `DIR/<identity>/<group>-<key>`: a SHA-256, then the bytes of a block or slot. The identity names all
that the bytes depend on, so an entry of another engine or release is never found. The SHA-256 is of the identity, the
name and the bytes, so a file that was cut short, altered or renamed counts as missing. Files are replaced atomically
and may vanish at any time, so several processes can use one folder. KV caches reveal the prompts that they were
computed from, and answers are computed from them, so no other user may read them or write into the folder.
"""

import logging
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Event

from enginewright.errors import UsageError
from enginewright.regular_file import read_regular
from enginewright.runtime.cache.store import Entry, FoundEntries, PrefixStore
from enginewright.runtime.count import format_bytes

logger = logging.getLogger(__name__)

HASH_BYTES = 32
SCAN_S = 1.0  # seconds to wait for the scan of a large folder; entries found later than that are used from then on
STALE_S = 600.0  # age in seconds from which an unfinished file counts as abandoned: no write takes that long
ENTRY = re.compile(r"(?P<group>\d+)-(?P<key>[0-9a-f]{64})")
IDENTITY = re.compile(r"[0-9a-f]{64}")


class DiskStore(PrefixStore):
    """The entries of one engine in files. One thread reads, and one writes and removes.

    Where entries take more than `capacity_bytes`, the least recently used are removed. Entries of other engines count,
    too, as they were when the store was opened.

    Args:
        folder: created if it does not exist.
        identity: name of the engine's subfolder (`identity_of`).
        capacity_bytes: maximum size of all entries in the folder.
        place_bytes: size of a block or slot of each group.

    Raises:
        UsageError: the folder cannot be used, or nothing would fit.
    """

    def __init__(self, folder: Path, identity: str, capacity_bytes: int, place_bytes: Sequence[int]) -> None:
        super().__init__([HASH_BYTES + size for size in place_bytes], "kv-cache", readers=1, writers=1)
        self._folder, self._identity, self._capacity_bytes = folder, identity, capacity_bytes
        if capacity_bytes < sum(self._sizes):
            min_size = format_bytes(sum(self._sizes))
            raise UsageError(
                f"kv_cache_disk is {format_bytes(capacity_bytes)}", f"what a few tokens leave takes {min_size}"
            )
        _make_private(folder)
        _make_private(folder / identity)
        # For each group, the keys of entries that exist or are being written. The caller and both threads change it;
        # the caller reads it.
        self.keys: tuple[set[bytes], ...] = tuple(set() for _ in place_bytes)
        self._write_failures = self._read_failures = 0  # each is increased by one thread only: two would lose counts
        self._broken = False  # nothing can be written
        self.num_bytes = 0  # of all entries
        # Sizes in bytes by path below the folder, the least recently used first. Only the writer uses it.
        self._files: OrderedDict[str, int] = OrderedDict()
        self._scanned = Event()
        self._writer.submit(self._guarded, self._scan)
        self._found = self._reader.submit(self._wait_for_scan)

    @property
    def takes_entries(self) -> bool:
        return not self._broken

    @property
    def num_failures(self) -> int:
        """Number of files that could not be written or read, or were damaged."""
        return self._write_failures + self._read_failures

    def has(self, entry: Entry) -> bool:
        return entry[1] in self.keys[entry[0]]

    def find(self, keys: Sequence[bytes]) -> "Future[FoundEntries]":
        """All entries of the folder, once it has been scanned, or SCAN_S has passed."""
        return self._found

    def save(self, entry: Entry, content: Callable[[], bytes]) -> None:
        self.keys[entry[0]].add(entry[1])
        super().save(entry, content)

    def touch(self, entries: Sequence[Entry]) -> None:
        """Counts these entries as used now. The first of them will be the last to be removed."""
        self._writer.submit(self._guarded, self._touch, [self._path(*entry) for entry in reversed(entries)])

    def _wait_for_scan(self) -> FoundEntries:
        self._scanned.wait(SCAN_S)
        return FoundEntries(self.keys, 0.0)

    def _path(self, group: int, key: bytes) -> str:
        return f"{self._identity}/{group}-{key.hex()}"

    def _digest(self, path: str, content: bytes | memoryview) -> bytes:
        digest = sha256(path.encode())
        digest.update(content)
        return digest.digest()

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Does some work on files. After an OSError, nothing more is written: the server goes on without the disk."""
        try:
            work(*arguments)
        except OSError as error:
            self._write_failures += 1
            if not self._broken:
                logger.warning("no more of the KV cache is kept in %s: %s", self._folder, error.strerror)
            self._broken = True

    def _scan(self) -> None:
        found: list[tuple[float, str, int]] = []
        try:
            for folder in os.scandir(self._folder):
                if IDENTITY.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                    found += self._entries_in(folder.name)
            for _, path, size in sorted(found):
                entry = self._entry_of(path)
                if entry is None or size == self._sizes[entry[0]]:
                    self._files[path] = size
                else:
                    self._write_failures += 1
                    logger.warning("a block of the KV cache in %s has another size, and is removed", self._folder)
                    (self._folder / path).unlink(missing_ok=True)
            self.num_bytes = sum(self._files.values())
            self._make_room(0)
            for group, key in filter(None, map(self._entry_of, self._files)):
                self.keys[group].add(key)
        finally:
            self._scanned.set()

    def _entries_in(self, identity: str) -> list[tuple[float, str, int]]:
        """Modification times, paths and sizes of an engine's entries. Abandoned unfinished files are removed."""
        found = []
        for file in os.scandir(self._folder / identity):
            if not file.is_file(follow_symlinks=False):
                continue
            facts = file.stat(follow_symlinks=False)
            if ENTRY.fullmatch(file.name):
                found.append((facts.st_mtime, f"{identity}/{file.name}", facts.st_size))
            elif file.name.endswith(".part") and facts.st_mtime < time.time() - STALE_S:
                os.unlink(file.path)
        return found

    def _write(self, entry: Entry, content: bytes) -> None:
        self._guarded(self._write_file, entry, content)

    def _write_file(self, entry: Entry, content: bytes) -> None:
        path, size = self._path(*entry), self._sizes[entry[0]]
        self._make_room(size)
        part = self._folder / f"{path}.{os.getpid()}.part"
        try:
            part.unlink(missing_ok=True)  # it may be left by a process that was killed, or be a FIFO
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(self._digest(path, content))
                file.write(content)
            os.replace(part, self._folder / path)
        except OSError:
            self.keys[entry[0]].discard(entry[1])
            part.unlink(missing_ok=True)
            raise
        self.num_bytes += size - self._files.pop(path, 0)
        self._files[path] = size

    def _make_room(self, nbytes: int) -> None:
        while self._files and self.num_bytes + nbytes > self._capacity_bytes:
            path, size = self._files.popitem(last=False)
            self.num_bytes -= size
            if entry := self._entry_of(path):
                self.keys[entry[0]].discard(entry[1])
            (self._folder / path).unlink(missing_ok=True)

    def _entry_of(self, path: str) -> Entry | None:
        """Entry of a path; None if it belongs to another engine."""
        identity, _, name = path.partition("/")
        match = ENTRY.fullmatch(name) if identity == self._identity else None
        if match is None or int(match["group"]) >= len(self.keys):
            return None
        return int(match["group"]), bytes.fromhex(match["key"])

    def _touch(self, paths: Sequence[str]) -> None:
        for path in paths:
            if path in self._files:
                self._files.move_to_end(path)
                with suppress(FileNotFoundError):
                    os.utime(self._folder / path)

    def _drop(self, path: str) -> None:
        """Removes a file that is damaged or missing."""
        self.num_bytes -= self._files.pop(path, 0)
        (self._folder / path).unlink(missing_ok=True)

    def _read(self, entries: Sequence[Entry]) -> Mapping[Entry, bytes | memoryview]:
        contents = dict[Entry, bytes | memoryview]()
        for entry in entries:
            pending = self._pending.get(entry)
            content = self._content(entry) if pending is None else pending()
            if content is None:  # it was removed in the meantime, or is damaged: it is computed again
                self.keys[entry[0]].discard(entry[1])
                self._writer.submit(self._guarded, self._drop, self._path(*entry))
                break
            contents[entry] = content
        return contents

    def _content(self, entry: Entry) -> memoryview | None:
        path, size = self._path(*entry), self._sizes[entry[0]]
        try:
            data = memoryview(read_regular(self._folder / path, size, follow_links=False))
        except FileNotFoundError:
            return None
        except OSError as error:
            self._read_failures += 1
            logger.warning("a block of the KV cache in %s cannot be read: %s", self._folder, error.strerror)
            return None
        digest, content = data[:HASH_BYTES], data[HASH_BYTES:]
        if len(data) != size or digest != self._digest(path, content):
            self._read_failures += 1
            logger.warning("a block of the KV cache in %s is damaged, and is computed again", self._folder)
            return None
        return content


def _make_private(folder: Path) -> None:
    """Creates a folder if needed. Raises UsageError if that fails, or if other users may write into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        raise UsageError(
            f"the KV cache cannot be kept in {folder}", error.strerror or "", "Name another --kv-cache-dir."
        ) from error
    if facts.st_uid != os.geteuid() or stat.S_IMODE(facts.st_mode) & 0o022:
        raise UsageError(
            f"the KV cache cannot be kept in {folder}",
            "others may write there, and answers would be made of what they write",
            f"Name a --kv-cache-dir of your own, or chmod go-w {folder}.",
        )
    if not writable:
        raise UsageError(
            f"the KV cache cannot be kept in {folder}", "it cannot be written", "Name another --kv-cache-dir."
        )
