"""Gemma 4 and FunctionGemma: <|tool_call>call:NAME{KEY:VALUE,…}<tool_call|>, with marks of their own around texts.

Lists and objects are as in JSON, but for keys, which are bare; `format_argument` of Gemma 4's chat template writes them
(https://ai.google.dev/gemma/docs/capabilities/text/function-calling-gemma4).
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.messages.bare import texts
from enginewright.runtime.messages.calls import Call, CallFormat, ListedArguments, Schemas, WrittenCalls, dump
from enginewright.runtime.messages.lark import Lark, parts

_HEAD = re.compile(r"\s*call:\s*([^\s{]+)\s*(?=\{)")
_KEY = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"
_BARE = re.compile(r"[^,\]}]*")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
MAX_DEPTH = 64  # of lists and objects in one another
_FREE_DEPTH = 3  # of those that no schema describes, in what a grammar allows
_SCALARS = {"boolean": '("true" | "false")', "null": '"null"'}


class _Values:
    """Reads values one behind the other. Raises ValueError for what is none."""

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._place = text, quote, 0

    def arguments(self) -> dict[str, Any]:
        """The object that the text is."""
        value = self._value(0)
        self._space()
        if not isinstance(value, dict) or self._place < len(self._text):
            raise ValueError("no object, or more than one")
        return value

    def _value(self, depth: int) -> Any:
        self._space()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._has(self._quote):
            return self._up_to(self._quote)
        if self._has("{"):
            found: dict[str, Any] = {}
            while not self._ends("}", found):
                key = self._key()
                found[key] = self._value(depth + 1)
            return found
        if self._has("["):
            entries: list[Any] = []
            while not self._ends("]", entries):
                entries.append(self._value(depth + 1))
            return entries
        return self._scalar()

    def _key(self) -> str:
        """With the colon behind it."""
        quoted = self._up_to(self._quote) if self._has(self._quote) else None
        bare = self._up_to(":").strip()
        if quoted is not None and bare:
            raise ValueError("no colon behind a key")
        return bare.strip('"') if quoted is None else quoted

    def _ends(self, close: str, found: dict[str, Any] | list[Any]) -> bool:
        """Whether a list or an object ends here; else what it holds next begins."""
        self._space()
        if self._has(close):
            return True
        if found and not self._has(","):
            raise ValueError("no comma")
        self._space()
        return False

    def _scalar(self) -> Any:
        if self._text.startswith('"', self._place):
            value, self._place = json.JSONDecoder().raw_decode(self._text, self._place)
            return value
        found = _BARE.match(self._text, self._place)
        text = found[0].strip() if found else ""
        self._place += len(found[0]) if found else 0
        if not text:
            raise ValueError("no value")
        if text in _WORDS:
            return _WORDS[text]
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _space(self) -> None:
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1

    def _has(self, mark: str) -> bool:
        """Whether this comes next; it is taken then."""
        found = self._text.startswith(mark, self._place)
        self._place += len(mark) if found else 0
        return found

    def _up_to(self, mark: str) -> str:
        """What comes before this, which is taken, too."""
        end = self._text.find(mark, self._place)
        if end < 0:
            raise ValueError(f"no {mark}")
        text, self._place = self._text[self._place : end], end + len(mark)
        return text


def _reader(quote: str) -> Callable[[str, Schemas], list[Call]]:
    def read(text: str, schemas: Schemas) -> list[Call]:
        head = _HEAD.match(text)
        if head is None:
            raise ValueError("no name")
        return [Call(head[1], dump(_Values(text[head.end() :], quote).arguments()))]

    return read


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
            least, most = branch.get("minItems", 0), branch.get("maxItems")
            more = f"({lark.text(',')} {entry}){{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
            listed = "" if most == 0 else f"{entry} {more}" if least else f"({entry} {more})?"
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
        quotes="",
        marks=(quote,),
    )


GEMMA4 = _format("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("function_gemma", "<start_function_call>", "<end_function_call>", "<escape>")
