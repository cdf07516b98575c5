"""What the prefix cache has had, on disk: blocks and snapshots that fell out of memory, and those of earlier processes.

An entry is a file, `DIR/<identity>/<group>-<key>`: a SHA-256 and the bytes of a place. The identity names all that the
bytes depend on, so an entry is right or is not found; the SHA-256 is of the identity, the name and the bytes, so a file
that was cut short, altered or renamed counts as not there. Files are replaced whole and may vanish at any time: several
processes can use a folder. KV caches give away the prompts that they are of, and answers are made of them, so nobody
else may read them, nor write into the folder.
"""

import json
import logging
import os
import re
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from threading import Event

import msgspec

from enginewright import _cpu
from enginewright.errors import UsageError
from enginewright.plan import CacheGroup
from enginewright.regular_file import read_regular
from enginewright.runtime.count import format_bytes

logger = logging.getLogger(__name__)

FORMAT = 1  # of entries
HASH_BYTES = 32
MOST_PENDING_BYTES = 64 << 20  # that wait to be written; what comes on top is not kept
SCAN_S = 1.0  # what is not found by then in a large folder is found later
STALE_S = 600.0  # a file that is being written is not written for so long
ENTRY = re.compile(r"(?P<group>\d+)-(?P<key>[0-9a-f]{64})")
IDENTITY = re.compile(r"[0-9a-f]{64}")

Entry = tuple[int, bytes]  # a group, and the key of what a sequence has left in it


def identity_of(content_hash: str, isa: str, groups: Sequence[CacheGroup]) -> str:
    """Names what the bytes of an entry depend on: the engine, the code that computes, and how places are laid out.

    The code for CPUs is in the extension; that for GPUs is in the engine, whose hash names it.

    Args:
        isa: the instruction set of the CPU, or the architecture of the GPU.
    """
    with open(_cpu.__file__, "rb") as code:
        facts = [FORMAT, content_hash, file_digest(code, "sha256").hexdigest(), isa, msgspec.to_builtins(groups)]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class ReadEntries(msgspec.Struct, frozen=True):
    """What was read."""

    contents: Mapping[Entry, bytes | memoryview]  # without those that are not there
    seconds: float


class DiskStore:
    """Entries of one engine. Threads of its own read, write and remove files; all methods are for one other thread.

    Where entries take more than `capacity_bytes`, those go first that were not wanted for the longest time, other
    engines' among them as they were when this one was opened.

    Args:
        folder: made if it is not there.
        place_bytes: of a place, a group.

    Raises:
        UsageError: the folder cannot be used, or nothing would fit.
    """

    def __init__(self, folder: Path, identity: str, capacity_bytes: int, place_bytes: Sequence[int]) -> None:
        self._folder, self._identity, self._capacity_bytes = folder, identity, capacity_bytes
        self._sizes = [HASH_BYTES + size for size in place_bytes]
        if capacity_bytes < sum(self._sizes):
            least = format_bytes(sum(self._sizes))
            raise UsageError(
                f"kv_cache_disk is {format_bytes(capacity_bytes)}", f"what a few tokens leave takes {least}"
            )
        _make_private(folder)
        _make_private(folder / identity)
        # By group, what is there or is being written. Added to by the caller and the writer, asked by the caller.
        self.keys: tuple[set[bytes], ...] = tuple(set() for _ in place_bytes)
        self._pending: dict[Entry, Callable[[], bytes]] = {}  # not written yet
        # Each is counted up by one thread, and none by two, which would lose some.
        self._queued_bytes = self._done_bytes = 0  # by the caller, and by the writer
        self._write_failures = self._read_failures = 0
        self._scanned, self._opened = Event(), time.monotonic()
        self._broken = False  # nothing can be written
        self.num_bytes = 0  # of all entries
        # The writer's alone: sizes by path below the folder, those that were not wanted for the longest time first.
        self._files: OrderedDict[str, int] = OrderedDict()
        self._reader = ThreadPoolExecutor(1, "kv-cache-read")
        self._writer = ThreadPoolExecutor(1, "kv-cache-write")
        self._writer.submit(self._guarded, self._scan)

    @property
    def is_scanned(self) -> bool:
        """Whether entries of earlier processes can be found, or have been waited for long enough."""
        return self._scanned.is_set() or time.monotonic() > self._opened + SCAN_S

    def wait_for_scan(self, seconds: float) -> None:
        self._scanned.wait(seconds)

    @property
    def num_failures(self) -> int:
        """Files that could not be written, or not be read, or were damaged."""
        return self._write_failures + self._read_failures

    def has_room(self, group: int) -> bool:
        """Whether one more entry of a group can be kept: not where too much waits to be written already.

        Where nothing waits, an entry of any size can: one of a recurrent state may be larger than what is to wait.
        """
        pending = self._queued_bytes - self._done_bytes
        return not self._broken and (not pending or pending + self._sizes[group] <= MOST_PENDING_BYTES)

    def save(self, entry: Entry, content: Callable[[], bytes]) -> None:
        """Keep what can be found in memory, or falls out of it; there is room for it.

        Args:
            content: gives it, in any thread.
        """
        group, key = entry
        self.keys[group].add(key)
        self._pending[entry] = content
        self._queued_bytes += self._sizes[group]
        self._writer.submit(self._guarded, self._write, entry)

    def touch(self, entries: Sequence[Entry]) -> None:
        """These were wanted: the first of them are removed last."""
        self._writer.submit(self._guarded, self._touch, [self._path(*entry) for entry in reversed(entries)])

    def read(self, entries: Sequence[Entry]) -> "Future[ReadEntries]":
        """Begin to read these."""
        return self._reader.submit(self._read, entries)

    def close(self) -> None:
        """Write what waits for it, and end the threads."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _path(self, group: int, key: bytes) -> str:
        return f"{self._identity}/{group}-{key.hex()}"

    def _digest(self, path: str, content: bytes | memoryview) -> bytes:
        digest = sha256(path.encode())
        digest.update(content)
        return digest.digest()

    def _guarded(self, work: Callable[..., None], *arguments: object) -> None:
        """Disks fill up and fail. A server goes on without what it would have kept there."""
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
        """Times, paths and sizes of an engine's entries. What was never finished is removed."""
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

    def _write(self, entry: Entry) -> None:
        path, size = self._path(*entry), self._sizes[entry[0]]
        try:
            content = self._pending[entry]()
            if self._broken:
                return
            self._make_room(size)
            part = self._folder / f"{path}.{os.getpid()}.part"
            try:
                part.unlink(missing_ok=True)  # of a process that was killed, or a FIFO
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
        finally:
            del self._pending[entry]
            self._done_bytes += size

    def _make_room(self, nbytes: int) -> None:
        while self._files and self.num_bytes + nbytes > self._capacity_bytes:
            path, size = self._files.popitem(last=False)
            self.num_bytes -= size
            if entry := self._entry_of(path):
                self.keys[entry[0]].discard(entry[1])
            (self._folder / path).unlink(missing_ok=True)

    def _entry_of(self, path: str) -> Entry | None:
        """None: it is another engine's."""
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
        """It is damaged, or not there."""
        self.num_bytes -= self._files.pop(path, 0)
        (self._folder / path).unlink(missing_ok=True)

    def _read(self, entries: Sequence[Entry]) -> ReadEntries:
        began, contents = time.perf_counter(), dict[Entry, bytes | memoryview]()
        for entry in entries:
            pending = self._pending.get(entry)
            content = self._content(entry) if pending is None else pending()
            if content is None:  # it was removed meanwhile, or is damaged: whatever it is, it is computed anew
                self.keys[entry[0]].discard(entry[1])
                self._writer.submit(self._guarded, self._drop, self._path(*entry))
                break  # what comes behind it is of no use
            contents[entry] = content
        return ReadEntries(contents, time.perf_counter() - began)

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
            logger.warning("a block of the KV cache in %s is damaged, and is computed anew", self._folder)
            return None
        return content


def _make_private(folder: Path) -> None:
    """Raises UsageError where a folder cannot be made, or others may write into it."""
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
