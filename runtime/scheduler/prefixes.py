"""Prefixes that sequences share: which are cached, which are being computed, and when others may use them."""

from collections.abc import Callable, Sequence

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.events import CacheEvent, CacheEvents
from enginewright.runtime.cache.keys import PrefixKeys
from enginewright.runtime.step.sequence import TokenSequence


class SharedPrefixes:
    """Keeps the block keys of sequences that share prefixes. For other sequences, its methods do nothing.

    Args:
        cache: the KV cache.
        enabled: true if sequences share the blocks of equal prefixes, also those of sequences that have ended.
    """

    def __init__(self, cache: Cache, *, enabled: bool) -> None:
        self._cache = cache
        self._block_size = cache.block_size or 1
        self.enabled = enabled and cache.block_size is not None
        self._events: CacheEvents | None = None
        self._being_written: dict[bytes, TokenSequence] = {}  # sequence that computes a block now, by its key

    def watch(self, put: Callable[[list[CacheEvent]], None]) -> CacheEvents:
        """Starts to report the blocks that others may find.

        Args:
            put: gets the events of each step.
        """
        self._events = CacheEvents(self._block_size, put)
        self._cache.watch(self._events)
        return self._events

    def add(self, sequence: TokenSequence) -> None:
        """Gives a new sequence its keys, if it shares blocks.

        A sequence whose prompt is scored gets none: it computes its whole prompt itself, and no other waits for it.
        """
        if self.enabled and sequence.request is not None and not sequence.state.needs_prompt_logits:
            adapter = "" if sequence.adapter is None else sequence.adapter.content_hash
            sequence.cache.keys = PrefixKeys(self._block_size, sequence.cache_salt, adapter, sequence.adapter_from)

    def find(self, sequence: TokenSequence) -> Sequence[bytes] | None:
        """Keys of the longest cached prefix; None if another sequence is computing the next block of it."""
        keys = self.keys_of(sequence)
        shared = self._cache.num_shared(keys)
        return None if shared < len(keys) and keys[shared] in self._being_written else keys[:shared]

    def divergence_position(self, sequence: TokenSequence) -> int:
        """Position up to which an earlier sequence has the same tokens, in whole blocks.

        It is 0 if the cache takes no snapshots of recurrent states, for which this position is of use.
        """
        return self._cache.divergence_position(self.keys_of(sequence))

    def keys_of(self, sequence: TokenSequence) -> Sequence[bytes]:
        """Keys of the blocks that a sequence may find. Its last token is always computed, since it gives the logits."""
        return self._keys(sequence, sequence.state.num_tokens - 1)

    def restored(self, sequence: TokenSequence, keys: Sequence[bytes]) -> None:
        """Reports blocks that were read from a store as cached again.

        Args:
            sequence: a sequence that begins with the blocks.
            keys: keys of the blocks.
        """
        self._report(sequence, keys)

    def begin(self, sequence: TokenSequence, shared: int) -> None:
        """Notes that an admitted sequence computes the blocks after its first ones, so that others wait for these.

        Args:
            sequence: the sequence.
            shared: number of its first blocks that were cached.
        """
        sequence.cache.keys_in_flight = self._keys(sequence, len(sequence.token_ids))[shared:]
        for key in sequence.cache.keys_in_flight:
            self._being_written.setdefault(key, sequence)

    def end(self, sequence: TokenSequence) -> None:
        """Notes that no other sequence has to wait for this one: its blocks are published, or it runs no longer."""
        for key in sequence.cache.keys_in_flight:
            if self._being_written.get(key) is sequence:
                del self._being_written[key]
        sequence.cache.keys_in_flight, sequence.cache.has_unpublished_blocks = (), False

    def fork(self, sequence: TokenSequence, child: TokenSequence) -> None:
        """Gives a beam that continues a sequence the same keys.

        Args:
            sequence: the parent.
            child: the new beam, with the same tokens.
        """
        child.cache.keys = None if sequence.cache.keys is None else sequence.cache.keys.copy()

    def tag(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Gives keys to the full blocks that the steps planned so far compute.

        Args:
            sequence: the sequence.
            num_tokens: number of its first tokens that these steps compute.
        """
        if keys := self._keys(sequence, num_tokens):
            self._cache.tag(sequence.cache.held, keys)
            sequence.cache.has_unpublished_blocks = True

    def publish(self, sequence: TokenSequence) -> None:
        """Lets others find the blocks of all known tokens. Called once a token, not NaN, was sampled after them."""
        if sequence.cache.keys is not None and sequence.is_running:
            self.tag(sequence, len(sequence.token_ids))
            self._cache.publish(sequence.cache.held)
            if self._events is not None:
                self._report(sequence, self._keys(sequence, len(sequence.token_ids)))
            self.end(sequence)

    def _report(self, sequence: TokenSequence, keys: Sequence[bytes]) -> None:
        if self._events is not None:
            adapter = None if sequence.adapter is None else sequence.adapter.name
            first_adapted = sequence.adapter_from // self._block_size
            self._events.published(keys, sequence.token_ids, sequence.cache_salt, adapter, first_adapted)

    def _keys(self, sequence: TokenSequence, num_tokens: int) -> Sequence[bytes]:
        """Keys of the full blocks within the first tokens of a sequence."""
        return (
            ()
            if sequence.cache.keys is None
            else sequence.cache.keys.of(sequence.token_ids, num_tokens // self._block_size)
        )
