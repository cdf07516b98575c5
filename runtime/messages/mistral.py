"""Mistral: [TOOL_CALLS] and a list of {"name": …, "arguments": {…}}; since 2025, [TOOL_CALLS]NAME[ARGS]{…} for each."""

import re

from enginewright.runtime.messages.calls import (
    JSON_STREAMED,
    Call,
    CallFormat,
    Schemas,
    StreamedCalls,
    WrittenCalls,
    json_call,
    json_calls,
    load,
)

_OPEN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*+(?:\[TOOL_CALLS\]\s*+)?([^\s\[{]++)\s*+(?:\[CALL_ID\][^\[{]*+)?\[ARGS\]\s*+(?=\{)")


def _read_named(text: str, schemas: Schemas) -> list[Call]:
    return [_named(one) for one in text.split(_OPEN)]


def _named(text: str) -> Call:
    name, mark, arguments = text.partition("[ARGS]")
    name = name.partition("[CALL_ID]")[0].strip()
    if not mark or not name:
        raise ValueError("no name with arguments")
    return json_call({"name": name, "arguments": load(arguments)})


MISTRAL = CallFormat(
    "mistral",
    (_OPEN,),
    json_calls,
    WrittenCalls('{"name": "', '", "arguments": ', "}", between=", ", first=f"{_OPEN}[", last="]"),
    open=_OPEN,
    streamed=JSON_STREAMED,
)
MISTRAL_NAMED = CallFormat(
    "mistral_named",
    (_OPEN, "[ARGS]"),
    _read_named,
    WrittenCalls(_OPEN, "[ARGS]", "", between=""),
    open=_OPEN,
    streamed=StreamedCalls(_HEAD, re.compile(r"\s*")),
    marks=("[ARGS]", "[CALL_ID]"),
)
