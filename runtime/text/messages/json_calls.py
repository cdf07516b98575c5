"""Reads calls as JSON objects: {"name": …, "arguments": {…}}, where "arguments" may be "parameters"."""

import re
from collections.abc import Sequence

from enginewright.runtime.text.messages.calls import FoundCalls
from enginewright.runtime.text.messages.json_text import check, read_object, read_string, read_text
from enginewright.runtime.text.messages.source import Give, MessageSource, Reading

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id")
_BETWEEN = re.compile(r"[\s,;]*")  # text between two calls


def read_calls(source: MessageSource, found: FoundCalls, *, only_known: bool = False) -> Reading[None]:
    """Reads one such object, or several, in a list or one after the other.

    Args:
        source: the text.
        found: collects the calls.
        only_known: whether an object counts as a call only if all of its keys are a call's and its name is that of a
            tool.
    """
    yield from source.space()
    is_list = yield from source.has("[")
    while True:
        yield from source.all_of(_BETWEEN)
        if not (yield from _read_call(source, found, only_known)):
            return
        yield from source.all_of(_BETWEEN)
        if not (yield from source.starts_with("{")):
            break
    if is_list:
        yield from source.has("]")


def _read_call(source: MessageSource, found: FoundCalls, only_known: bool) -> Reading[bool]:
    """Reads one object. Returns True if it is complete; if it was cut off at a stop, no further call can be read."""
    read: set[str] = set()  # of "name" and "arguments", what was read
    early: list[str] = []  # arguments that come before the name
    yield from source.expect("{")
    yield from source.space()
    is_first = True
    while not (yield from source.has("}")):
        if "arguments" in read and (yield from source.starts_with(*source.stops)):
            return False
        key = yield from _read_key(source, is_first, only_known)
        is_first = False
        if key in read or key not in ("name", "arguments"):
            yield from _read_other(source)
        elif key == "name":
            yield from _read_name(source, found, early, only_known)
        elif not (yield from _read_arguments(source, found.add if "name" in read else early.append)):
            return False
        read.add(key)
        yield from source.space()
    if "name" not in read:
        raise ValueError("no name")
    if "arguments" not in read:
        found.add("{}")
    return True


def _read_key(source: MessageSource, is_first: bool, only_known: bool) -> Reading[str]:
    """Reads a key and the colon after it. Returns "arguments" for "parameters"."""
    if not is_first:
        yield from source.expect(",")
        yield from source.space()
    key = yield from read_string(source)
    if only_known and key not in _KEYS:
        raise ValueError("no key of a call")
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()
    return "arguments" if key in _ARGUMENTS else key


def _read_name(source: MessageSource, found: FoundCalls, early: Sequence[str], only_known: bool) -> Reading[None]:
    """Reads the name, and begins the call with the arguments that came before it."""
    name = yield from read_string(source)
    if only_known and name not in found.schemas:
        raise ValueError("no tool")
    found.begin(name)
    if early:
        found.add("".join(early))


def _read_arguments(source: MessageSource, give: Give) -> Reading[bool]:
    """Reads arguments and gives them out. Returns True if they are complete."""
    if (yield from source.starts_with("{")):
        return (yield from read_object(source, give))
    text = yield from read_string(source)  # a JSON text that contains JSON
    if not isinstance(check(text), dict):
        raise ValueError("arguments that are no object")
    give(text)
    return True


def _read_other(source: MessageSource) -> Reading[None]:
    """Reads a value that does not matter for the call."""
    parts: list[str] = []
    if (yield from source.starts_with("{")):
        yield from read_object(source, parts.append)
    elif (yield from source.starts_with("[")):
        yield from read_object(source, parts.append, begin="[")
    elif (yield from source.has('"')):
        parts.append('"')
        yield from read_text(source, parts.append, *source.stops)
    else:
        yield from source.pass_on_until(parts.append, *",]}", *source.stops)
    check("".join(parts))
