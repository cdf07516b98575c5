"""Beginnings that sequences share: which are there, which are being written, and when others may use them."""

from collections.abc import Callable, Sequence

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.events import CacheEvent, CacheEvents
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.step.sequence import TokenSequence


class SharedPrefixes:
    """The keys of sequences that share what they compute; for the others, all of it does nothing.

    Args:
        enabled: sequences that begin with the same tokens share what they left, also with those that have ended.
    """

    def __init__(self, cache: Cache, *, enabled: bool) -> None:
        self._cache = cache
        self._block_size = cache.block_size or 1
        self.enabled = enabled and cache.block_size is not None
        self._events: CacheEvents | None = None
        self._being_written: dict[bytes, TokenSequence] = {}  # by keys that will be there soon, who writes them

    def watch(self, put: Callable[[list[CacheEvent]], None]) -> CacheEvents:
        """Collect for `put`, from now on, what others may find."""
        self._events = CacheEvents(self._block_size, put)
        self._cache.watch(self._events)
        return self._events

    def add(self, sequence: TokenSequence) -> None:
        """A new sequence. One whose prompt is scored computes all of it, and others have to wait for nothing of it."""
        if self.enabled and sequence.request is not None and not sequence.needs_prompt_logits:
            sequence.keys = PrefixKeys(self._block_size, sequence.cache_salt)

    def find(self, sequence: TokenSequence) -> Sequence[bytes] | None:
        """Keys of the longest beginning that is there; None if another sequence writes more of it soon."""
        keys = self.keys_of(sequence)
        shared = self._cache.num_shared(keys)
        return None if shared < len(keys) and keys[shared] in self._being_written else keys[:shared]

    def divergence_position(self, sequence: TokenSequence) -> int:
        """The position at which it parts from a sequence that came before, to the block; 0 where it does not matter."""
        return self._cache.divergence_position(self.keys_of(sequence))

    def keys_of(self, sequence: TokenSequence) -> Sequence[bytes]:
        """Of the blocks that a sequence may find: one token is left to give logits."""
        return self._keys(sequence, sequence.num_tokens - 1)

    def restored(self, sequence: TokenSequence, keys: Sequence[bytes]) -> None:
        """What can be found of these is there again."""
        if self._events is not None:
            self._events.published(keys, sequence.token_ids, sequence.cache_salt)

    def begin(self, sequence: TokenSequence, shared: int) -> None:
        """It runs now, and writes what comes behind its first `shared` blocks: others that want it may wait."""
        sequence.keys_in_flight = self._keys(sequence, len(sequence.token_ids))[shared:]
        for key in sequence.keys_in_flight:
            self._being_written.setdefault(key, sequence)

    def end(self, sequence: TokenSequence) -> None:
        """What it was to write is there, or never comes."""
        for key in sequence.keys_in_flight:
            if self._being_written.get(key) is sequence:
                del self._being_written[key]
        sequence.keys_in_flight, sequence.has_unpublished_blocks = (), False

    def fork(self, sequence: TokenSequence, child: TokenSequence) -> None:
        """A child goes on from a sequence, with the same tokens so far."""
        child.keys = None if sequence.keys is None else sequence.keys.copy()

    def tag(self, sequence: TokenSequence, num_tokens: int) -> None:
        """The steps planned so far compute these tokens."""
        if keys := self._keys(sequence, num_tokens):
            self._cache.tag(sequence.held, keys)
            sequence.has_unpublished_blocks = True

    def publish(self, sequence: TokenSequence) -> None:
        """A token was sampled behind all that are known, and is no NaN: let others find their blocks."""
        if sequence.keys is not None and sequence.is_running:
            self.tag(sequence, len(sequence.token_ids))
            self._cache.publish(sequence.held)
            if self._events is not None:
                keys = self._keys(sequence, len(sequence.token_ids))
                self._events.published(keys, sequence.token_ids, sequence.cache_salt)
            self.end(sequence)

    def _keys(self, sequence: TokenSequence, num_tokens: int) -> Sequence[bytes]:
        """Of the full blocks within a sequence's first tokens."""
        return () if sequence.keys is None else sequence.keys.of(sequence.token_ids, num_tokens // self._block_size)
