"""Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>."""

from enginewright.runtime.text.messages.bare import bare_value, read_bare
from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, ListedArguments, WrittenCalls
from enginewright.runtime.text.messages.json_text import dump
from enginewright.runtime.text.messages.source import MessageSource, Reading

_ENDS = ("<parameter=", "</function>", "<tool_call>", "</tool_call>")  # marks that end a value anywhere
# A value ends with its parameter, the next one, the function or the call, since a model may forget to end it.
_VALUE_ENDS = tuple(f"{line}{end}" for line in ("\n", "") for end in ("</parameter>", *_ENDS))


def _read(source: MessageSource, found: FoundCalls) -> Reading[None]:
    yield from source.space()
    yield from source.expect("<function=")
    while True:
        yield from _read_function(source, found)
        yield from source.space()
        if not (yield from source.has("<function=")):
            return


def _read_function(source: MessageSource, found: FoundCalls) -> Reading[None]:
    name = (yield from source.up_to(">", "\n")).strip()
    yield from source.expect(">")
    found.begin(name)
    schema, before = found.schemas.get(name, {}), "{"
    while True:
        mark = yield from source.pass_on_until(_ignore, "<parameter=", "</function>", *source.stops)
        if mark != "<parameter=":
            break
        yield from source.has(mark)
        key = (yield from source.up_to(">", "\n")).strip()
        yield from source.expect(">")
        found.add(f"{before}{dump(key)}: ")
        before = ", "
        yield from source.has("\n")
        yield from read_bare(source, found, schema, key, *_VALUE_ENDS)
        yield from source.has("\n")
        yield from source.has("</parameter>")
    if mark not in ("</function>", "</tool_call>"):
        raise ValueError("no end of the function")
    found.add("{}" if before == "{" else "}")
    yield from source.has("</function>")


def _ignore(_: str) -> None:
    """Skips the text between parameters, which means nothing."""


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
)
