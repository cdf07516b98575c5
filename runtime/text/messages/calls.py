"""Describes as data how a family of models writes tool calls; each of the other files here describes one family."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from enginewright.runtime.text.messages.json_text import check
from enginewright.runtime.text.messages.lark import Lark
from enginewright.runtime.text.messages.source import MessageSource, Reading


class CallPiece(msgspec.Struct, frozen=True):
    """A tool call, or its start: the rest of its arguments follows as ArgumentsPiece."""

    name: str  # name of the tool
    arguments: str  # JSON of the arguments so far


class ArgumentsPiece(msgspec.Struct, frozen=True):
    """Further arguments of the latest call."""

    text: str  # continuation of their JSON


@dataclass
class CallOutcomes:
    """Numbers of tool calls by their outcome."""

    parsed: int = 0  # complete calls
    cut: int = 0  # calls that a limit or a stop string cut off
    malformed: int = 0  # calls that are text, since they cannot be parsed, or whose arguments are no JSON object

    def add(self, other: "CallOutcomes") -> None:
        """Adds the numbers of other calls."""
        self.parsed += other.parsed
        self.cut += other.cut
        self.malformed += other.malformed


Schemas = Mapping[str, Mapping[str, Any]]  # JSON schemas of the tools' arguments, by name


class FoundCalls:
    """The calls that a reader finds in a part of a message.

    In a streamed format, calls are certain once arguments of an existing tool have started, whatever follows.

    Attributes:
        is_certain: True if they are calls, so that the text is dropped with each piece of arguments. Otherwise it may
            still turn out to be text.

    Args:
        source: the text.
        schemas: schemas of the tools that may be called.
        is_streamed: whether arguments are given out while they are read.
    """

    def __init__(self, source: MessageSource, schemas: Schemas, *, is_streamed: bool) -> None:
        self._source, self.schemas, self._is_streamed = source, schemas, is_streamed
        self._pieces: list[CallPiece | ArgumentsPiece] = []  # pieces that were not taken yet
        self._begun: list[CallPiece] = []  # the latest call while it has no arguments
        self._name = ""
        self.is_certain = False

    @property
    def has_name(self) -> bool:
        """True if the name of a call was read."""
        return bool(self._name)

    @property
    def has_name_only(self) -> bool:
        """True if the latest call has no arguments yet, so that it was not given out."""
        return bool(self._begun)

    def begin(self, name: str) -> None:
        """Starts a call."""
        self._name, self._begun = name, [CallPiece(name, "")]

    def add(self, text: str) -> None:
        """Adds arguments to the call."""
        self._pieces += [*self._begun, ArgumentsPiece(text)]
        self._begun = []
        self.is_certain |= self._is_streamed and self._name in self.schemas
        if self.is_certain:
            self._source.drop()

    def take(self) -> list[CallPiece | ArgumentsPiece]:
        """Returns the pieces that were not taken yet, except for a call without arguments so far."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def end(self) -> list[CallPiece | ArgumentsPiece]:
        """Returns all that was not taken yet. Calls that were not certain are complete in one piece each."""
        pieces: list[CallPiece | ArgumentsPiece] = [*self.take(), *self._begun]
        self._begun = []
        return pieces if self.is_certain else whole_calls(pieces)


def whole_calls(pieces: Sequence[CallPiece | ArgumentsPiece]) -> list[CallPiece | ArgumentsPiece]:
    """Joins each call with the arguments that follow it."""
    whole: list[CallPiece | ArgumentsPiece] = []
    for is_call, group in groupby(pieces, lambda piece: isinstance(piece, CallPiece)):
        if is_call:
            whole += group
            continue
        text = "".join(piece.text for piece in group if isinstance(piece, ArgumentsPiece))
        last = whole.pop() if whole else None
        whole.append(CallPiece(last.name, text) if isinstance(last, CallPiece) else ArgumentsPiece(text))
    return whole


def check_calls(calls: Sequence[CallPiece | ArgumentsPiece]) -> None:
    """Raises ValueError if there are no calls, or one has arguments that are no JSON object."""
    if not calls:
        raise ValueError("no calls")
    for call in calls:
        if not isinstance(call, CallPiece) or not is_object(call.arguments):
            raise ValueError("arguments that are no object")


def is_object(arguments: str) -> bool:
    """True if arguments are a JSON object."""
    try:
        return isinstance(check(arguments), dict)
    except ValueError:
        return False


@dataclass(frozen=True)
class JsonArguments:
    """Arguments as one JSON object."""

    def rule(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        """The grammar rule of arguments with this schema."""
        return lark.json({"type": "object", "properties": {}, **schema})


@dataclass(frozen=True)
class ListedArguments:
    """Arguments one by one, in the order of their schema."""

    before_key: str  # text before a key
    before_value: str  # text between key and value
    after_value: str  # text after a value
    # makes the rule of a value and the text after it from the grammar, the value's schema, the schema that its
    # references are in, and that text; raises UsageError for a schema that the format cannot enforce
    value: Callable[[Lark, Any, Mapping[str, Any], str], str]
    between: str = ""  # text between two arguments
    key: str = r"[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # regular expression of the keys that can be written

    def rule(self, lark: Lark, schema: Mapping[str, Any]) -> str:
        """The grammar rule of arguments with this schema.

        Raises:
            UsageError: its arguments cannot be written.
        """

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
    """Text of calls around names and arguments, which grammars enforce."""

    before_name: str  # text before the name
    before_arguments: str  # text between name and arguments
    after_arguments: str  # text after the arguments
    between: str | None = "\n"  # text between two calls; None allows at most one
    first: str = ""  # text before all calls
    last: str = ""  # text after all calls
    arguments: JsonArguments | ListedArguments = JsonArguments()  # format of the arguments
    name: str = ".*"  # regular expression of the names that can be written
    # keys of name and arguments, if a call is a JSON object without marks, as an answer may be
    json_keys: tuple[str, str] | None = None


@dataclass(frozen=True)
class CallFormat:
    """Format of calls: their place in a message, and how they are read."""

    name: str  # name for --tool-call-parser
    template_marks: tuple[str, ...]  # texts that the chat templates of this family contain
    # reads the text between `open` and `close`; raises ValueError if it is no call
    read: Callable[[MessageSource, FoundCalls], Reading[None]]
    written: WrittenCalls  # text around names and arguments
    open: str = ""  # mark before calls; empty if a message that starts with `begins` consists of calls
    close: str = ""  # mark after calls; empty if they end with the next mark or the message
    begins: str = ""  # start of a message of calls, without `open`
    # True if arguments are JSON in the text of calls, so that they can be given out while they are read
    is_streamed: bool = False
    marks: tuple[str, ...] = ()  # further tokens of the format, which are part of texts although they are special
