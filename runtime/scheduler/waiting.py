"""The sequences that wait, in the order of their arrival, and how the first of them is admitted."""

from bisect import insort
from collections.abc import Sequence
from time import perf_counter

from enginewright.runtime.cache.cache import Cache
from enginewright.runtime.cache.kind import Copies
from enginewright.runtime.scheduler.prefixes import SharedPrefixes
from enginewright.runtime.sequence import TokenSequence


class WaitingSequences:
    """A sequence is admitted when there is room for what it has so far, and for a block more of each that runs."""

    def __init__(self, cache: Cache, prefixes: SharedPrefixes) -> None:
        self._cache, self._prefixes = cache, prefixes
        self._waiting: list[TokenSequence] = []
        self._arrivals: dict[TokenSequence, int] = {}  # of all that have not ended
        self._num_arrivals = 0
        self._no_room = False  # for the first, until a sequence leaves
        self.num_prompt_tokens = 0  # of the sequences that were admitted, siblings left out
        self.num_cached_prompt_tokens = 0  # of these, what others had computed

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """All of them are to be computed."""
        return sum(sequence.num_tokens for sequence in self._waiting)

    def add(self, sequence: TokenSequence) -> None:
        self._arrivals[sequence] = self._num_arrivals
        self._num_arrivals += 1
        self._prefixes.add(sequence)
        self._waiting.append(sequence)

    def put_back(self, sequence: TokenSequence) -> None:
        """It was preempted, and waits where it arrived."""
        insort(self._waiting, sequence, key=self._arrivals.__getitem__)

    def forget(self, sequence: TokenSequence) -> None:
        """It ends, while it waits or runs."""
        del self._arrivals[sequence]
        if not sequence.is_running:
            self._waiting.remove(sequence)
            self._no_room = False

    def try_again(self) -> None:
        """A sequence that ran has left its place."""
        self._no_room = False

    def admit(self, num_running: int, copies: Sequence[Copies]) -> TokenSequence | None:
        """The first, if it can run now.

        Args:
            num_running: sequences that run, each of which may take a block soon.
            copies: gets, a group, the copies to make before the next step.
        """
        if not self._waiting or self._no_room:
            return None
        sequence = self._waiting[0]
        sibling = sequence.sibling_of
        if sibling is not None and sibling.is_running and not _has_begun(sibling):
            return None  # in a few steps, it takes nothing but the answer
        keys = self._prefixes.find(sequence)
        if keys is None:
            return None  # likewise
        if not (self._fork(sequence, num_running, copies) or self._open(sequence, keys, num_running, copies)):
            self._no_room = True
            return None
        del self._waiting[0]
        self._prefixes.begin(sequence, len(keys))
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.admitted_at = perf_counter()
            if sibling is None:
                self.num_prompt_tokens += sequence.num_prompt_tokens
                self.num_cached_prompt_tokens += sequence.num_cached_tokens
        return sequence

    def _open(self, sequence: TokenSequence, keys: Sequence[bytes], spare: int, copies: Sequence[Copies]) -> bool:
        """Begin with what is there of these keys."""
        parts_at, shares = self._prefixes.parts_at(sequence), sequence.keys is not None
        held = self._cache.admit(sequence.num_tokens, keys, spare, copies, shares=shares, parts_at=parts_at)
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = len(keys) * (self._cache.block_size or 0)
        return True

    def _fork(self, sequence: TokenSequence, spare: int, copies: Sequence[Copies]) -> bool:
        """Begin where the prompt of a sibling ends: its last token alone is computed again, and gives the logits."""
        sibling, length = sequence.sibling_of, sequence.num_prompt_tokens
        if sibling is None or not sibling.is_running or sequence.num_tokens > length:
            return False
        held = self._cache.fork(sibling.held, sibling.num_computed_tokens, length - 1, length, spare, copies)
        if held is None:
            return False
        sequence.held = held
        sequence.num_computed_tokens = length - 1
        return True


def _has_begun(sequence: TokenSequence) -> bool:
    """Whether its prompt is computed, and a token was sampled behind it that is no NaN."""
    return min(sequence.num_computed_tokens, len(sequence.token_ids) - 1) >= sequence.num_prompt_tokens
