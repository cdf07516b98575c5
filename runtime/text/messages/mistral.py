"""Mistral: [TOOL_CALLS] and a list of {"name": …, "arguments": {…}}; since 2025, [TOOL_CALLS]NAME[ARGS]{…} per call."""

from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, WrittenCalls
from enginewright.runtime.text.messages.json_calls import read_calls
from enginewright.runtime.text.messages.json_text import read_object
from enginewright.runtime.text.messages.source import MessageSource, Reading

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _read_named(source: MessageSource, found: FoundCalls) -> Reading[None]:
    name = (yield from source.up_to(_ID, _ARGUMENTS, "{")).strip()
    if (yield from source.has(_ID)):
        yield from source.up_to(_ARGUMENTS, "{")
    yield from source.expect(_ARGUMENTS)
    if not name:
        raise ValueError("no name")
    found.begin(name)
    yield from source.space()
    yield from read_object(source, found.add)


MISTRAL = CallFormat(
    "mistral",
    (_OPEN,),
    read_calls,
    WrittenCalls('{"name": "', '", "arguments": ', "}", between=", ", first=f"{_OPEN}[", last="]"),
    open=_OPEN,
    is_streamed=True,
)
MISTRAL_NAMED = CallFormat(
    "mistral_named",
    (_OPEN, _ARGUMENTS),
    _read_named,
    WrittenCalls(_OPEN, _ARGUMENTS, "", between=""),
    open=_OPEN,
    is_streamed=True,
    marks=(_ARGUMENTS, _ID),
)
