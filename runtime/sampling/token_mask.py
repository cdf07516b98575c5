"""Masks of the tokens that may come next, with one bit for each token of the vocabulary.

Token t is bit t % 32 of word t // 32, as in the masks of xgrammar and llguidance.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
WORD_BITS = 32
ALL = np.uint32(0xFFFFFFFF)


class Grammar(Protocol):
    """Follows the grammar of one completion as its tokens come.

    The methods are called within a step, for which other sequences wait, too. So only `wait` blocks, and none raises.

    `failed` is true if no token may come next because the grammar exceeded a limit. `forced` lists tokens that have to
    come next, in this order, since the grammar allows no others. Both are valid once `wait` has returned True.
    """

    failed: bool
    forced: Sequence[int]

    def begin(self) -> None:
        """Starts the walk through the grammar, and requests the mask of the first token."""

    def end(self) -> None:
        """Ends the walk: no more tokens will come."""

    def take(self, token: int) -> None:
        """Appends a token that was allowed. It may be the last one, such as an end-of-text token."""

    def look(self, tokens: Sequence[int]) -> None:
        """Requests the masks after the first of these draft tokens, the first two, and so on."""

    def rest(self) -> None:
        """Notes that no step uses it until `wait`, `look` or `take` is called: its completion waits to be admitted."""

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        """Waits for the mask of the next token, or of the token after draft tokens.

        Args:
            seconds: maximum time to wait.
            after: a prefix of the draft tokens that `look` was last called with, or nothing.

        Returns:
            True if the mask is known.
        """

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        """Writes the mask of the tokens that may come next, or after draft tokens. `wait` has returned True for it.

        If no token is allowed, the completion fails.

        Args:
            mask: words to write, uint32 [num_words(vocab_size)], all 0 before.
            after: draft tokens before the one that is sampled.
        """


def num_words(vocab_size: int) -> int:
    """Number of 32-bit words of a mask."""
    return -(-vocab_size // WORD_BITS)


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """Makes a mask, uint32 [num_words(vocab_size)], that allows only these tokens."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
