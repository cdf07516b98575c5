"""Damaged headers of an engine file, any number of them, reproducibly, and checks of how a reader takes them.

In half of them the manifest is changed and hashed again, so that the checks that come after the hashes are reached
too.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from enginewright.engine_header import parse_header
from enginewright.errors import CorruptEngineError, EngineError
from enginewright.manifest import packed_bytes
from tests.helpers.small_engine_file import header_text, write_engine

NUMBERS = (b"0 -1 1 63 64 65 2147483648 4294967295 9007199254740993 9223372036854775807 18446744073709551615 1e3 "
           b"18446744073709551616 -9223372036854775809 1.0 1.5 1e999 -0 00 NaN").split()  # fmt: skip
NUMBERS += [b"9" * 30, b"9" * 5000]
TOKENS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"null", b"true", b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80",
          b"\\ud800", b"\\u0000", b"\\u0041", b"\xe2\x80\xa8", "é".encode(), b" ", b"\n", b'"a":1,',
          b'"__metadata__":{},', b'"weights/x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},', b'"evidence":true,',
          b'"layout":"r16",')  # fmt: skip
WORDS = (b"U8", b"F32", b"bf16", b"i8", b"f32", b"i64", b"r16", b"r16_pairs", b"r16_columns", b"u4", b"plain",
         b"enginewright", b"plan/cpu", b"weights/embed", b"__metadata__", b"", b"a" * 300)  # fmt: skip
_NUMBER = re.compile(rb"-?[0-9]+")
_WORD = re.compile(rb'"[^"\\]*"')


def flip(text: bytes, random: Random) -> bytes:
    place = random.randrange(len(text))
    return text[:place] + bytes((text[place] ^ (1 << random.randrange(8)),)) + text[place + 1 :]


def insert(text: bytes, random: Random) -> bytes:
    place = random.randrange(len(text) + 1)
    return text[:place] + random.choice(TOKENS) + text[place:]


def delete(text: bytes, random: Random) -> bytes:
    place = random.randrange(len(text))
    return text[:place] + text[place + random.choice((1, 1, 2, 10, 100)) :]


def repeat(text: bytes, random: Random) -> bytes:
    start, end = sorted((random.randrange(len(text)), random.randrange(len(text))))
    return text[:end] + text[start:end] + text[end:]


def repeat_entry(text: bytes, random: Random) -> bytes:
    """A key that is there twice, or an entry in another place."""
    first = text.find(b',"', random.randrange(len(text)))
    second = text.find(b',"', first + 1)
    place = text.find(b',"', random.randrange(len(text)))
    return text[:place] + text[first:second] + text[place:] if min(first, second, place) >= 0 else text


def nest(text: bytes, random: Random) -> bytes:
    depth = random.choice((2, 50, 1000, 3000))
    opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    place = random.randrange(len(text))
    return text[:place] + opening * depth + closing * random.choice((0, depth)) + text[place:]


def _some(pattern: re.Pattern[bytes], text: bytes, random: Random) -> re.Match[bytes] | None:
    return pattern.search(text, random.randrange(len(text))) or pattern.search(text)


def _substitute(pattern: re.Pattern[bytes], text: bytes, random: Random, new: Callable[[bytes], bytes]) -> bytes:
    match = _some(pattern, text, random)
    return text[: match.start()] + new(match[0]) + text[match.end() :] if match else text


def renumber(text: bytes, random: Random) -> bytes:
    def new(old: bytes) -> bytes:
        if random.random() < 0.5 and len(old) < 20:
            return b"%d" % (int(old) + random.choice((-64, -1, 1, 64)))
        return random.choice(NUMBERS)

    return _substitute(_NUMBER, text, random, new)


def reword(text: bytes, random: Random) -> bytes:
    return _substitute(_WORD, text, random, lambda _: b'"%s"' % random.choice(WORDS))


def swap_numbers(text: bytes, random: Random) -> bytes:
    """Offsets that overlap, sizes of another section."""
    first, second = _some(_NUMBER, text, random), _some(_NUMBER, text, random)
    if not first or not second or first.end() > second.start():
        return text
    return b"".join(
        (text[: first.start()], second[0], text[first.end() : second.start()], first[0], text[second.end() :])
    )


DAMAGES = (flip, insert, delete, repeat, repeat_entry, nest, renumber, renumber, reword, swap_numbers)


def damaged(text: bytes, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        if text:
            text = random.choice(DAMAGES)(text, random)
    return text


def _rehashed(manifest: bytes) -> bytes:
    """The manifest with the content hash that it ought to have, if it is one at all."""
    try:
        fields = json.loads(manifest)
        old = fields.pop("content_hash").encode("ascii")
        fields["sections"] = {name: form for name, form in fields["sections"].items() if not form.get("evidence")}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return manifest
    return manifest.replace(old, hashlib.sha256(text).hexdigest().encode()) if len(old) == 64 else manifest


def signed(manifest: bytes) -> bytes:
    """The manifest's part of the header: its text, and the hash of that."""
    escaped = manifest.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    digest = hashlib.sha256(manifest).hexdigest().encode()
    return b'"enginewright":"%s","enginewright.sha256":"%s"' % (escaped, digest)


def mutants(folder: Path, seed: int, count: int) -> Iterator[tuple[bytes, int]]:
    """(first bytes of a file, length of the file), `count` times."""
    path = folder / "whole.engine"
    write_engine(path)
    data = path.read_bytes()
    data_bytes = len(data) - 8 - int.from_bytes(data[:8], "little")
    header = header_text(data)
    manifest = json.loads(header)["__metadata__"]["enginewright"].encode()
    before, after = header.split(signed(manifest))
    random = Random(seed)
    for _ in range(count):
        text = header
        if random.random() < 0.5:
            changed = damaged(manifest, random)
            text = before + signed(_rehashed(changed) if random.random() < 0.7 else changed) + after
        if text is header or random.random() < 0.1:
            text = damaged(text, random)
        text = text.ljust(-(-(len(text) + 8) // 64) * 64 - 8)
        length, file_bytes = len(text), 8 + len(text) + data_bytes
        match random.randrange(24):
            case 0:
                length = random.choice((0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1, random.getrandbits(64)))
            case 1:
                file_bytes = random.choice((0, 7, 8, 9, file_bytes - 1, file_bytes + 64, 2**62, random.getrandbits(63)))
            case 2:
                text = text[: random.randrange(len(text) + 1)]
        yield length.to_bytes(8, "little") + text, file_bytes


def read_all(headers: Iterator[tuple[bytes, int]]) -> Counter[str]:
    """Parses every header; an accepted one must be sound. Any error but EngineError is passed on.

    Returns:
        The reader's message ("" for accepted), up to the first number or quotation → its count.
    """
    said: Counter[str] = Counter()
    for data, file_bytes in headers:
        try:
            header = parse_header(data, file_bytes)
        except EngineError as error:
            assert type(error) in (CorruptEngineError, EngineError)
            said[re.sub(r"['\"`0-9].*", "…", error.why)] += 1
            continue
        said[""] += 1
        position = end = 8 + int.from_bytes(data[:8], "little")
        assert end % 64 == 0 and header.offsets.keys() == header.manifest.sections.keys()
        for name, offset in sorted(header.offsets.items(), key=lambda item: (item[1], item[0] != "chat_template")):
            form = header.manifest.sections[name]
            assert offset == position, "a gap or an overlap"
            position += -(-form.nbytes // 64) * 64
            if form.dtype is not None and form.shape is not None and form.layout is not None:
                assert form.nbytes == packed_bytes(form.dtype, form.shape, form.layout)
        assert position == file_bytes
    return said
