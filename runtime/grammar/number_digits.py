"""A limit on the digits of JSON numbers. Without it, a weak model may write 0.3333… until it reaches its max_tokens.

llguidance has no such limit, so the mask enforces it: tokens with too many digits are removed from the mask.
"""

import re
from collections.abc import Sequence
from typing import Protocol

MAX_DIGITS = 20  # consecutive digits; an integer of 64 bits has up to 19, a double needs 17
MAX_EXPONENT_DIGITS = 3  # digits of an exponent
_DIGITS = b"0123456789"
# First bytes of tokens, other than digits and special tokens, that may continue or follow a number, in JSON and in the
# formats of tool calls. If the mask allows any other token, such as a quote or a letter, the digits belong to a text.
_OF_NUMBERS = b"+-.Ee,)]}< \t\r\n"
_LAST_DIGITS = re.compile(rb"([Ee][+-]?)?([0-9]*)\Z")
_MAX_BEFORE = MAX_DIGITS + 2  # bytes before the mask's token that are read


class TokenBytes(Protocol):
    """The part of llguidance's LLTokenizer that is used here."""

    vocab_size: int  # number of tokens

    def decode_bytes(self, tokens: list[int]) -> bytes:
        """Bytes of the text of tokens."""
        ...

    def is_special_token(self, token: int) -> bool:
        """True if a token is a special token, such as an end-of-text token."""
        ...


class NumberDigits:
    """Removes tokens with too many digits from masks, if other tokens remain, so that an answer can always continue.

    Where the grammar leaves no other token, a number gets more digits, such as the constant 1e-40, which is written
    without an exponent.
    """

    def __init__(self, vocabulary: TokenBytes) -> None:
        self._vocabulary, num_bytes = vocabulary, vocabulary.vocab_size // 8 + 1
        longer, others = [bytearray(num_bytes) for _ in range(MAX_DIGITS + 1)], bytearray(num_bytes)
        for token in range(vocabulary.vocab_size):
            text = vocabulary.decode_bytes([token])
            num_digits = len(text) - len(text.lstrip(_DIGITS))
            for bits in longer[:num_digits]:
                bits[token // 8] |= 1 << token % 8
            if not num_digits and text[:1] not in _OF_NUMBERS and not vocabulary.is_special_token(token):
                others[token // 8] |= 1 << token % 8
        # Masks as integers with one bit per token. Tokens of the mask at index n begin with more than n digits.
        self._longer = [int.from_bytes(bits, "little") for bits in longer]
        self._others = int.from_bytes(others, "little")

    def bounded(self, mask: memoryview, tokens: Sequence[int]) -> memoryview:
        """Removes the tokens that would make a number too long.

        Args:
            mask: the tokens that a grammar allows next, one bit per token.
            tokens: the tokens of the answer so far.

        Returns:
            The mask itself if nothing is removed, else a new one.
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
