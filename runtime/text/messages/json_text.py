"""Arguments as JSON: how they are read where a model writes them so, and written where it does not.

What is given is JSON wherever the model's text can be taken for it: control characters in texts and backslashes that
escape nothing are escaped, NaN and infinities are null. Numbers stay as they are written, of any size.
"""

import json
import re
from typing import Any

from enginewright.runtime.text.messages.source import Give, Reading, Source

_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_HEX = re.compile("[0-9A-Fa-f]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_object(
    source: Source, give: Give, *marks: str, begin: str = "{", in_texts: tuple[str, ...] = ()
) -> Reading[bool]:
    """Read and give an object as it is written. Raises ValueError if there is none.

    Args:
        begin: [ of a list.
        marks: what ends it before it is complete, outside of texts; the source's stops do, too.
        in_texts: what ends it in texts.

    Returns:
        Whether it is complete.
    """
    if not (yield from source.starts_with(begin)):
        raise ValueError(f"no {begin}")
    depth, ends = 0, (*marks, *source.stops)
    while True:
        mark = yield from source.give_up_to(give, *'"[]{}', *_NO_NUMBERS, *ends)
        if not mark or mark in ends:
            return False
        yield from source.has(mark)
        give("null" if mark in _NO_NUMBERS else mark)
        depth += (mark in "[{") - (mark in "]}")
        if mark == '"' and not (yield from read_text(source, give, *in_texts)):
            return False
        if depth == 0:
            return True


def read_text(source: Source, give: Give, *marks: str) -> Reading[bool]:
    """Read and give a text, from what follows its opening quote to its closing quote.

    Args:
        marks: what ends it before.

    Returns:
        Whether it is complete.
    """
    while True:
        mark = yield from source.give_up_to(lambda text: give(escaped(text)), '"', "\\", *marks)
        if not mark or mark in marks:
            return False
        yield from source.has(mark)
        give(mark if mark == '"' else (yield from _read_escape(source)))
        if mark == '"':
            return True


def _read_escape(source: Source) -> Reading[str]:
    """Read what follows a backslash; returns it as an escape of JSON."""
    char = yield from source.take(1)
    if char != "u":
        return f"\\{char}" if char in '"\\/bfnrt' else escaped(f"\\{char}")
    digits = yield from source.all_of(_HEX)
    return ("\\u" if len(digits) >= 4 else "\\\\u") + digits


def read_string(source: Source) -> Reading[str]:
    """Read a text with its quotes. Raises ValueError if it is none, or one that UTF-8 does not have."""
    yield from source.expect('"')
    parts: list[str] = []
    if not (yield from read_text(source, parts.append, *source.stops)):
        raise ValueError("a text without an end")
    text: str = json.loads(f'"{"".join(parts)}')
    if _SURROGATE.search(text):
        raise ValueError("a half of a character")
    return text


def load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check(text: str) -> Any:
    """A value whose type is that of a text's, which has to be JSON; integers, which may be of any size, are zero.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text, parse_int=_zero, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _zero(_: str) -> int:
    return 0


def _refuse(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}")


def escaped(text: str) -> str:
    """A part of a text as JSON has it between quotes."""
    return _without_surrogates(json.dumps(text, ensure_ascii=False)[1:-1])


def dump(value: Any) -> str:
    """Raises ValueError for numbers that JSON does not have."""
    return _without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _without_surrogates(text: str) -> str:
    """JSON with surrogates, which UTF-8 does not have, as escapes."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
