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

    Calls are part of a step that other answers wait for, so they have to be quick, and must not raise.

    failed: no token may come next since the grammar went beyond a limit; whoever reads it has called `allow`.
    forced: tokens that can only come next, one behind the other; the same holds.
    """

    failed: bool
    forced: Sequence[int]

    def wait(self, seconds: float) -> bool:
        """Whether it is known what may come next, for which to wait so long at most; `allow` waits until it is."""

    def allow(self, mask: Mask, behind: Sequence[int] = ()) -> None:
        """Set the bits of the tokens that may come next; all are 0 so far. With none of them the answer fails.

        Args:
            behind: tokens that may come before; where they may not, nothing is set.
        """

    def take(self, token: int) -> None:
        """The answer goes on with this token, which was allowed; it may be its last one, an end-of-text token too."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """[num_words(vocab_size)]: these tokens, and no others."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
