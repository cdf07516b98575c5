"""Gemma 4 and FunctionGemma: <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, with marks of their own around texts.

Lists and objects are as in JSON, except for bare keys; `format_argument` of Gemma 4's chat template writes them
(https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.bare import texts
from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, ListedArguments, WrittenCalls
from enginewright.runtime.text.messages.json_text import check, dump, escaped, read_text
from enginewright.runtime.text.messages.lark import Lark, parts
from enginewright.runtime.text.messages.source import Give, MessageSource, Reading

_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's words and those of JSON
MAX_DEPTH = 64  # maximum nesting of lists and objects
_FREE_DEPTH = 3  # maximum nesting in grammars for values without a schema
_SCALARS = {"boolean": '("true" | "false")', "null": '"null"'}


@dataclass(frozen=True)
class _Arguments:
    """Reads the arguments of a call, and gives them as JSON."""

    quote: str  # mark around a text
    source: MessageSource  # text of the message
    give: Give  # receives the JSON

    def read_value(self, depth: int) -> Reading[None]:
        yield from self.source.space()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        for open, close in ("{}", "[]"):
            if (yield from self.source.has(open)):
                yield from self._read_entries(open, close, depth)
                return
        if (yield from self.source.has(self.quote)):
            yield from self._read_quoted()
        elif (yield from self.source.has('"')):
            self.give('"')
            if not (yield from read_text(self.source, self.give, *self.source.stops)):
                raise ValueError("a text without an end")
        else:
            self.give(_scalar((yield from self.source.up_to(*",]}")).strip()))

    def _read_entries(self, open: str, close: str, depth: int) -> Reading[None]:
        """Reads the rest of a list or an object."""
        self.give(open)
        yield from self.source.space()
        is_first = True
        while not (yield from self.source.has(close)):
            if not is_first:
                yield from self.source.expect(",")
                self.give(", ")
            is_first = False
            if open == "{":
                yield from self._read_key()
            yield from self.read_value(depth + 1)
            yield from self.source.space()
        self.give(close)

    def _read_key(self) -> Reading[None]:
        """Reads a key and the colon after it."""
        yield from self.source.space()
        if (yield from self.source.has(self.quote)):
            yield from self._read_quoted()
            yield from self.source.space()
        else:
            self.give(dump((yield from self.source.up_to(*":,{}[]")).strip().strip('"')))
        yield from self.source.expect(":")
        self.give(": ")

    def _read_quoted(self) -> Reading[None]:
        """Reads the rest of a text, and the quote that ends it."""
        self.give('"')
        end = yield from self.source.pass_on_until(
            lambda text: self.give(escaped(text)), self.quote, *self.source.stops
        )
        if end != self.quote:
            raise ValueError("a text without an end")
        yield from self.source.has(self.quote)
        self.give('"')


def _scalar(text: str) -> str:
    """Converts a bare value to JSON; a value that is not valid JSON is a text."""
    if not text:
        raise ValueError("no value")
    try:
        check(_WORDS.get(text, text))
    except ValueError:
        return dump(text)
    return _WORDS.get(text, text)


@dataclass(frozen=True)
class _Rules:
    """Writes rules for values of a schema."""

    quote: str  # mark around a text
    without: tuple[str, ...]  # marks that no text contains
    lark: Lark  # grammar that rules are added to
    root: Mapping[str, Any]  # schema that references are in

    def value(self, schema: Any, depth: int) -> str:
        return " | ".join(self._one(branch, depth) for branch in parts(schema, self.root))

    def _one(self, branch: Mapping[str, Any], depth: int) -> str:
        if depth > MAX_DEPTH:
            raise UsageError("a schema of arguments is nested too deeply")
        kind = branch.get("type")
        if kind is None:
            kinds = ["string", "number", "boolean", "null", *(("array", "object") if depth < _FREE_DEPTH else ())]
            return " | ".join(self._one({"type": kind}, depth + 1) for kind in kinds)
        if kind == "string":
            return f"{self.lark.text(self.quote)} {self.lark.free(self.quote, texts(branch), self.without)}"
        if kind == "array":
            return f'"[" {self._entries(branch, depth)} "]"'
        if kind == "object":
            return f'"{{" {self._fields(branch, depth)} "}}"'
        return _SCALARS[kind] if kind in _SCALARS and "enum" not in branch else self.lark.json(branch, self.root)

    def _entries(self, branch: Mapping[str, Any], depth: int) -> str:
        entry = self.lark.rule(self.value(branch.get("items", {}), depth + 1))
        low, high = branch.get("minItems", 0), branch.get("maxItems")
        more = f"({self.lark.text(',')} {entry}){{{max(low - 1, 0)},{'' if high is None else max(high - 1, 0)}}}"
        return "" if high == 0 else f"{entry} {more}" if low else f"({entry} {more})?"

    def _fields(self, branch: Mapping[str, Any], depth: int) -> str:
        def entry(key: str, schema: Any) -> str:
            return f"{self.lark.text(f'{key}:')} ({self.value(schema, depth + 1)})"

        def free() -> str:
            return f'{self.lark.terminal(f"/{_KEY}/")} ":" ({self.value({}, depth + 1)})'

        return self.lark.properties(branch, entry, free, self.lark.text(","), _KEY)


def _format(name: str, open: str, close: str, quote: str) -> CallFormat:
    def read(source: MessageSource, found: FoundCalls) -> Reading[None]:
        yield from source.space()
        yield from source.expect("call:")
        name = (yield from source.up_to("{")).strip()
        if len(name.split()) != 1:
            raise ValueError("no name")
        found.begin(name)
        yield from _Arguments(quote, source, found.add).read_value(0)

    def rules(lark: Lark, schema: Any, root: Mapping[str, Any], after: str) -> str:
        return f"({_Rules(quote, (open, close), lark, root).value(schema, 0)}) {lark.text(after)}"

    arguments = ListedArguments("", ":", "", rules, between=",", key=_KEY)
    return CallFormat(
        name,
        (open,),
        read,
        WrittenCalls(f"{open}call:", "{", f"}}{close}", between="", arguments=arguments, name=r"[^\s{]+"),
        open=open,
        close=close,
        marks=(quote,),
    )


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
