"""Computes where tokens begin in a text, in characters; a token that begins within a character has its offset."""

from collections.abc import Sequence

from enginewright.runtime.text.detokenizer import Detokenizer
from enginewright.runtime.text.tokenizer import Tokenizer


class TextOffsets:
    """Offsets of the tokens of a text, one after the other.

    Attributes:
        num_chars: characters before the next token, except for those that `Detokenizer.held` will complete.

    Args:
        tokenizer: the engine's tokenizer.
        before: the tokens before the text.
        start: the offset of the text's first character.
        skip_special_tokens: whether special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], start: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer, self.num_chars = tokenizer, start
        self._detokenizer = Detokenizer(tokenizer, before, skip_special_tokens=skip_special_tokens)

    def push(self, token: int) -> int:
        """Offset of the next token."""
        offset = self.num_chars
        if held := b"".join(map(self._tokenizer.token_bytes, self._detokenizer.held)):
            begun = held + self._tokenizer.token_bytes(token)[:1]
            offset += len(begun.decode(errors="replace")) - 1  # the token begins in the last of these characters
        self.num_chars += len(self._detokenizer.push(token))
        return offset


def prompt_offsets(tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> list[int]:
    """Offsets of a prompt's tokens in its text, which contains only those special tokens that the client wrote.

    Args:
        tokenizer: the engine's tokenizer.
        prompt: the token ids.
        text: the text of the prompt.

    Returns:
        The offset of each token, in characters.
    """
    offsets, found = TextOffsets(tokenizer, (), 0, skip_special_tokens=True), list[int]()
    for token in prompt:
        found.append(offsets.push(token))
        if token in tokenizer.special_ids and token not in tokenizer.shown_marks:
            written = tokenizer.decode([token], skip_special_tokens=False)
            offsets.num_chars += len(written) if text.startswith(written, found[-1]) else 0
    return found
