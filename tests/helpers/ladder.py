"""A simple grammar for tests: each token is one to `highest` steps above the last one, modulo the vocabulary's size."""

from collections.abc import Sequence

from enginewright.runtime.sampling.token_mask import WORD_BITS, Mask


class Ladder:
    """A grammar for tests. taken: the tokens so far; one that is not allowed fails at once."""

    failed, forced = False, ()

    def __init__(self, vocab_size: int, start: int, highest: int = 5) -> None:
        self._vocab_size, self._last, self._highest = vocab_size, start, highest
        self.taken: list[int] = []

    def _steps(self) -> list[int]:
        return [(self._last + step) % self._vocab_size for step in range(1, self._highest + 1)]

    def begin(self) -> None:
        """Does nothing: masks need no preparation."""

    end = rest = begin

    def look(self, tokens: Sequence[int]) -> None:
        """Does nothing: masks after draft tokens need no preparation."""

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        return True

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        assert not mask.any() and not after
        for token in self._steps():
            mask[token // WORD_BITS] |= 1 << token % WORD_BITS

    def take(self, token: int) -> None:
        assert token in self._steps()
        self._last = token
        self.taken.append(token)
