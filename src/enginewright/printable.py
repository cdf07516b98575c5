"""Texts for terminals, logs and other programs, without what names of files and strangers' texts may have in them.

A control character moves the cursor or colors the terminal, a line break begins what looks like a line of our own, a
mark of direction turns what follows around, and half a surrogate pair cannot be written at all.
"""

import json
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """One line: every character that cannot be seen is written as an escape, such as \\x1b or \\n."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """The same of each line of a text that has several."""
    return "\n".join(map(printable, text.split("\n")))


def printable_values(value: Any) -> Any:
    """The same of all texts in what JSON could hold, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(one) for key, one in value.items()}
    return type(value)(map(printable_values, value)) if isinstance(value, list | tuple) else value


def printable_json(text: str) -> str:
    """The same JSON, with what cannot be seen in its texts as JSON's own escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
