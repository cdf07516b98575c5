"""Bytes of tokens, and where these begin in a text, found without the library; and a tokenizer for it."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from transformers.convert_slow_tokenizer import bytes_to_unicode

from enginewright.runtime.text.tokenizer import Tokenizer
from tests.helpers.tiny import MemoryCheckpoint

BYTES = {name: byte for byte, name in bytes_to_unicode().items()}


def byte_level_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a byte-level token, by transformers' table."""
    return bytes(BYTES[name] for name in str(tokenizer._tokenizer.id_to_token(token)))


def starts_of(data: bytes) -> list[int]:
    """Offsets at which characters begin in bytes; each longest invalid part counts as one character."""
    starts, place = list[int](), 0
    while place < len(data):
        starts.append(place)
        here = data[place : place + 4]
        try:
            place += len(here.decode()[0].encode())
        except UnicodeDecodeError as error:
            place += len(here[: error.start].decode()[0].encode()) if error.start else error.end
    return starts


def offsets_of(pieces: Sequence[bytes]) -> list[int]:
    starts = starts_of(b"".join(pieces))
    return [max(bisect_right(starts, place) - 1, 0) for place in accumulate(map(len, pieces[:-1]), initial=0)]


@cache
def byte_level() -> Tokenizer:
    """A tokenizer like Llama 3's: every byte is a token, and merges may end in the middle of a character."""
    return Tokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None)
