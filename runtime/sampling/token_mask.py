"""Which tokens an answer may go on with: a bit for each of the vocabulary.

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
    """What an answer may be, as its tokens come: one object for each answer.

    Calls are part of a step that other answers wait for. So none waits but `wait`, and none raises.

    failed: no token may come next since the grammar went beyond a limit. Known as soon as `wait` has said so.
    forced: tokens that can only come next, one after the other; the same holds.
    """

    failed: bool
    forced: Sequence[int]

    def begin(self) -> None:
        """The answer will be written: find out what may come first."""

    def end(self) -> None:
        """No more of the answer will be written."""

    def take(self, token: int) -> None:
        """The answer goes on with this token, which was allowed; it may be its last one, an end-of-text token too."""

    def look(self, tokens: Sequence[int]) -> None:
        """Find out what may come after the first of these tokens, the first two, …, if they come next."""

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        """Wait until it is known what may come next, and after these tokens, so long at most; True if it is.

        Args:
            after: the first of those that were looked at last, or none.
        """

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next, or after these; all are 0 so far.

        With none of them the answer fails. To be called where `wait` has said that it is known.
        """


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """[num_words(vocab_size)]: these tokens, and no others."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
