"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>."""

import re

from enginewright.runtime.messages.bare import bare_value, typed
from enginewright.runtime.messages.calls import Call, CallFormat, ListedArguments, Schemas, WrittenCalls, dump

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
# A value goes on until the parameter, the next one or the function ends: a model may forget to end it.
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)(?:\n?</parameter>|\n?(?=<parameter=)|\n?(?=</function>)|\n?\Z)", re.DOTALL
)
_ENDS = ("<parameter=", "</function>", "<tool_call>", "</tool_call>")  # of a value, wherever they stand


def _read(text: str, schemas: Schemas) -> list[Call]:
    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ValueError("no function")
    name = found[1].strip()
    schema = schemas.get(name, {})
    arguments = {key.strip(): typed(value, schema, key.strip()) for key, value in _PARAMETER.findall(found[2])}
    return [Call(name, dump(arguments))]


QWEN3_XML = CallFormat(
    "qwen3_xml",
    ("<tool_call>", "<function=", "<parameter="),
    _read,
    WrittenCalls(
        "<tool_call>\n<function=",
        ">\n",
        "</function>\n</tool_call>",
        arguments=ListedArguments("<parameter=", ">\n", "\n</parameter>\n", bare_value(_ENDS)),
    ),
    open="<tool_call>",
    close="</tool_call>",
    before_end="</function>",
    quotes="",
)
