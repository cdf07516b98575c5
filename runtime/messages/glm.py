"""GLM 4.5 and later: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>."""

import re

from enginewright.runtime.messages.calls import Call, CallFormat, Schemas, dump, typed

_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[Call]:
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    if not name or re.search(r"\s", name) or _ARGUMENT.sub("", mark + rest).strip():
        raise ValueError("no name with arguments")
    schema = schemas.get(name, {})
    arguments = {key.strip(): typed(value, schema, key.strip()) for key, value in _ARGUMENT.findall(mark + rest)}
    return [Call(name, dump(arguments))]


GLM = CallFormat(
    "glm",
    ("<tool_call>", "<arg_key>"),
    _read,
    open="<tool_call>",
    close="</tool_call>",
    quotes="",
    marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
