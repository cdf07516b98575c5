"""The prefix cache that servers share: entries in an object store or in the memory of a peer, named and encrypted here.

A server that has just started, or that has never seen a prompt, finds what any other one has computed. Nothing is
believed: each content is decrypted with a key that belongs to one entry of one engine, so what was altered, cut short
or stored under another name counts as missing. Whatever fails is counted, logged once for each cause, and computed, and
a store that cannot be used is left alone for a while, so that no request waits for it.
"""

import hmac
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from typing import Protocol

from enginewright.errors import EngineError
from enginewright.runtime.cache.store import Entry, FoundEntries, PrefixStore

logger = logging.getLogger(__name__)

NAME_BYTES = 32
SALT_BYTES = 32
TAG_BYTES = 16
SEAL_BYTES = SALT_BYTES + TAG_BYTES  # what a content grows by when it is encrypted
# Each key encrypts one content, since the salt is random, so the nonce may always be the same.
NONCE = bytes(12)
SEARCHERS, READERS, WRITERS = 4, 4, 4  # threads
WINDOW = 64  # blocks that are searched for at a time, once the first one was found
MAX_KNOWN = 1 << 17  # entries that are remembered to be in the store
KNOWN_S = 3600.0  # seconds for which they are: others may remove them
FIRST_PAUSE_S = 1.0  # seconds for which a store that has failed is left alone; doubled at each further failure
MAX_PAUSE_S = 60.0
CAUSES = ("unreachable", "refused", "failed", "damaged")  # of failures
LOG_AGAIN_S = 3600.0  # seconds until a cause is logged again
CLOSE_S = 5.0  # seconds for which what is queued is still written when the store closes


class StoreError(EngineError):
    """The store cannot be used, or an entry in it cannot.

    Args:
        cause: one of CAUSES.
        what: what failed.
        why: the reason.
        fix: what to do about it.
    """

    def __init__(self, cause: str, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what, why, fix)
        self.cause = cause


class Blobs(Protocol):
    """A place where servers keep encrypted contents by name. All methods wait, and may be called in any thread.

    They raise StoreError if that fails.
    """

    def find(self, names: Sequence[bytes]) -> Sequence[bool]:
        """Says for each name if there is a content."""
        ...

    def get(self, names: Sequence[bytes]) -> Iterable[bytes | bytearray | None]:
        """Reads the content of each name; None if there is none."""
        ...

    def put(self, name: bytes, content: bytes) -> None:
        """Writes a content."""
        ...

    def close(self) -> None:
        """Ends connections and threads."""
        ...


class EntryCipher:
    """Names and encrypts entries, with the secret that servers share.

    A name, and the key of a content, are HMACs of the engine's identity and the entry. As the entry's own key depends
    on all tokens and on the tenant, a reader of the store without the secret learns no tokens, and cannot test whether
    a known prompt is there.

    Args:
        secret: the secret.
        identity: all that an entry's bytes depend on (`identity_of`).

    Raises:
        EngineError: the package `cryptography` is not installed.
    """

    def __init__(self, secret: bytes, identity: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise EngineError(
                "KV blocks cannot be encrypted",
                "the package cryptography is not installed",
                "pip install 'enginewright[kv-store]'",
            ) from error
        self._aes, self._invalid = AESGCM, InvalidTag
        self._secret, self._identity = secret, bytes.fromhex(identity)

    def name(self, entry: Entry) -> bytes:
        """Name of an entry in the store, of NAME_BYTES."""
        return self._hmac(b"name", entry)

    def seal(self, entry: Entry, content: bytes) -> bytes:
        """Encrypts the content of an entry, which grows by SEAL_BYTES."""
        salt = os.urandom(SALT_BYTES)
        return salt + self._aes(self._hmac(b"content", entry, salt)).encrypt(NONCE, content, None)

    def open(self, entry: Entry, sealed: bytes | bytearray) -> bytes:
        """Decrypts the content of an entry.

        Args:
            entry: the entry.
            sealed: what `seal` has made of it.

        Raises:
            StoreError: it was altered, cut short, or belongs to another entry, engine or secret.
        """
        salt, encrypted = bytes(sealed[:SALT_BYTES]), memoryview(sealed)[SALT_BYTES:]
        try:
            return self._aes(self._hmac(b"content", entry, salt)).decrypt(NONCE, encrypted, None)
        except (self._invalid, ValueError) as error:
            raise StoreError(
                "damaged",
                "an entry of the shared KV cache is damaged",
                "it was altered, cut short, or written with another secret",
                "It is written again. If this goes on, see who else writes there.",
            ) from error

    def _hmac(self, use: bytes, entry: Entry, salt: bytes = b"") -> bytes:
        group, key = entry
        message = b"".join([use, b"\0", self._identity, group.to_bytes(2, "little"), key, salt])
        return hmac.digest(self._secret, message, sha256)


class RemoteStore(PrefixStore):
    """The entries of one engine that servers share.

    Args:
        blobs: where they are.
        cipher: names and encrypts them.
        place_bytes: size of a block or slot of each cache group.
    """

    def __init__(self, blobs: Blobs, cipher: EntryCipher, place_bytes: Sequence[int]) -> None:
        super().__init__([SEAL_BYTES + size for size in place_bytes], "kv-remote", READERS, WRITERS)
        self._blobs, self._cipher = blobs, cipher
        self._searcher = ThreadPoolExecutor(SEARCHERS, "kv-remote-find")
        self._known: dict[Entry, float] = {}  # time.monotonic until which entries count as there, the oldest first
        self._damaged: set[Entry] = set()  # entries to be written again, although they are there
        self._pause_s, self._paused_until = FIRST_PAUSE_S, 0.0  # seconds, and time.monotonic
        self._closed_at = float("inf")  # time.monotonic from which nothing is written any more
        self._logged: dict[str, float] = {}  # time.monotonic at which each cause was last logged
        self.failures: Counter[str] = Counter()  # by cause
        self.num_sent_bytes = 0  # of encrypted contents, since the start
        self.num_received_bytes = 0
        self.num_searches = 0  # prefixes that were searched for
        self.num_found = 0  # prefixes of which something was found

    @property
    def takes_entries(self) -> bool:
        now = time.monotonic()
        return self._paused_until < now < self._closed_at

    def has(self, entry: Entry) -> bool:
        return entry in self._pending or self._is_known(entry)

    def find(self, keys: Sequence[bytes]) -> "Future[FoundEntries]":
        return self._searcher.submit(self._find, keys)

    def close(self) -> None:
        """Writes what is queued, for CLOSE_S at most, and ends the threads."""
        self._closed_at = time.monotonic() + CLOSE_S
        self._searcher.shutdown(cancel_futures=True)
        super().close()
        self._blobs.close()

    def _find(self, keys: Sequence[bytes]) -> FoundEntries:
        began, groups = time.perf_counter(), range(len(self._sizes))
        found: list[set[bytes]] = [set() for _ in groups]
        if not self.takes_entries:
            return FoundEntries(found, 0.0)
        try:
            for window in _windows(keys):
                asked = {(group, key): self._is_known((group, key)) for key in window for group in groups}
                unknown = [entry for entry, is_known in asked.items() if not is_known]
                there = self._blobs.find([self._cipher.name(entry) for entry in unknown]) if unknown else ()
                asked.update(zip(unknown, there, strict=True))
                hits = [entry for entry, is_there in asked.items() if is_there]
                self._remember([entry for entry in unknown if asked[entry]])
                for group, key in hits:
                    found[group].add(key)
                if not hits:
                    break
        except StoreError as error:
            self._failed(error)
            return FoundEntries(found, 0.0)
        with self._lock:
            self.num_searches += 1
            self.num_found += any(found)
        return FoundEntries(found, time.perf_counter() - began)

    def _read(self, entries: Sequence[Entry]) -> Mapping[Entry, bytes | memoryview]:
        contents = dict[Entry, bytes | memoryview]()
        try:
            names = [self._cipher.name(entry) for entry in entries]
            for entry, sealed in zip(entries, self._blobs.get(names), strict=True):
                if sealed is None:  # it was removed in the meantime
                    self._forget(entry)
                    break
                try:
                    contents[entry] = self._cipher.open(entry, sealed)
                except StoreError:
                    self._forget(entry)
                    self._damaged.add(entry)
                    raise
                with self._lock:
                    self.num_received_bytes += len(sealed)
        except StoreError as error:
            self._failed(error)
        else:
            self._pause_s = FIRST_PAUSE_S
        return contents

    def _write(self, entry: Entry, content: bytes) -> None:
        try:
            name = self._cipher.name(entry)
            if entry in self._damaged or not self._blobs.find([name])[0]:
                sealed = self._cipher.seal(entry, content)
                self._blobs.put(name, sealed)
                self._damaged.discard(entry)
                with self._lock:
                    self.num_sent_bytes += len(sealed)
            self._remember([entry])
            self._pause_s = FIRST_PAUSE_S
        except StoreError as error:
            self._failed(error)

    def _is_known(self, entry: Entry) -> bool:
        return time.monotonic() < self._known.get(entry, 0.0)

    def _remember(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._known.pop(entry, None)
                self._known[entry] = time.monotonic() + KNOWN_S
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def _forget(self, entry: Entry) -> None:
        with self._lock:
            self._known.pop(entry, None)

    def _failed(self, error: StoreError) -> None:
        """Counts and logs a failure, and leaves the store alone for a while if it is the store's."""
        now = time.monotonic()
        with self._lock:
            self.failures[error.cause] += 1
            if error.cause != "damaged" and self._paused_until < now:  # else others have failed at the same time
                self._paused_until = now + self._pause_s
                self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            is_logged = now < self._logged.get(error.cause, -LOG_AGAIN_S) + LOG_AGAIN_S
            if not is_logged:
                self._logged[error.cause] = now
        if not is_logged:
            logger.warning("the shared KV cache cannot be used, and prompts are computed: %s", error)


def _windows(keys: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The first block, since most prompts that are new have nothing in the store, and then WINDOW blocks at a time."""
    yield keys[:1]
    for start in range(1, len(keys), WINDOW):
        yield keys[start : start + WINDOW]
