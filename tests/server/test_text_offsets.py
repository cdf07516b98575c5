"""Bytes and offsets of tokens, compared with those of the bytes of the whole text."""

import random
from collections.abc import Callable

import pytest

from enginewright.runtime.server.text_offsets import TextOffsets, prompt_offsets
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.helpers.tiny import BEGIN
from tests.helpers.token_bytes import byte_level, byte_level_bytes, offsets_of
from tests.text.test_tokenizer import TEXTS, TOKENIZERS, bytes_of


def bytes_of_token(tokenizer: Tokenizer, token: int) -> bytes:
    """A token's own bytes, by transformers' table or in SentencePiece's form."""
    written = str(tokenizer._tokenizer.id_to_token(token))
    if tokenizer is byte_level():
        return byte_level_bytes(tokenizer, token)
    is_byte = written.startswith("<0x")
    return bytes([int(written[3:5], 16)]) if is_byte else written.replace("▁", " ").encode()


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_offsets_of_texts(make: Callable[[], Tokenizer]) -> None:
    """However a text is cut into tokens."""
    tokenizer, rng = make(), random.Random(3)
    for _ in range(300):
        answer = list[int]()
        for text in rng.choices(TEXTS, k=rng.randrange(1, 5)):
            answer += (
                bytes_of(tokenizer, text) if rng.random() < 0.5 else tokenizer.encode(text, add_special_tokens=False)
            )
        own = [bytes_of_token(tokenizer, token) for token in answer]
        prompt = tokenizer.encode("The")
        offsets = TextOffsets(tokenizer, prompt, 7, skip_special_tokens=True)
        assert [offsets.push(token) - 7 for token in answer] == offsets_of(own)
        assert [tokenizer.token_bytes(token) for token in answer if len(own) > 1] == own or make is not byte_level


def test_offsets_of_noise() -> None:
    """Offsets are right for a model whose bytes are mostly not valid characters."""
    tokenizer, rng = byte_level(), random.Random(4)
    tokens = [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]
    for _ in range(500):
        answer = rng.choices(tokens, k=rng.randrange(1, 30))
        own = [bytes_of_token(tokenizer, token) for token in answer]
        offsets = TextOffsets(tokenizer, tokenizer.encode("a"), 0, skip_special_tokens=True)
        assert [offsets.push(token) for token in answer] == offsets_of(own), answer


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_bytes_of_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for token in range(tokenizer.vocab_size):
        own = tokenizer.token_bytes(token)
        if token in tokenizer.special_ids:
            assert own.decode() == tokenizer._tokenizer.id_to_token(token)
        else:  # a decoder may leave out the space before a token that is alone
            assert own in (bytes_of_token(tokenizer, token), bytes_of_token(tokenizer, token).removeprefix(b" "))


def test_offsets_of_a_prompt() -> None:
    """A special token counts where the client has written it."""
    tokenizer = byte_level()
    begin = tokenizer.token_id(BEGIN)
    assert begin is not None
    text = f"ďá{BEGIN}bel"
    ids = tokenizer.encode(text, add_special_tokens=False)
    offsets = prompt_offsets(tokenizer, [begin, *ids], text)
    assert offsets[0] == offsets[1] == 0 and text[offsets[-1] :] == tokenizer.decode(ids[-1])
    place = ids.index(begin) + 1
    assert (offsets[place], offsets[place + 1]) == (2, 2 + len(BEGIN))
