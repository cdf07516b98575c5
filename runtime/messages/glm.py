"""GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, with lines until 4.6."""

import re

from enginewright.runtime.messages.bare import bare_value, typed
from enginewright.runtime.messages.calls import Call, CallFormat, ListedArguments, Schemas, WrittenCalls, dump

_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _read(text: str, schemas: Schemas) -> list[Call]:
    name, mark, rest = text.partition("<arg_key>")
    name = name.strip()
    if not name or re.search(r"\s", name) or _ARGUMENT.sub("", mark + rest).strip():
        raise ValueError("no name with arguments")
    schema = schemas.get(name, {})
    arguments = {key.strip(): typed(value, schema, key.strip()) for key, value in _ARGUMENT.findall(mark + rest)}
    return [Call(name, dump(arguments))]


def _format(name: str, template_marks: tuple[str, ...], line: str) -> CallFormat:
    """line: what stands behind a name, a key and a value."""
    values = bare_value(("</arg_value>", "<tool_call>", "</tool_call>"))
    return CallFormat(
        name,
        ("<tool_call>", *template_marks),
        _read,
        WrittenCalls(
            "<tool_call>",
            line,
            "</tool_call>",
            arguments=ListedArguments("<arg_key>", f"</arg_key>{line}<arg_value>", f"</arg_value>{line}", values),
        ),
        open="<tool_call>",
        close="</tool_call>",
        before_end="</tool_call>",
        quotes="",
        marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )


GLM47 = _format("glm47", ("</arg_key><arg_value>",), "")
GLM = _format("glm", ("<arg_key>",), "\n")
