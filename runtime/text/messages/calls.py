"""How a family of models writes the calls of tools, as data; each of the other files here says it for one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from enginewright.runtime.text.messages.json_text import check
from enginewright.runtime.text.messages.lark import Lark
from enginewright.runtime.text.messages.source import Reading, Source


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, or its beginning: what follows of its arguments comes as Arguments."""

    name: str
    arguments: str  # JSON


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments of the latest call."""

    text: str


Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by its name


class FoundCalls:
    """The calls that a reader finds in a part of a message.

    Where it is streamed, calls are certain once arguments of a tool that there is have begun, whatever follows.

    is_certain: they are calls, and what is read is forgotten with each piece of arguments; else it may still be text.
    """

    def __init__(self, source: Source, schemas: Schemas, *, is_streamed: bool) -> None:
        self._source, self.schemas, self._is_streamed = source, schemas, is_streamed
        self._pieces: list[Call | Arguments] = []  # that were not taken yet
        self._begun: list[Call] = []  # the latest call, if it has no arguments yet
        self._name = ""
        self.is_certain = False

    def begin(self, name: str) -> None:
        """A call begins."""
        self._name, self._begun = name, [Call(name, "")]

    def add(self, text: str) -> None:
        """More of its arguments."""
        self._pieces += [*self._begun, Arguments(text)]
        self._begun = []
        self.is_certain |= self._is_streamed and self._name in self.schemas
        if self.is_certain:
            self._source.drop()

    def take(self) -> list[Call | Arguments]:
        """The pieces that were not taken yet, without a call that has no arguments yet."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> list[Call | Arguments]:
        """All that was not taken yet, with a call without arguments; where it was not certain, calls are whole."""
        pieces: list[Call | Arguments] = [*self.take(), *self._begun]
        self._begun = []
        return pieces if self.is_certain else whole_calls(pieces)


def whole_calls(pieces: Sequence[Call | Arguments]) -> list[Call | Arguments]:
    """Each call with the arguments that follow it."""
    whole: list[Call | Arguments] = []
    for is_call, group in groupby(pieces, lambda piece: isinstance(piece, Call)):
        if is_call:
            whole += group
            continue
        text = "".join(piece.text for piece in group if isinstance(piece, Arguments))
        last = whole.pop() if whole else None
        whole.append(Call(last.name, text) if isinstance(last, Call) else Arguments(text))
    return whole


def check_calls(calls: Sequence[Call | Arguments]) -> None:
    """Raises ValueError where there are none, or where one has arguments that are no JSON object."""
    if not calls:
        raise ValueError("no calls")
    for call in calls:
        if not isinstance(call, Call) or not isinstance(check(call.arguments), dict):
            raise ValueError("arguments that are no object")


@dataclass(frozen=True)
class JsonArguments:
    """Arguments as one object of JSON."""

    def rule(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        return lark.json({"type": "object", "properties": {}, **schema})


@dataclass(frozen=True)
class ListedArguments:
    """Arguments one by one, in the order of their schema."""

    before_key: str
    before_value: str
    after_value: str
    # The rule of a value and of what stands behind it: of the grammar, the value's schema, the schema that the
    # value's refers to, and the text behind it. Raises UsageError for a schema that the form cannot hold.
    value: Callable[[Lark, Any, Mapping[str, Any], str], str]
    between: str = ""
    key: str = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # regular expression of the keys that can be written

    def rule(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        """Raises UsageError for a schema whose arguments cannot be written."""

        def entry(key: str, value: Any) -> str:
            written = f"{lark.text(self.before_key + key + self.before_value)}"
            return f"{written} {self.value(lark, value, schema, self.after_value)}"

        def free() -> str:
            key = lark.terminal(f"/{self.key}/")
            value = self.value(lark, {}, schema, self.after_value)
            return f"{lark.text(self.before_key)} {key} {lark.text(self.before_value)} {value}"

        return lark.properties(schema, entry, free, lark.text(self.between), self.key)


@dataclass(frozen=True)
class WrittenCalls:
    """The text of calls around names and arguments: what a grammar can hold a model to."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str | None = "\n"  # two calls; None: there is one at most
    first: str = ""  # before all of them
    last: str = ""  # behind all of them
    arguments: JsonArguments | ListedArguments = JsonArguments()
    name: str = ".*"  # regular expression of the names that can be written
    # Keys of the name and of the arguments, where a call is an object of JSON without marks, as an answer may be.
    json_keys: tuple[str, str] | None = None


@dataclass(frozen=True)
class CallFormat:
    """Where calls stand in a message, and how they are read."""

    name: str  # for --tool-call-parser
    template_marks: tuple[str, ...]  # a chat template that has all of them is of this family
    # Reads what stands between `open` and `close`. Raises ValueError for what is no call.
    read: Callable[[Source, FoundCalls], Reading[None]]
    written: WrittenCalls
    open: str = ""  # empty: a message that begins with `begins` is calls as a whole, or none
    close: str = ""  # empty: nothing stands after calls, which end with the message if there is no `open`
    begins: str = ""
    is_streamed: bool = False  # arguments are JSON in the text of calls: they are given as they come
    marks: tuple[str, ...] = ()  # other tokens of its own, that are shown although they are special
