"""How a family of models writes the calls of tools, as data; each of the other files here says it for one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class Call(msgspec.Struct, frozen=True):
    """A call of a tool."""

    name: str
    arguments: str  # JSON


Schemas = Mapping[str, Mapping[str, Any]]  # of each tool's arguments, by its name


@dataclass(frozen=True)
class WrittenCalls:
    """The text of calls whose arguments are JSON, around names and arguments: what a grammar can hold a model to."""

    before_name: str
    before_arguments: str
    after_arguments: str
    between: str = "\n"  # two calls
    first: str = ""  # before all of them
    last: str = ""  # behind all of them


@dataclass(frozen=True)
class CallFormat:
    """Where calls stand in a message, and how they are read."""

    name: str  # for --tool-call-parser
    template_marks: tuple[str, ...]  # a chat template that has all of them is of this family
    # What stands between `open` and `close`, as calls; a ValueError says that it is none.
    read: Callable[[str, Schemas], list[Call]]
    open: str = ""  # empty: a message that begins with `begins` is calls as a whole, or none
    close: str = ""  # empty: the end of the message
    begins: str = ""
    quotes: str = '"'  # characters around texts, in which `close` closes nothing
    written: WrittenCalls | None = None
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


def typed(text: str, schema: Mapping[str, Any], argument: str) -> Any:
    """An argument that is written bare: a text where its schema says so, or where it is nothing else."""
    properties = schema.get("properties")
    wanted = properties.get(argument) if isinstance(properties, Mapping) else None
    if isinstance(wanted, Mapping) and wanted.get("type") == "string":
        return text
    try:
        return load(text)
    except ValueError:
        return text
