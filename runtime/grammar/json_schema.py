"""JSON schemas as llguidance can hold a model to them: keywords that it does not have are left out and named."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.schema_bounds import bounded, check_values, join_path

MAX_COMPILED = 200  # parts of a schema that are compiled to find the one that is wrong

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
# Keywords that say what is valid, and that llguidance does not have.
UNHELD = frozenset(
    (
        "$dynamicRef",
        "$recursiveRef",
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    )
)
_ONE = ("additionalItems", "additionalProperties", "items")  # keywords of a schema
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")  # of a list of them
_MAPS = ("$defs", "definitions", "patternProperties", "properties")  # of schemas by name
# Parts of an expression that are no regular language's, or that the regex crate does not have.
_ESCAPE = re.compile(r"\\(?P<escaped>.)|\[(?:\\.|[^\\\]])+\]|(?P<around>\(\?<?[=!])", re.DOTALL)


@dataclass(frozen=True)
class Unheld:
    """A keyword of a schema that no answer is held to."""

    path: str  # in the schema, "properties.price.pattern"
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be held: {self.why}"


def held(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unheld]]:
    """A copy of a schema without the keywords that cannot be held, and those.

    Raises:
        UsageError: it is about integers that cannot be held exactly, or nested too deeply.
    """
    left_out = list[Unheld]()
    try:
        return _held(schema, "", left_out), left_out
    except RecursionError as error:
        raise UsageError("a JSON schema is nested too deeply") from error


def held_whole(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a schema for llguidance. Raises UsageError where a keyword of it cannot be held."""
    copy, left_out = held(schema)
    if left_out:
        raise UsageError(str(left_out[0]))
    return copy


def fault(schema: Mapping[str, Any], reason: str, find_error: Callable[[dict[str, Any]], str]) -> str:
    """The path of the innermost part of a schema that cannot be compiled.

    Args:
        reason: the reason why the schema cannot be compiled.
        find_error: takes a schema; the reason why it cannot be compiled, or an empty text.
    """
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, inner, num_left = "", schema, MAX_COMPILED
    while True:
        for where, part in list(_parts(inner, path))[:num_left]:
            num_left -= 1
            if find_error({**shared, **part}) == reason:
                path, inner = where, part
                break
        else:
            return path


def _parts(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas in a schema, and their paths."""
    for key, value in schema.items():
        path = join_path(where, key)
        found: Iterable[tuple[str, Any]] = ()
        if key in _MAPS and isinstance(value, Mapping):
            found = ((join_path(path, name), one) for name, one in value.items())
        elif key in _LISTS and isinstance(value, list | tuple):
            found = ((f"{path}[{place}]", one) for place, one in enumerate(value))
        elif key in _ONE:
            found = [(path, value)]
        yield from ((path, one) for path, one in found if isinstance(one, Mapping))


def _held(schema: Any, where: str, left_out: list[Unheld]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    copy = dict[str, Any]()
    for key, value in schema.items():
        path = join_path(where, key)
        why = _why_unheld(key, value, schema)
        if why is not None:
            left_out.append(Unheld(path, why))
        elif key in _MAPS and isinstance(value, Mapping):
            copy[key] = {name: _held(one, join_path(path, name), left_out) for name, one in value.items()}
        elif key in _LISTS and isinstance(value, list | tuple):
            copy[key] = [_held(one, f"{path}[{place}]", left_out) for place, one in enumerate(value)]
        elif key in _ONE:
            copy[key] = _held(value, path, left_out)
        elif key not in UNHELD:  # one that is left says nothing, such as uniqueItems: false
            copy[key] = value
    check_values(copy, where)
    return bounded(copy, where)


def _why_unheld(key: str, value: Any, schema: Mapping[str, Any]) -> str | None:
    """The reason why a keyword cannot be held; None: it can, or changes nothing."""
    if key == "uniqueItems" and value is False:
        return None
    if key in UNHELD:
        return f"no grammar is made of {key}"
    if key == "format" and isinstance(value, str) and value not in FORMATS and _may_be(schema, "string"):
        return f"the format {value[:40]!a} is not known; there are {', '.join(sorted(FORMATS - {'unknown'}))}"
    return _why_no_pattern(value) if key == "pattern" and isinstance(value, str) else None


def _why_no_pattern(pattern: str) -> str | None:
    """The reason why no automaton matches a pattern; None: none is known."""
    for found in _ESCAPE.finditer(pattern):
        if found["around"]:
            return "it has a look-around"
        if found["escaped"] in set("bB"):
            return "it has a word boundary"
        if found["escaped"] in set("123456789k"):
            return "it has a backreference"
    return None


def _may_be(schema: Mapping[str, Any], type: str) -> bool:
    types = schema.get("type", type)
    return type in types if isinstance(types, str | list | tuple) else True
