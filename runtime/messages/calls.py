"""How a family of models writes the calls of tools, as data; each of the other files here says it for one."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from enginewright.runtime.messages.lark import Lark


class Call(msgspec.Struct, frozen=True):
    """A call of a tool, or its beginning: what follows of its arguments comes as Arguments."""

    name: str
    arguments: str  # JSON


class Arguments(msgspec.Struct, frozen=True):
    """More of the arguments of the latest call."""

    text: str


Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by its name


@dataclass(frozen=True)
class StreamedCalls:
    """Where arguments are JSON in the text of calls: they can be given while they come."""

    # What stands before arguments, from the opening mark or from the arguments of the call before up to a brace, in
    # MAX_HEAD_CHARS at most. Group 1 is the name.
    head: re.Pattern[str]
    rest: re.Pattern[str]  # what may stand behind the last arguments


MAX_HEAD_CHARS = 256
# Of calls as json_call has them: each in an object, and what else that object may have is left out.
JSON_STREAMED = StreamedCalls(
    re.compile(
        r'(?:\s*+(?:,[^{}]*+)?+\})?[\s,;\[]*+\{\s*+"name"\s*+:\s*+"([^"\\]++)"\s*+,\s*+'
        r'"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
    ),
    re.compile(r"\s*(?:(?:,[^{}]*)?\}[\s,;]*\]?)?\s*"),
)


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


@dataclass(frozen=True)
class CallFormat:
    """Where calls stand in a message, and how they are read."""

    name: str  # for --tool-call-parser
    template_marks: tuple[str, ...]  # a chat template that has all of them is of this family
    # What stands between `open` and `close`, as calls; a ValueError says that it is none.
    read: Callable[[str, Schemas], list[Call]]
    written: WrittenCalls
    open: str = ""  # empty: a message that begins with `begins` is calls as a whole, or none
    close: str = ""  # empty: the end of the message
    before_end: str = ""  # what a call has to end with where the message ends without `close`: else it was cut off
    begins: str = ""
    quotes: str = '"'  # characters around texts, in which `close` closes nothing
    streamed: StreamedCalls | None = None  # None: a call comes whole, when it has ended
    marks: tuple[str, ...] = ()  # other tokens of its own, that are shown although they are special


def json_call(value: Any) -> Call:
    """A call as an object of JSON: its name, and "arguments" or "parameters"."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("no object with a name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON
        arguments = load(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    return Call(value["name"], dump(arguments))


def json_calls(text: str, schemas: Schemas) -> list[Call]:
    """One such object, or a list of them."""
    value = load(text)
    return [json_call(one) for one in (value if isinstance(value, list) else [value])]


def load(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def dump(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False)
