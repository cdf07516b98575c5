"""Reads calls as JSON objects: {"name": …, "arguments": {…}}, where "arguments" may be "parameters"."""

import re

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
    """Reads one object. Returns True if it is complete; if not, nothing is known about the text that follows."""
    yield from source.expect("{")
    name: str | None = None
    early: list[str] = []  # arguments that come before the name
    has_arguments, between = False, ""
    while True:
        yield from source.space()
        if (yield from source.has("}")):
            break
        if has_arguments and (yield from source.starts_with(*source.stops)):
            return False
        yield from source.expect(between)
        yield from source.space()
        key, between = (yield from read_string(source)), ","
        if only_known and key not in _KEYS:
            raise ValueError("no key of a call")
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key == "name" and name is None:
            name = yield from read_string(source)
            if only_known and name not in found.schemas:
                raise ValueError("no tool")
            found.begin(name)
            if has_arguments:
                found.add("".join(early))
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            if not (yield from _read_arguments(source, early.append if name is None else found.add)):
                return False
        else:
            yield from _read_other(source)
    if name is None:
        raise ValueError("no name")
    if not has_arguments:
        found.add("{}")
    return True


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
        yield from source.give_up_to(parts.append, *",]}", *source.stops)
    check("".join(parts))
