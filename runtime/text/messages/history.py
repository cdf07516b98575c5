"""Converts earlier messages to forms that chat templates can print: calls that were cut off, and empty answers.

A template gets arguments as an object if they are JSON of one, and otherwise as text. Templates differ in what they can
print: some iterate over the keys of an object, and fail on a text or print nonsense for one; some insert a text, and
fail on an object; and some refuse an empty answer. So other forms are tried after the first one.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginewright.runtime.text.messages.json_text import dump, load

INVALID_JSON = "INVALID_JSON"  # key of an object for arguments that are no JSON object, as in Anthropic's API
Messages = Sequence[Mapping[str, Any]]


def parse_object(arguments: str) -> dict[str, Any] | None:
    """The object in a text of JSON; None if it is none, or has an unpaired surrogate."""
    try:
        value = load(arguments)
        if "\\u" in arguments:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_object(arguments: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments for templates that do not accept text."""
    if not isinstance(arguments, str):
        return arguments
    found = parse_object(arguments)
    return {INVALID_JSON: arguments} if found is None else found


def as_text(arguments: str | Mapping[str, Any]) -> str:
    """Arguments for templates that do not accept objects."""
    return arguments if isinstance(arguments, str) else dump(arguments)


def forms(messages: Messages) -> Iterator[Messages]:
    """Yields the messages in each different form, the best one first."""
    given: list[Messages] = []
    for filled in (messages, [_filled(message) for message in messages]):
        for change in (None, as_object, as_text):
            form = filled if change is None else [_with_arguments(message, change) for message in filled]
            if form not in given:
                given.append(form)
                yield form


def shows_cut_arguments(text: str, messages: Messages) -> bool:
    """True if a prompt contains all arguments that are no objects, as they are or quoted as JSON."""
    cut = [one for message in messages for one in _arguments(message) if isinstance(one, str)]
    return all(one in text or _quoted(one) in text for one in cut if parse_object(one) is None)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _filled(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message, with a space instead of an empty answer."""
    is_empty = message.get("role") == "assistant" and message.get("content") == "" and not message.get("tool_calls")
    return {**message, "content": " "} if is_empty else message


def _with_arguments(message: Mapping[str, Any], change: Callable[[str | Mapping[str, Any]], Any]) -> Mapping[str, Any]:
    if not any(True for _ in _arguments(message)):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": change(call["function"]["arguments"])}}
        if _has_arguments(call)
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _arguments(message: Mapping[str, Any]) -> Iterator[str | Mapping[str, Any]]:
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        yield from (call["function"]["arguments"] for call in calls if _has_arguments(call))


def _has_arguments(call: Any) -> bool:
    """True if a call has the format of OpenAI's API; messages of `LLM.chat` may have any."""
    match call:
        case {"function": {"arguments": str() | Mapping()}}:
            return True
    return False
