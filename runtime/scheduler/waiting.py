"""The sequences that wait, which of them is the next, and how it is admitted."""

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.scheduler.shares import TenantShares
from enginewright.runtime.scheduler.stored import StoredPrefixes
from enginewright.runtime.step.sequence import TokenSequence
from enginewright.runtime.step.work_class import BEST_EFFORT, WorkClass


class WaitingSequences:
    """A sequence is admitted when there is room for what it has so far, and for a block more of each that runs.

    The next one is of the most urgent work; of work that is as urgent, of the tenant that has had the fewest tokens;
    of these, the one that has arrived first. Nobody overtakes it because of being smaller.

    Args:
        clock: seconds, for ageing.
    """

    def __init__(self, cache: Cache, prefixes: SharedPrefixes, clock: Callable[[], float]) -> None:
        self._cache, self._prefixes, self._clock = cache, prefixes, clock
        self._queues: dict[WorkClass, list[TokenSequence]] = {}  # each by arrival; none is empty
        self._arrivals: dict[TokenSequence, int] = {}  # of all that have not ended
        self._num_arrivals = 0
        self._priorities: Counter[int] = Counter()  # of all that have not ended
        self._shares = TenantShares()
        self.stored: StoredPrefixes | None = None  # beginnings that are on disk
        self.no_room = False  # for the next, until a sequence leaves or arrives
        self.num_prompt_tokens = 0  # of the sequences that were admitted, siblings left out
        self.num_cached_prompt_tokens = 0  # of these, what others had computed

    def __len__(self) -> int:
        return sum(map(len, list(self._queues.values())))

    @property
    def num_tokens(self) -> int:
        """All of them are to be computed."""
        return sum(sequence.num_tokens for queue in list(self._queues.values()) for sequence in list(queue))

    @property
    def has_other_than_best_effort(self) -> bool:
        return any(work.priority < BEST_EFFORT for work in self._queues)

    def add(self, sequence: TokenSequence) -> None:
        self.arrive(sequence)
        self.put_back(sequence)

    def arrive(self, sequence: TokenSequence, beside: TokenSequence | None = None) -> None:
        """A new sequence that does not wait yet.

        Args:
            beside: one that it counts as having arrived with.
        """
        self._prefixes.add(sequence)
        self._arrivals[sequence] = self._num_arrivals if beside is None else self._arrivals[beside]
        self._num_arrivals += 1
        self._priorities[sequence.work.priority] += 1
        self._shares.begin(sequence.work.tenant)

    def put_back(self, sequence: TokenSequence) -> None:
        """It waits, where it arrived: it is new, or was preempted."""
        sequence.queued_at = self._clock()
        insort(self._queues.setdefault(sequence.work, []), sequence, key=self._arrivals.__getitem__)
        self.no_room = False

    def charge(self, sequence: TokenSequence) -> None:
        """It runs no longer: its tenant has had what was computed of it."""
        self._shares.charge([sequence])

    def forget(self, sequence: TokenSequence) -> None:
        """It ends, while it waits or runs."""
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
        """Of one that was admitted, among those that run: whoever is less urgent, or came later, has more."""
        return sequence.effective_priority, self._arrivals[sequence]

    def next(self, running: Sequence[TokenSequence]) -> tuple[TokenSequence, int] | None:
        """The one that is admitted next, and the level that it has now."""
        if not self._queues:
            return None
        heads, most_urgent = [queue[0] for queue in self._queues.values()], min(self._priorities)
        if len(heads) == 1 and heads[0].work.priority <= most_urgent:
            return heads[0], heads[0].work.priority
        now = self._clock()
        levels = {one: one.work.effective_priority(one.waited_s + now - one.queued_at, most_urgent) for one in heads}
        self._shares.charge(running)
        first = min(heads, key=lambda one: (levels[one], self._shares.tokens(one.work.tenant), self._arrivals[one]))
        return first, levels[first]

    def admit(self, running: Sequence[TokenSequence], copies: Sequence[Copies]) -> TokenSequence | None:
        """The next, if it can run now.

        Args:
            running: sequences that run, each of which may take a block soon.
            copies: gets, a group, the copies to make before the next step.
        """
        found = None if self.no_room else self.next(running)
        if found is None:
            return None
        sequence, level = found
        if sequence.num_in_flight_tokens:
            return None  # it was preempted a moment ago: what it has written is to be committed first
        sibling, num_running = sequence.sibling_of, len(running)
        if sibling is not None and sibling.is_running and not _has_begun(sibling):
            return None  # in a few steps, it takes nothing but the answer
        keys = self._prefixes.find(sequence)
        if keys is None:
            return None  # likewise
        if self.stored is not None:
            if not self.stored.is_read(sequence, keys):
                return None  # likewise
            if self._cache.has_room(sequence.num_tokens, keys, num_running):
                keys = self.stored.restore(sequence, keys, copies)
        if not (self._fork(sequence, num_running, copies) or self._open(sequence, keys, num_running, copies)):
            self.no_room = True
            return None
        self._remove(sequence)
        sequence.effective_priority = level
        sequence.waited_s += self._clock() - sequence.queued_at
        self._prefixes.begin(sequence, len(keys))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_charged_tokens = sequence.num_computed_tokens
            sequence.admitted_at = perf_counter()
            if sibling is None:
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_prompt_tokens += sequence.num_cached_tokens
        return sequence

    def _remove(self, sequence: TokenSequence) -> None:
        queue = self._queues[sequence.work]
        queue.remove(sequence)
        if not queue:
            del self._queues[sequence.work]

    def _open(
        self, sequence: TokenSequence, keys: Sequence[bytes], watermark_blocks: int, copies: Sequence[Copies]
    ) -> bool:
        """Begin with what is there of these keys."""
        divergence_position, shares = self._prefixes.divergence_position(sequence), sequence.keys is not None
        held = self._cache.admit(
            sequence.num_tokens, keys, watermark_blocks, copies, shares=shares, divergence_position=divergence_position
        )
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = len(keys) * (self._cache.block_size or 0)
        return True

    def _fork(self, sequence: TokenSequence, watermark_blocks: int, copies: Sequence[Copies]) -> bool:
        """Begin where the prompt of a sibling ends: its last token alone is computed again, and gives the logits."""
        sibling, length = sequence.sibling_of, sequence.num_prompt_tokens
        if sibling is None or not sibling.is_running or sequence.num_tokens > length:
            return False
        held = self._cache.fork(sibling.held, sibling.num_computed_tokens, length - 1, length, watermark_blocks, copies)
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = length - 1
        return True


def _has_begun(sequence: TokenSequence) -> bool:
    """Whether its prompt is computed, and a token was sampled behind it that is no NaN."""
    return min(sequence.num_computed_tokens, len(sequence.token_ids) - 1) >= sequence.num_prompt_tokens
