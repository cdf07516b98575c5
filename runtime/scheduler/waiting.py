"""The waiting sequences: their order, and their admission."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.scheduler.adapters import AdapterSlots
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.shares import TenantShares
from enginewright.runtime.scheduler.stored import PrefixWriter, StoredPrefixes
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.work_class import BEST_EFFORT, WorkClass


class WaitingSequences:
    """Queues of waiting sequences, one for each work class.

    A sequence is admitted when there are blocks for its tokens, one more for each running sequence, and a slot for its
    adapter.

    The next one has the most urgent work. Among equally urgent ones it belongs to the tenant with the fewest computed
    tokens, and among these it has arrived first. A smaller sequence never overtakes it.

    Args:
        cache: the KV cache.
        prefixes: shared prefixes.
        clock: gives the time in seconds, by which the priority of waiting sequences ages.
    """

    def __init__(self, cache: Cache, prefixes: SharedPrefixes, clock: Callable[[], float]) -> None:
        self._cache, self._prefixes, self._clock = cache, prefixes, clock
        self._queues: dict[WorkClass, list[TokenSequence]] = {}  # each in the order of arrival; none is empty
        self._arrivals: dict[TokenSequence, int] = {}  # number of arrival of each sequence that has not ended
        self._num_arrivals = 0
        self._priorities: Counter[int] = Counter()  # number of sequences that have not ended, by priority
        self._shares = TenantShares()
        self.stored: StoredPrefixes | None = None  # shared prefixes in stores
        self.writer: PrefixWriter | None = None  # writes blocks from stores or another server; None: there are none
        self.adapters: AdapterSlots | None = None  # slots, if any
        self.no_room = False  # true if the next one lacks free blocks; reset when a sequence leaves or arrives
        self.num_prompt_tokens = 0  # prompt tokens of admitted sequences, without siblings
        self.num_cached_prompt_tokens = 0  # number of these that were in the prefix cache

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all waiting sequences, all of which are to be computed."""
        return sum(sequence.state.num_tokens for queue in list(self._queues.values()) for sequence in list(queue))

    @property
    def has_other_than_best_effort(self) -> bool:
        """True if work that is more urgent than best effort waits."""
        return any(work.priority < BEST_EFFORT for work in self._queues)

    def add(self, sequence: TokenSequence) -> None:
        """Queues a new sequence."""
        self.arrive(sequence)
        self.put_back(sequence)
        if self.stored is not None and sequence.cache.fetched is None:
            self.stored.search(sequence)

    def arrive(self, sequence: TokenSequence, sibling: TokenSequence | None = None) -> None:
        """Registers a new sequence that does not wait yet.

        Args:
            sequence: the new sequence.
            sibling: an earlier sequence whose number of arrival it shares; None: it gets a number of its own.
        """
        self._prefixes.add(sequence)
        self._arrivals[sequence] = self._num_arrivals if sibling is None else self._arrivals[sibling]
        self._num_arrivals += 1
        self._priorities[sequence.work.priority] += 1
        self._shares.begin(sequence.work.tenant)

    def put_back(self, sequence: TokenSequence) -> None:
        """Queues a new or preempted sequence, at its place in the order of arrival."""
        sequence.state.queued_at = self._clock()
        if sequence.grammar is not None:
            sequence.grammar.rest()
        insort(self._queues.setdefault(sequence.work, []), sequence, key=self._arrivals.__getitem__)
        self.no_room = False

    def charge(self, sequence: TokenSequence) -> None:
        """Counts the computed tokens of a sequence that runs no longer in its tenant's share."""
        self._shares.charge([sequence])

    def forget(self, sequence: TokenSequence) -> None:
        """Drops a sequence that ends, whether it waits or runs."""
        self._shares.charge([sequence])
        self._shares.end(sequence.work.tenant)
        priority = sequence.work.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]
        del self._arrivals[sequence]
        if self.stored is not None:
            self.stored.forget(sequence)
        if not sequence.is_running and sequence in self._queues.get(sequence.work, ()):
            self._remove(sequence)
            self.no_room = False

    def order(self, sequence: TokenSequence) -> tuple[int, int]:
        """Sort key of an admitted sequence among the running ones; the largest is preempted first."""
        return sequence.state.effective_priority, self._arrivals[sequence]

    def next(self, running: Sequence[TokenSequence]) -> tuple[TokenSequence, int] | None:
        """Chooses the sequence to admit next.

        Args:
            running: running sequences, whose computed tokens count in the shares of their tenants.

        Returns:
            The sequence, and its effective priority; None if none waits.
        """
        if not self._queues:
            return None
        heads, most_urgent = [queue[0] for queue in self._queues.values()], min(self._priorities)
        if len(heads) == 1 and heads[0].work.priority <= most_urgent:
            return heads[0], heads[0].work.priority
        now = self._clock()
        levels = {
            one: one.work.effective_priority(one.state.waited_s + now - one.state.queued_at, most_urgent)
            for one in heads
        }
        self._shares.charge(running)
        first = min(heads, key=lambda one: (levels[one], self._shares.tokens(one.work.tenant), self._arrivals[one]))
        return first, levels[first]

    def admit(self, running: Sequence[TokenSequence], copies: Sequence[Copies]) -> TokenSequence | None:
        """Admits the next sequence, if it can run now.

        Args:
            running: running sequences, each of which may need another block soon.
            copies: by cache group, gets the copies to make before the next step.

        Returns:
            The admitted sequence; None if none can run now.
        """
        found = None if self.no_room else self.next(running)
        if found is None:
            return None
        sequence, level = found
        if self.adapters is not None and not self.adapters.has_room(sequence.adapter):
            self.no_room = True
            return None
        keys = self._shared_keys(sequence, len(running), copies)
        if keys is None:
            return None
        if not (self._fork(sequence, len(running), copies) or self._open(sequence, keys, len(running), copies)):
            self.no_room = True
            return None
        self._remove(sequence)
        sequence.state.effective_priority = level
        sequence.state.waited_s += self._clock() - sequence.state.queued_at
        self._prefixes.begin(sequence, len(keys))
        if sequence.state.num_cached_tokens is None:
            sequence.state.num_cached_tokens = sequence.state.num_charged_tokens = sequence.state.num_computed_tokens
            sequence.state.admitted_at = perf_counter()
            if sequence.sibling_of is None:
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_prompt_tokens += sequence.state.num_cached_tokens
        return sequence

    def _shared_keys(
        self, sequence: TokenSequence, watermark_blocks: int, copies: Sequence[Copies]
    ) -> Sequence[bytes] | None:
        """Brings the blocks that a sequence can share into memory, and returns their keys; None if it has to wait.

        Args:
            sequence: the sequence that is admitted next.
            watermark_blocks: number of blocks that have to stay free.
            copies: by cache group, gets the copies to make before the next step.
        """
        if sequence.num_in_flight_tokens:
            return None  # It was just preempted, and its token in flight has to be committed first.
        sibling = sequence.sibling_of
        if sibling is not None and sibling.is_running and not _has_begun(sibling):
            return None  # In a few steps, it can share the prompt of its sibling, and needs blocks for its answer only.
        keys = self._prefixes.find(sequence)
        if keys is None:
            return None  # Another sequence is computing blocks that it can share in a few steps.
        fetched = sequence.cache.fetched if self.writer is not None else None
        if fetched is None and self.stored is not None and not self.stored.is_read(sequence, keys):
            return None  # Blocks that it can share are being read from a store.
        if not self._cache.has_room(sequence.state.num_tokens, keys, watermark_blocks):
            return keys
        if fetched is not None and self.writer is not None:
            sequence.cache.fetched = None
            return self.writer.write(sequence, keys, fetched.contents, copies)
        return keys if self.stored is None else self.stored.restore(sequence, keys, copies)

    def _remove(self, sequence: TokenSequence) -> None:
        queue = self._queues[sequence.work]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.work]

    def _open(
        self, sequence: TokenSequence, keys: Sequence[bytes], watermark_blocks: int, copies: Sequence[Copies]
    ) -> bool:
        """Allocates the blocks of a sequence that begins with cached blocks; False if there are not enough free blocks.

        Args:
            sequence: the sequence.
            keys: keys of its cached blocks.
            watermark_blocks: number of blocks that have to stay free.
            copies: by cache group, gets the copies to make before the next step.
        """
        divergence_position, shares = self._prefixes.divergence_position(sequence), sequence.cache.keys is not None
        held = self._cache.admit(
            sequence.state.num_tokens,
            keys,
            watermark_blocks,
            copies,
            shares=shares,
            divergence_position=divergence_position,
            retention=sequence.retention,
        )
        if held is None:
            return False
        sequence.cache.held = held
        sequence.state.num_computed_tokens = len(keys) * (self._cache.block_size or 0)
        return True

    def _fork(self, sequence: TokenSequence, watermark_blocks: int, copies: Sequence[Copies]) -> bool:
        """Begins with the blocks of a sibling's prompt, of which only the last token is computed again for its logits.

        Args:
            sequence: the sequence.
            watermark_blocks: number of blocks that have to stay free.
            copies: by cache group, gets the copies to make before the next step.

        Returns:
            False if it has no running sibling, has tokens of its own already, or there are not enough free blocks.
        """
        sibling, length = sequence.sibling_of, sequence.num_prompt_tokens
        if sibling is None or not sibling.is_running or sequence.state.num_tokens > length:
            return False
        held = self._cache.fork(
            sibling.cache.held, sibling.state.num_computed_tokens, length - 1, length, watermark_blocks, copies
        )
        if held is None:
            return False
        sequence.cache.held = held
        sequence.state.num_computed_tokens = length - 1
        return True


def _has_begun(sequence: TokenSequence) -> bool:
    """True if the prompt of a sequence is computed, and a token that is no NaN was sampled after it."""
    return min(sequence.state.num_computed_tokens, len(sequence.token_ids) - 1) >= sequence.num_prompt_tokens
