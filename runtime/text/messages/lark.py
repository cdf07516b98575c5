"""Grammars in llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md), put together."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.schemas import branches

ANY = "/(?s:.*)/"  # any text
TOOL = " // tool "  # before the name of a rule's tool, in a comment
MAX_RULES = 10_000
MAX_LISTED = 16  # arguments that no schema names
# Between the parts of JSON: a space, as in what models are shown, or nothing.
_SEPARATED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Lark:
    """Rules of a grammar, each named by its number.

    Args:
        special_tokens: ids of the marks that are special tokens, which no text of a grammar matches.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self.tool = ""  # the one that rules are added for; errors name it
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Adds one; its name. Raises UsageError where there are too many."""
        if len(self._rules) == MAX_RULES:
            raise UsageError("the schemas of the tools are too large, or refer to themselves")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}{f'{TOOL}{self.tool}' if self.tool else ''}")
        return name

    def terminal(self, body: str) -> str:
        """Adds one, which is a regular expression; its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def source(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._rules))

    def text(self, text: str) -> str:
        """Just this; its marks may be special tokens."""
        return " ".join(self._terms(text)) or '""'

    def _terms(self, text: str) -> Iterator[str]:
        for piece in self._pieces(text):
            is_mark = piece in self._special_tokens
            yield f"<[{self._special_tokens[piece]}]>" if is_mark else json.dumps(piece, ensure_ascii=False)

    def _pieces(self, text: str) -> list[str]:
        """Special tokens, and what stands between them."""
        marks = "|".join(map(re.escape, self._special_tokens))
        return list(filter(None, re.split(f"({marks})", text) if marks else [text]))

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, **guidance: Any) -> str:
        """JSON that follows a schema.

        Args:
            root: the schema that references are of, where it is another one.
            guidance: options of llguidance's (its docs/json_schema.md).

        Raises:
            UsageError: it is nested too deeply.
        """
        whole = {**schema, "x-guidance": _SEPARATED | guidance}
        try:
            if root is not None and "$ref" in json.dumps(schema):
                whole |= {name: root[name] for name in ("$defs", "definitions") if name in root}
            return f"%json {json.dumps(whole)}"
        except RecursionError as error:
            raise UsageError("a schema of arguments is nested too deeply") from error

    def free(self, until: str, content: str = ANY, without: Sequence[str] = ()) -> str:
        """A text up to what ends it, and that.

        Args:
            content: expression of the texts that it may be.
            without: what it must not hold.
        """
        first, *others = self._pieces(until)
        if first in self._special_tokens:
            return f"{self.terminal(_without(content, (*without, first)))} {self.text(until)}"
        ended = self.rule(f"{self.terminal(_without(content, without))} {self.text(first)}", "[lazy]")
        return " ".join((ended, *(self.text(other) for other in others)))

    def rest(self, without: Sequence[str]) -> str:
        """Any text, which holds none of these."""
        return self.terminal(_without(ANY, without))

    def properties(
        self,
        schema: Mapping[str, Any],
        entry: Callable[[str, Any], str],
        free: Callable[[], str],
        between: str,
        key: str,
    ) -> str:
        """Properties of an object in the order of its schema, those that it wants and any of the others. Without a
        schema there may be any.

        Args:
            entry: the rule of a property, of its name and its schema.
            free: the rule of a property of any name.
            between: the rule of what stands between two.
            key: regular expression of the names that can be written.

        Raises:
            UsageError: the schema is none of such an object.
        """
        objects = parts(schema, schema)
        if len(objects) != 1 or objects[0].get("type", "object") != "object":
            raise UsageError("a schema of arguments cannot be held", "the form of this model's calls wants one object")
        schema = objects[0]
        given = schema.get("properties") or {}
        wanted = schema.get("required") or ()
        if not isinstance(given, Mapping) or not isinstance(wanted, list | tuple):
            raise UsageError("a schema of arguments is none", "properties must be an object, and required a list")
        if not given and not wanted:
            one = self.rule(free()) if schema.get("additionalProperties") is not False else ""
            return f"({one} ({between} {one}){{0,{MAX_LISTED - 1}}})?" if one else '""'
        first, more = "", ""  # rules of the properties from one on, where none comes before it, or one does
        for name, value in reversed([*given.items(), *((name, {}) for name in wanted if name not in given)]):
            if not isinstance(name, str) or not re.fullmatch(key, name):
                raise UsageError(f"the argument {str(name)[:60]!r} cannot be written in the form of this model's calls")
            one = self.rule(entry(name, value))
            alone = f"{one} {more}"
            if name in wanted:
                first, more = self.rule(alone), self.rule(f"{between} {one} {more}")
            else:
                first = self.rule(f"{alone} | {first}" if first else f"({alone})?")
                more = self.rule(f"({between} {one})? {more}")
        return first


def parts(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a value may be, as `branches` has it. Raises UsageError."""
    try:
        return branches(schema, root)
    except ValueError as error:
        raise UsageError("a schema cannot be held in the form of this model's calls", str(error)) from error


def _without(content: str, texts: Sequence[str]) -> str:
    if not texts:
        return content
    held = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return f"({content}) & ~/(?s:.*)({held})(?s:.*)/ & {ANY}"
