"""Writes grammars in llguidance's Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.text.messages.schemas import branches

ANY = "/(?s:.*)/"  # any text
TOOL = " // tool "  # comment before the name of a rule's tool
MAX_RULES = 10_000
MAX_LISTED = 16  # maximum number of arguments in a call of a tool whose schema names none
# Separators in JSON: with a space, as in the texts that models see, or without one.
_SEPARATED = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class Lark:
    """Rules of a grammar, named by their numbers.

    Args:
        special_tokens: ids of the marks that are special tokens, which no text of a grammar matches.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self.tool = ""  # name of the tool that rules are added for; errors name it
        self._rules: list[str] = []

    def rule(self, body: str, options: str = "") -> str:
        """Adds a rule.

        Args:
            body: the right side of the rule.
            options: attributes after its name.

        Returns:
            The name of the rule.

        Raises:
            UsageError: there are too many rules.
        """
        if len(self._rules) == MAX_RULES:
            raise UsageError("the schemas of the tools are too large, or refer to themselves")
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}{f'{TOOL}{self.tool}' if self.tool else ''}")
        return name

    def terminal(self, body: str) -> str:
        """Adds a terminal with a regular expression, and returns its name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def source(self, start: str) -> str:
        """The complete grammar."""
        return "\n".join((f"start: {start}", *self._rules))

    def text(self, text: str) -> str:
        """Exactly this text; its marks may be special tokens."""
        return " ".join(self._terms(text)) or '""'

    def _terms(self, text: str) -> Iterator[str]:
        for piece in self._pieces(text):
            is_mark = piece in self._special_tokens
            yield f"<[{self._special_tokens[piece]}]>" if is_mark else json.dumps(piece, ensure_ascii=False)

    def _pieces(self, text: str) -> list[str]:
        """Special tokens, and the texts between them."""
        marks = "|".join(map(re.escape, self._special_tokens))
        return list(filter(None, re.split(f"({marks})", text) if marks else [text]))

    def json(self, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, **guidance: Any) -> str:
        """JSON that follows a schema.

        Args:
            schema: the schema.
            root: the schema that references are in, if it is another one.
            guidance: options of llguidance (its docs/json_schema.md).

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
        """A text, and the text that ends it.

        Args:
            until: the text that ends it.
            content: expression of the valid texts.
            without: texts that it must not contain.
        """
        first, *others = self._pieces(until)
        if first in self._special_tokens:
            return f"{self.terminal(_without(content, (*without, first)))} {self.text(until)}"
        ended = self.rule(f"{self.terminal(_without(content, without))} {self.text(first)}", "[lazy]")
        return " ".join((ended, *(self.text(other) for other in others)))

    def rest(self, without: Sequence[str]) -> str:
        """Any text that contains none of these."""
        return self.terminal(_without(ANY, without))

    def properties(
        self,
        schema: Mapping[str, Any],
        entry: Callable[[str, Any], str],
        free: Callable[[], str],
        between: str,
        key: str,
    ) -> str:
        """Properties of an object in the order of its schema: all required ones, and any of the others.

        Without a schema there may be any properties.

        Args:
            schema: the schema of the object.
            entry: makes the rule of a property from its name and its schema.
            free: makes the rule of a property with any name.
            between: the rule of the text between two properties.
            key: regular expression of the names that can be written.

        Returns:
            The name of the rule.

        Raises:
            UsageError: the schema does not describe such an object.
        """
        objects = parts(schema, schema)
        if len(objects) != 1 or objects[0].get("type", "object") != "object":
            raise UsageError(
                "a schema of arguments cannot be enforced", "the format of this model's calls requires one object"
            )
        schema = objects[0]
        given = schema.get("properties") or {}
        required = schema.get("required") or ()
        if not isinstance(given, Mapping) or not isinstance(required, list | tuple):
            raise UsageError("a schema of arguments is not valid", "properties must be an object, and required a list")
        if not given and not required:
            one = self.rule(free()) if schema.get("additionalProperties") is not False else ""
            return f"({one} ({between} {one}){{0,{MAX_LISTED - 1}}})?" if one else '""'
        first, more = "", ""  # rules of the properties from one on, without a property before it, and with one
        for name, value in reversed([*given.items(), *((name, {}) for name in required if name not in given)]):
            if not isinstance(name, str) or not re.fullmatch(key, name):
                raise UsageError(
                    f"the argument {str(name)[:60]!r} cannot be written in the format of this model's calls"
                )
            one = self.rule(entry(name, value))
            alone = f"{one} {more}"
            if name in required:
                first, more = self.rule(alone), self.rule(f"{between} {one} {more}")
            else:
                first = self.rule(f"{alone} | {first}" if first else f"({alone})?")
                more = self.rule(f"({between} {one})? {more}")
        return first


def parts(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Alternatives of a value, as `branches` returns them. Raises UsageError."""
    try:
        return branches(schema, root)
    except ValueError as error:
        raise UsageError("a schema cannot be enforced in the format of this model's calls", str(error)) from error


def _without(content: str, texts: Sequence[str]) -> str:
    if not texts:
        return content
    forbidden = "|".join(re.escape(text).replace("/", r"\/") for text in texts)
    return f"({content}) & ~/(?s:.*)({forbidden})(?s:.*)/ & {ANY}"
