"""Mistral: [TOOL_CALLS] and a list of {"name": …, "arguments": {…}}; since 2025, [TOOL_CALLS]NAME[ARGS]{…} for each."""

from enginewright.runtime.messages.calls import Call, CallFormat, Schemas, WrittenCalls, json_call, json_calls, load

_OPEN = "[TOOL_CALLS]"


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
    open=_OPEN,
    written=WrittenCalls('{"name": "', '", "arguments": ', "}", between=", ", first=f"{_OPEN}[", last="]"),
)
MISTRAL_NAMED = CallFormat(
    "mistral_named",
    (_OPEN, "[ARGS]"),
    _read_named,
    open=_OPEN,
    written=WrittenCalls(_OPEN, "[ARGS]", "", between=""),
    marks=("[ARGS]", "[CALL_ID]"),
)
