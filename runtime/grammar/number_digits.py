"""A bound on the digits of JSON's numbers: without it, a weak model writes 0.3333… until its tokens end.

llguidance has none, so it is of the mask: digits that are too many are taken out of it.
"""

import re
from collections.abc import Sequence
from typing import Protocol

MAX_DIGITS = 20  # in a row. 64 bits take 19, a double 17
MAX_EXPONENT_DIGITS = 3
_DIGITS = b"0123456789"
# First bytes of the tokens, besides digits and special tokens, that may come in a number or after it, in JSON and in
# the forms of calls. Where something else may come, such as a quote or a letter, the digits are those of a text.
_OF_NUMBERS = b"+-.Ee,)]}< \t\r\n"
_LAST_DIGITS = re.compile(rb"([Ee][+-]?)?([0-9]*)\Z")
_MAX_BEFORE = MAX_DIGITS + 2  # bytes that are looked at


class Vocabulary(Protocol):
    """The part of llguidance's LLTokenizer that is used here."""

    vocab_size: int

    def decode_bytes(self, tokens: list[int]) -> bytes: ...
    def is_special_token(self, token: int) -> bool: ...


class NumberDigits:
    """Tokens of digits, taken out of a mask where others are left, so that an answer stays valid and can go on.

    A number that is not complete may have more, such as the constant 1e-40, which is written without an exponent.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, num_bytes = vocabulary, vocabulary.vocab_size // 8 + 1
        longer, others = [bytearray(num_bytes) for _ in range(MAX_DIGITS + 1)], bytearray(num_bytes)
        for token in range(vocabulary.vocab_size):
            text = vocabulary.decode_bytes([token])
            num_digits = len(text) - len(text.lstrip(_DIGITS))
            for bits in longer[:num_digits]:
                bits[token // 8] |= 1 << token % 8
            if not num_digits and text[:1] not in _OF_NUMBERS and not vocabulary.is_special_token(token):
                others[token // 8] |= 1 << token % 8
        # As numbers whose bits are tokens; those at n begin with more than n digits.
        self._longer = [int.from_bytes(bits, "little") for bits in longer]
        self._others = int.from_bytes(others, "little")

    def bounded(self, mask: memoryview, tokens: Sequence[int]) -> memoryview:
        """A mask without what would make a number too long.

        Args:
            mask: of what a grammar allows after the tokens.
        """
        text = self._vocabulary.decode_bytes(list(tokens[-_MAX_BEFORE:]))[-_MAX_BEFORE:]
        found = _LAST_DIGITS.search(text)
        assert found is not None
        num_left = (MAX_DIGITS if found[1] is None else MAX_EXPONENT_DIGITS) - len(found[2])
        longer = self._longer[max(num_left, 0)]
        if not longer:
            return mask
        allowed = int.from_bytes(mask, "little")
        left = allowed & ~longer
        if left in (0, allowed) or allowed & self._others:
            return mask
        return memoryview(left.to_bytes(len(mask), "little"))
