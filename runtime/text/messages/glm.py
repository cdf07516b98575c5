"""GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>, with line breaks up to 4.6."""

from enginewright.runtime.text.messages.bare import bare_value, read_bare
from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, ListedArguments, WrittenCalls
from enginewright.runtime.text.messages.json_text import dump
from enginewright.runtime.text.messages.source import MessageSource, Reading

_KEY, _CLOSE = "<arg_key>", "</tool_call>"


def _read(source: MessageSource, found: FoundCalls) -> Reading[None]:
    name = (yield from source.up_to(_KEY, _CLOSE)).strip()
    if len(name.split()) != 1:
        raise ValueError("no name")
    found.begin(name)
    schema, before = found.schemas.get(name, {}), "{"
    while (yield from source.has(_KEY)):
        key = (yield from source.up_to("</arg_key>")).strip()
        yield from source.expect("</arg_key>")
        yield from source.space()
        yield from source.expect("<arg_value>")
        found.add(f"{before}{dump(key)}: ")
        before = ", "
        yield from read_bare(source, found, schema, key, "</arg_value>")
        yield from source.expect("</arg_value>")
        yield from source.space()
    if not (yield from source.starts_with(_CLOSE)):
        raise ValueError("no end")
    found.add("{}" if before == "{" else "}")


def _format(name: str, template_marks: tuple[str, ...], line: str) -> CallFormat:
    """Creates a format; `line` follows a name, a key and a value."""
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
        marks=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    )


GLM47 = _format("glm47", ("</arg_key><arg_value>",), "")
GLM = _format("glm", ("<arg_key>",), "\n")
