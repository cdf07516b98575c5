"""Makes texts safe for terminals, logs and other programs, whatever file names and other people's texts hold.

A control character moves the cursor or colors the terminal, a line break starts a line that looks like one of ours, a
direction mark reverses the text after it, and half a surrogate pair cannot be written at all.
"""

import json
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    r"""Makes one line: every invisible character is written as an escape, such as \x1b or \n."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def printable_lines(text: str) -> str:
    """Makes each line of a text printable."""
    return "\n".join(map(printable, text.split("\n")))


def printable_values(value: Any) -> Any:
    """Makes all texts in a JSON value printable, keys included."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {printable_values(key): printable_values(one) for key, one in value.items()}
    return type(value)(map(printable_values, value)) if isinstance(value, list | tuple) else value


def printable_json(text: str) -> str:
    """Rewrites JSON so that invisible characters in its texts are JSON's own escapes."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in text)
