"""Messages that a parser whose time is not linear takes long for: incomplete calls, and one text many times."""

from collections.abc import Iterator

from enginewright.runtime.text.messages.calls import CallFormat, ListedArguments
from enginewright.runtime.text.messages.formats import Parser, new_parser
from enginewright.runtime.text.messages.harmony import HARMONY
from enginewright.runtime.text.messages.parser import MessageFormat, ReasoningFormat

THINK = ReasoningFormat("<think>", "</think>")
TOOLS = {"add": {"type": "object", "properties": {"city": {"type": "string"}}}}


def hostile_messages(calls: CallFormat, num_chars: int) -> Iterator[tuple[str, str]]:
    """Messages of about this length, each with a name. A marker closes them, so that their content is parsed."""
    for name, (begin, unit) in _parts(calls).items():
        yield name, f"{begin}{unit * ((num_chars - len(begin)) // len(unit))}.{calls.close}"


def _parts(calls: CallFormat) -> dict[str, tuple[str, str]]:
    """The start of each message, and the text that is repeated after it, by name."""
    written = calls.written
    open = calls.open or calls.begins
    begun = f"{written.before_name}add{written.before_arguments}"
    known, other = (written.first + written.before_name + name + written.before_arguments for name in ("add", "other"))
    if isinstance(written.arguments, ListedArguments):
        key = f"{written.arguments.before_key}city{written.arguments.before_value}"
        quote = calls.marks[0] if calls.name.endswith(("gemma", "gemma4")) else '"'
        value = key if "<" in key else key + quote
    else:
        key, value = '{"city": ', '{"city": "'
    mark = written.arguments.before_key if isinstance(written.arguments, ListedArguments) else ""
    call = f"{known}{'' if isinstance(written.arguments, ListedArguments) else '{}'}{written.after_arguments}"
    return {
        "spaces": ("", " \n"),
        "openings": ("", open or calls.marks[0]),
        "spaces after an opening": (open, " "),
        "marks": (written.first, "".join(calls.marks) or open + calls.close),
        "beginnings of calls": ("", known),
        "beginnings of calls that there are not": ("", other),
        "whole calls": ("", f"{call}{written.last}"),
        "newlines for arguments": (known, "\n"),
        "beginnings of calls in one block": (written.first, begun),
        "beginnings of keys": (known, mark or '"'),
        "keys without an end": (known, key),
        "newlines in a value": (known + value, "\n"),
        "newlines in a value of a call that there is not": (other + value, "\n"),
        "beginnings of marks in a value": (other + value, "<"),
        "quotes": (known + value, '"'),
        "backslashes": (other + value, "\\"),
        "nested lists": (other + key, "["),
        "openings in the reasoning": ("<think>", f"{open or calls.marks[0]} "),
        "commas": (f"{known}{call}", ", "),
    }


def parser_for(calls: CallFormat) -> Parser:
    parser = new_parser(MessageFormat(None if calls is HARMONY else THINK, calls), TOOLS)
    assert parser is not None
    return parser


def feed(calls: CallFormat, text: str, size: int) -> None:
    """Parses a message whose text comes in pieces of this size."""
    parser = parser_for(calls)
    for start in range(0, len(text), size):
        parser.push(text[start : start + size])
        assert parser.num_held <= len(text)
    parser.end()
