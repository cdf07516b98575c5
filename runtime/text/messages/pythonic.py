"""Llama 4 and LFM2: a list of calls in Python, [f(a=1), g(b="x")]."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, ListedArguments, WrittenCalls
from enginewright.runtime.text.messages.json_text import check, dump, escaped
from enginewright.runtime.text.messages.lark import Lark, parts
from enginewright.runtime.text.messages.source import Give, MessageSource, Reading

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPES |= {char: char for char in "\\'\""}
_CODES = {"x": 2, "u": 4, "U": 8}  # number of hexadecimal digits after each letter
_OCTAL = tuple("01234567")
_NUMBER = re.compile(r"[+-]?[0-9.]")
_QUOTES = ("'" * 3, '"' * 3, "'", '"')
MAX_DEPTH = 64  # maximum nesting of lists and dicts


def _read(source: MessageSource, found: FoundCalls) -> Reading[None]:
    yield from source.space()
    is_list = yield from source.has("[")
    while True:
        yield from source.space()
        yield from _read_call(source, found)
        yield from source.space()
        if not is_list or not (yield from source.has(",")):
            break
        yield from source.space()
        if (yield from source.starts_with("]")):
            break
    if is_list:
        yield from source.expect("]")


def _read_call(source: MessageSource, found: FoundCalls) -> Reading[None]:
    name = (yield from source.up_to(*"([]{}=,'\"")).strip()
    if not all(part.isidentifier() for part in name.split(".")):
        raise ValueError("no name")
    yield from source.expect("(")
    found.begin(name)

    def read_argument() -> Reading[None]:
        key = (yield from source.up_to(*"=()[]{},'\"")).strip()
        if not key.isidentifier():
            raise ValueError("an argument without a name")
        yield from source.expect("=")
        found.add(f"{dump(key)}: ")
        yield from _read_value(source, found.add, 0)

    found.add("{")
    yield from _read_entries(source, found.add, ")", read_argument)
    found.add("}")


def _read_entries(source: MessageSource, give: Give, close: str, read: Callable[[], Reading[None]]) -> Reading[int]:
    """Reads entries with commas between, and the text that closes them. Returns the number of commas."""
    num_commas = 0
    yield from source.space()
    while not (yield from source.has(close)):
        if num_commas:
            give(", ")
        yield from read()
        yield from source.space()
        if (yield from source.has(",")):
            num_commas += 1
            yield from source.space()
        else:
            yield from source.expect(close)
            break
    return num_commas


def _read_value(source: MessageSource, give: Give, depth: int) -> Reading[None]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    yield from source.space()

    read_item = partial(_read_value, source, give, depth + 1)

    def read_pair() -> Reading[None]:
        yield from source.space()
        if (yield from source.starts_with(*_QUOTES)):
            yield from _read_text(source, give)
            yield from source.space()
        else:
            key = (yield from source.up_to(*":,()[]{}'\"")).strip()
            _scalar(key)
            give(dump(key))
        yield from source.expect(":")
        give(": ")
        yield from read_item()

    if (yield from source.starts_with(*_QUOTES)):
        yield from _read_text(source, give)
    elif (yield from source.has("[")):
        give("[")
        yield from _read_entries(source, give, "]", read_item)
        give("]")
    elif (yield from source.has("{")):
        give("{")
        yield from _read_entries(source, give, "}", read_pair)
        give("}")
    elif (yield from source.has("(")):
        parts: list[str] = []
        item = partial(_read_value, source, parts.append, depth + 1)
        num_commas = yield from _read_entries(source, parts.append, ")", item)
        give("".join(parts) if parts and not num_commas else f"[{''.join(parts)}]")
    else:
        give(_scalar((yield from source.up_to(*",()[]{}:='\"")).strip()))


def _read_text(source: MessageSource, give: Give) -> Reading[None]:
    """Reads adjacent texts, which form one."""
    give('"')
    while quote := (yield from _read_quote(source)):
        while (yield from source.pass_on_until(lambda text: give(escaped(text)), quote, "\\")) == "\\":
            yield from source.has("\\")
            give(escaped((yield from _read_escape(source))))
        yield from source.expect(quote)
        yield from source.space()
    give('"')


def _read_quote(source: MessageSource) -> Reading[str]:
    """Reads a quote, and returns it, or "" if none follows."""
    for quote in _QUOTES:
        if (yield from source.has(quote)):
            return quote
    return ""


def _read_escape(source: MessageSource) -> Reading[str]:
    """Reads an escape after its backslash, and returns its meaning."""
    char = yield from source.take(1)
    if char in _CODES:
        meaning = chr(int((yield from source.take(_CODES[char])), 16))
    elif char in _OCTAL:
        while len(char) < 3 and (yield from source.starts_with(*_OCTAL)):
            char += yield from source.take(1)
        meaning = chr(int(char, 8))
    else:
        meaning = _ESCAPES.get(char, f"\\{char}")
    if source.met_end:
        raise ValueError("a text without an end")
    return meaning


def _scalar(text: str) -> str:
    """Converts a number or a constant to JSON. Raises ValueError for other text."""
    if text in _WORDS:
        return _WORDS[text]
    if not _NUMBER.match(text):
        raise ValueError("an argument that JSON does not have")
    try:
        check(text)
        return text
    except ValueError:
        return dump(float(text) if "." in text else int(text, 0))


def _rule(lark: Lark, schema: Any, root: Mapping[str, Any], after: str) -> str:
    """The rule of a value. Texts are those of JSON without \\u, since Python would read a pair as two characters."""
    words = {"boolean": '("True" | "False")', "null": '"None"'}
    rules = []
    for one in parts(schema, root):
        word = words.get(one.get("type", "")) if "enum" not in one or one["type"] == "null" else None
        rules.append(word or lark.json(one, root, json_allowed_escapes='nrbtf\\"'))
    return f"({' | '.join(rules)}) {lark.text(after)}"


def _written(first: str, last: str) -> WrittenCalls:
    arguments = ListedArguments("", "=", "", _rule, between=", ", key="[A-Za-z_][A-Za-z0-9_]{0,63}")
    name = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
    return WrittenCalls("", "(", ")", between=", ", first=first, last=last, arguments=arguments, name=name)


PYTHONIC = CallFormat("pythonic", ("[func_name1(",), _read, _written("[", "]"), begins="[")
LFM2 = CallFormat(
    "lfm2",
    ("<|tool_list_start|>",),
    _read,
    _written("<|tool_call_start|>[", "]<|tool_call_end|>"),
    open="<|tool_call_start|>",
    close="<|tool_call_end|>",
)
