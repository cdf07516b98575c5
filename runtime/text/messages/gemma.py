"""Gemma 4 and FunctionGemma: <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, with marks of their own around texts.

Lists and objects are as in JSON, except for bare keys; `format_argument` of Gemma 4's chat template writes them
(https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4).
"""

from collections.abc import Callable, Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.bare import texts
from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, ListedArguments, WrittenCalls
from enginewright.runtime.text.messages.json_text import check, dump, escaped, read_text
from enginewright.runtime.text.messages.lark import Lark, parts
from enginewright.runtime.text.messages.source import Give, Reading, Source

_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's words and those of JSON
MAX_DEPTH = 64  # maximum nesting of lists and objects
_FREE_DEPTH = 3  # maximum nesting in grammars for values without a schema
_SCALARS = {"boolean": '("true" | "false")', "null": '"null"'}


def _reader(quote: str) -> Callable[[Source, FoundCalls], Reading[None]]:
    def read(source: Source, found: FoundCalls) -> Reading[None]:
        yield from source.space()
        yield from source.expect("call:")
        name = (yield from source.up_to("{")).strip()
        if len(name.split()) != 1:
            raise ValueError("no name")
        found.begin(name)
        yield from read_value(source, found.add, 0)

    def read_value(source: Source, give: Give, depth: int) -> Reading[None]:
        yield from source.space()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if (yield from source.has("{")):
            yield from read_entries(source, give, "{", "}", depth)
        elif (yield from source.has("[")):
            yield from read_entries(source, give, "[", "]", depth)
        elif (yield from source.has(quote)):
            yield from read_quoted(source, give)
        elif (yield from source.has('"')):
            give('"')
            if not (yield from read_text(source, give, *source.stops)):
                raise ValueError("a text without an end")
        else:
            give(_scalar((yield from source.up_to(*",]}")).strip()))

    def read_entries(source: Source, give: Give, open: str, close: str, depth: int) -> Reading[None]:
        """Reads the rest of a list or an object."""
        give(open)
        yield from source.space()
        is_first = True
        while not (yield from source.has(close)):
            if not is_first:
                yield from source.expect(",")
                give(", ")
            is_first = False
            if open == "{":
                yield from read_key(source, give)
            yield from read_value(source, give, depth + 1)
            yield from source.space()
        give(close)

    def read_key(source: Source, give: Give) -> Reading[None]:
        """Reads a key and the colon after it."""
        yield from source.space()
        if (yield from source.has(quote)):
            yield from read_quoted(source, give)
            yield from source.space()
        else:
            give(dump((yield from source.up_to(*":,{}[]")).strip().strip('"')))
        yield from source.expect(":")
        give(": ")

    def read_quoted(source: Source, give: Give) -> Reading[None]:
        """Reads the rest of a text, and the quote that ends it."""
        give('"')
        if (yield from source.give_up_to(lambda text: give(escaped(text)), quote, *source.stops)) != quote:
            raise ValueError("a text without an end")
        yield from source.has(quote)
        give('"')

    return read


def _scalar(text: str) -> str:
    """Converts a bare value to JSON; a value that is not valid JSON is a text."""
    if not text:
        raise ValueError("no value")
    try:
        check(_WORDS.get(text, text))
    except ValueError:
        return dump(text)
    return _WORDS.get(text, text)


def _rules(quote: str, without: tuple[str, ...]) -> Callable[[Lark, Any, Mapping[str, Any], str], str]:
    def value(lark: Lark, schema: Any, root: Mapping[str, Any], after: str) -> str:
        return f"({' | '.join(one(lark, branch, root, 0) for branch in parts(schema, root))}) {lark.text(after)}"

    def one(lark: Lark, branch: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UsageError("a schema of arguments is nested too deeply")
        kind = branch.get("type")
        if kind == "string":
            return f"{lark.text(quote)} {lark.free(quote, texts(branch), without)}"
        if kind == "array":
            entry = lark.rule(each(lark, branch.get("items", {}), root, depth + 1))
            low, high = branch.get("minItems", 0), branch.get("maxItems")
            more = f"({lark.text(',')} {entry}){{{max(low - 1, 0)},{'' if high is None else max(high - 1, 0)}}}"
            listed = "" if high == 0 else f"{entry} {more}" if low else f"({entry} {more})?"
            return f'"[" {listed} "]"'
        if kind == "object":
            return f'"{{" {fields(lark, branch, root, depth)} "}}"'
        if kind is not None:
            return _SCALARS[kind] if kind in _SCALARS and "enum" not in branch else lark.json(branch, root)
        anything = ["string", "number", "boolean", "null", *(("array", "object") if depth < _FREE_DEPTH else ())]
        return " | ".join(one(lark, {"type": kind}, root, depth + 1) for kind in anything)

    def each(lark: Lark, schema: Any, root: Mapping[str, Any], depth: int) -> str:
        return " | ".join(one(lark, branch, root, depth) for branch in parts(schema, root))

    def fields(lark: Lark, branch: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> str:
        def entry(key: str, schema: Any) -> str:
            return f"{lark.text(f'{key}:')} ({each(lark, schema, root, depth + 1)})"

        def free() -> str:
            return f'{lark.terminal(f"/{_KEY}/")} ":" ({each(lark, {}, root, depth + 1)})'

        return lark.properties(branch, entry, free, lark.text(","), _KEY)

    return value


def _format(name: str, open: str, close: str, quote: str) -> CallFormat:
    arguments = ListedArguments("", ":", "", _rules(quote, (open, close)), between=",", key=_KEY)
    return CallFormat(
        name,
        (open,),
        _reader(quote),
        WrittenCalls(f"{open}call:", "{", f"}}{close}", between="", arguments=arguments, name=r"[^\s{]+"),
        open=open,
        close=close,
        marks=(quote,),
    )


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
