"""Reads arguments that a model writes as JSON, and writes JSON of those that it writes in another format.

The result is valid JSON even if the model's text is almost JSON: control characters in texts and backslashes that
escape nothing are escaped, and NaN and infinities become null. Numbers stay as they are written, of any size.
"""

import json
import re
from typing import Any

from enginewright.runtime.text.messages.source import Give, MessageSource, Reading

_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
_HEX = re.compile("[0-9A-Fa-f]*")
_SURROGATE = re.compile("[\ud800-\udfff]")


def read_object(
    source: MessageSource, give: Give, *marks: str, begin: str = "{", in_texts: tuple[str, ...] = ()
) -> Reading[bool]:
    """Reads an object and gives it out as it is written.

    Args:
        source: the text.
        give: takes the parts of the object.
        marks: texts that end it before it is complete, outside of texts, in addition to the source's stops.
        begin: "[" for a list.
        in_texts: texts that end it within texts.

    Returns:
        True if it is complete.

    Raises:
        ValueError: there is none.
    """
    if not (yield from source.starts_with(begin)):
        raise ValueError(f"no {begin}")
    depth, ends = 0, (*marks, *source.stops)
    while True:
        mark = yield from source.pass_on_until(give, *'"[]{}', *_NO_NUMBERS, *ends)
        if not mark or mark in ends:
            return False
        yield from source.has(mark)
        give("null" if mark in _NO_NUMBERS else mark)
        depth += (mark in "[{") - (mark in "]}")
        if mark == '"' and not (yield from read_text(source, give, *in_texts)):
            return False
        if depth == 0:
            return True


def read_text(source: MessageSource, give: Give, *marks: str) -> Reading[bool]:
    """Reads a text and gives it out, from after its opening quote to its closing quote.

    Args:
        source: the text.
        give: takes the parts of the text.
        marks: texts that end it early.

    Returns:
        True if it is complete.
    """
    while True:
        mark = yield from source.pass_on_until(lambda text: give(escaped(text)), '"', "\\", *marks)
        if not mark or mark in marks:
            return False
        yield from source.has(mark)
        give(mark if mark == '"' else (yield from _read_escape(source)))
        if mark == '"':
            return True


def _read_escape(source: MessageSource) -> Reading[str]:
    """Reads the characters after a backslash, and returns them as an escape of JSON."""
    char = yield from source.take(1)
    if char != "u":
        return f"\\{char}" if char in '"\\/bfnrt' else escaped(f"\\{char}")
    digits = yield from source.all_of(_HEX)
    return ("\\u" if len(digits) >= 4 else "\\\\u") + digits


def read_string(source: MessageSource) -> Reading[str]:
    """Reads a text with its quotes. Raises ValueError if it is none, or not valid Unicode."""
    yield from source.expect('"')
    parts: list[str] = []
    if not (yield from read_text(source, parts.append, *source.stops)):
        raise ValueError("a text without an end")
    text: str = json.loads(f'"{"".join(parts)}')
    if _SURROGATE.search(text):
        raise ValueError("a half of a character")
    return text


def load(text: str) -> Any:
    """Decodes JSON. Raises ValueError if it is not valid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def check(text: str) -> Any:
    """Decodes JSON only to see its type and whether it is valid; integers, which may be of any size, become zero.

    Raises:
        ValueError: it is not valid JSON.
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
    """A part of a text as it is written between quotes in JSON."""
    return _without_surrogates(json.dumps(text, ensure_ascii=False)[1:-1])


def dump(value: Any) -> str:
    """Encodes JSON. Raises ValueError for numbers that JSON does not have."""
    return _without_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def _without_surrogates(text: str) -> str:
    """Replaces surrogates, which UTF-8 does not have, by escapes."""
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
