"""Which tokens an answer may go on with: a bit for each of the vocabulary.

Token t is bit t % 32 of word t // 32, as in the masks of xgrammar and llguidance.
"""

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.uint32]
WORD_BITS = 32
ALL = np.uint32(0xFFFFFFFF)


class Grammar(Protocol):
    """What an answer may be, as its tokens come: one object for each answer.

    Both calls are part of a step that other answers wait for, so they have to be quick, and must not raise.

    failed: no token may come next since the grammar went beyond a limit; whoever reads it has called `allow`.
    """

    failed: bool

    def allow(self, mask: Mask) -> None:
        """Set the bits of the tokens that may come next; all are 0 so far. With none of them the answer fails."""

    def take(self, token: int) -> None:
        """The answer goes on with this token, which was allowed; it may be its last one, an end-of-text token too."""


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def mask_of(tokens: Collection[int], vocab_size: int) -> Mask:
    """[num_words(vocab_size)]: these tokens, and no others."""
    bits = np.zeros(num_words(vocab_size) * WORD_BITS, np.bool_)
    bits[list(tokens)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
