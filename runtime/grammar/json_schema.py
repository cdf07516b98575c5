"""Adapts JSON schemas to llguidance: keywords that it cannot enforce are left out of the schema, and listed."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.grammar.schema_bounds import bounded, check_values, join_path
from enginewright.runtime.grammar.schema_overlap import Overlaps

MAX_COMPILED = 200  # maximum number of parts of a schema that are compiled to find the invalid one

FORMATS = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
DRAFTS = frozenset(
    (
        "https://json-schema.org/draft/2020-12/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "http://json-schema.org/draft-07/schema",
        "http://json-schema.org/draft-06/schema",
        "http://json-schema.org/draft-04/schema",
    )
)
# Keywords that restrict the valid values, and that llguidance does not support.
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
# Keywords that do not restrict the valid values: annotations, and anchors of references that are left out.
_SILENT = frozenset(
    (
        "$comment",
        "$dynamicAnchor",
        "$recursiveAnchor",
        "$vocabulary",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
        "default",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    )
)
# Keywords that have no effect without one of these.
_DEPENDENT = {
    "else": ("if",),
    "if": ("else", "then"),
    "maxContains": ("contains",),
    "minContains": ("contains",),
    "then": ("if",),
}
_COUNTS = ("minProperties", "maxProperties")
_ONE = ("additionalItems", "additionalProperties", "items")  # keywords whose value is a schema
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")  # keywords whose value is a list of schemas
_MAPS = ("$defs", "definitions", "patternProperties", "properties")  # keywords whose value has schemas by name
_OF_OBJECTS = ("additionalProperties", "patternProperties", "properties", "required", *_COUNTS)
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf")  # keywords of schemas for the same value
# Escapes, classes and look-arounds of a pattern. Classes are found only so that nothing in them is.
_ESCAPE = re.compile(r"\\(?P<escaped>.)|\[(?:\\.|[^\\\]])+\]|(?P<around>\(\?<?[=!])", re.DOTALL)


@dataclass(frozen=True)
class Unheld:
    """A keyword of a schema that is not enforced in answers."""

    path: str  # path in the schema, such as "properties.price.pattern"
    why: str  # reason, for users

    def __str__(self) -> str:
        return f"{self.path} cannot be held: {self.why}"


def held(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Unheld]]:
    """Copies a schema without the keywords that cannot be enforced.

    Returns:
        The copy, and the keywords that it leaves out.

    Raises:
        UsageError: the schema has integers that cannot be enforced exactly, or is nested too deeply.
    """
    holder = _Holder(schema)
    try:
        return holder.copy(schema, ""), holder.left_out
    except RecursionError as error:
        raise UsageError("a JSON schema is nested too deeply") from error


def held_whole(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a schema for llguidance. Raises UsageError if one of its keywords cannot be enforced."""
    copy, left_out = held(schema)
    if left_out:
        raise UsageError(str(left_out[0]))
    return copy


def fault(schema: Mapping[str, Any], reason: str, find_error: Callable[[dict[str, Any]], str]) -> str:
    """Finds the innermost part of a schema that cannot be compiled.

    Args:
        schema: the schema.
        reason: the reason why the schema cannot be compiled.
        find_error: takes a schema, and returns the reason why it cannot be compiled, or an empty text.

    Returns:
        The path of the part; empty for the schema itself.
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
    """Yields the paths of the schemas directly inside a schema, and these schemas."""
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


class _Holder:
    """Copies a schema, and lists the keywords that it leaves out."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.left_out = list[Unheld]()
        self._overlaps = Overlaps(root)

    def copy(self, schema: Any, where: str, *, is_merged: bool = False) -> Any:
        """Copies a schema in the schema.

        Args:
            schema: a schema, which may also be True or False.
            where: its path.
            is_merged: true if another schema applies to the same value, so that the properties of the value are not
                all known here.

        Raises:
            UsageError: the schema has integers that cannot be enforced exactly.
        """
        if not isinstance(schema, Mapping):
            return schema
        schema = _without_unevaluated(schema)
        has_others = is_merged or sum(key in _OF_OBJECTS or key in _IN_PLACE for key in schema) > 1
        is_merged = is_merged or any(key in schema for key in _IN_PLACE)
        copy = dict[str, Any]()
        for key, value in schema.items():
            if not _says_something(key, value, schema):
                continue
            path = join_path(where, key)
            why = _why_unheld(key, value, schema, is_merged=is_merged)
            if why is not None:
                self.left_out.append(Unheld(path, why))
            elif key == "oneOf" and isinstance(value, list | tuple):
                self._copy_one_of(copy, value, schema, path, is_merged=has_others)
            elif key in _MAPS and isinstance(value, Mapping):
                copy[key] = self._copy_map(key, value, path)
            elif key in _LISTS and isinstance(value, list | tuple):
                is_one = key not in _IN_PLACE or not (has_others or (key == "allOf" and len(value) > 1))
                copy[key] = [*copy.get(key, ()), *self._copy_list(value, path, is_merged=not is_one)]
            elif key in _ONE:
                copy[key] = self.copy(value, path)
            else:
                copy[key] = value
        check_values(copy, where)
        return bounded(copy, where)

    def _copy_list(self, schemas: Sequence[Any], path: str, *, is_merged: bool) -> list[Any]:
        return [self.copy(one, f"{path}[{place}]", is_merged=is_merged) for place, one in enumerate(schemas)]

    def _copy_map(self, key: str, schemas: Mapping[str, Any], path: str) -> dict[str, Any]:
        copy = dict[str, Any]()
        for name, one in schemas.items():
            why = _why_no_pattern(name) if key == "patternProperties" else None
            if why is None:
                copy[name] = self.copy(one, join_path(path, name))
            else:
                self.left_out.append(Unheld(join_path(path, name), why))
        return copy

    def _copy_one_of(
        self, copy: dict[str, Any], schemas: Sequence[Any], schema: Mapping[str, Any], path: str, *, is_merged: bool
    ) -> None:
        """Copies a oneOf as anyOf, which means the same if no value matches two of its schemas.

        Args:
            copy: the copy of `schema` so far, which gets the anyOf.
            schemas: the schemas of the oneOf.
            schema: the schema with the oneOf.
            path: path of the oneOf.
            is_merged: true if other schemas or keywords apply to the same value.
        """
        if not self._overlaps.are_apart(schemas):
            why = "a value may match two of its schemas, or too many would have to be compared; it is taken as anyOf"
            self.left_out.append(Unheld(path, why))
        any_of = self._copy_list(schemas, path, is_merged=is_merged)
        if "anyOf" in schema:
            copy["allOf"] = [*copy.get("allOf", ()), {"anyOf": any_of}]
        else:
            copy["anyOf"] = any_of


def _without_unevaluated(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replaces unevaluatedItems and unevaluatedProperties by items and additionalProperties, if they mean the same.

    They do if no other schema applies to the same value.
    """
    if any(key in schema for key in (*_IN_PLACE, "$dynamicRef", "$recursiveRef", "contains", "dependentSchemas", "if")):
        return schema
    names = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
    return {key if names.get(key, key) in schema else names[key]: value for key, value in schema.items()}


def _why_unheld(key: str, value: Any, schema: Mapping[str, Any], *, is_merged: bool) -> str | None:
    """Reason why a keyword cannot be enforced; None if it can.

    Args:
        key: the keyword.
        value: its value.
        schema: the schema with the keyword.
        is_merged: true if another schema applies to the same value.
    """
    if key in UNHELD:
        return f"no grammar is made of {key}"
    if key == "format" and isinstance(value, str) and value not in FORMATS and _may_be(schema, "string"):
        return f"the format {value[:40]!a} is not known; there are {', '.join(sorted(FORMATS - {'unknown'}))}"
    if key == "$schema" and not (isinstance(value, str) and value.rstrip("#") in DRAFTS):
        return "it is no draft of JSON Schema that is known; the schema is read as draft 2020-12"
    if key == "multipleOf" and isinstance(value, int | float) and not _is_multiple(value):
        return "it has too many digits"
    if key in _COUNTS and (is_merged or not _is_count(schema)):
        return "properties are counted only where all that are named are required"
    return _why_no_pattern(value) if key == "pattern" and isinstance(value, str) else None


def _says_something(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    """True if a keyword restricts the valid values."""
    if key in _SILENT or (key in _DEPENDENT and not any(other in schema for other in _DEPENDENT[key])):
        return False
    if key in UNHELD and (value is (key != "uniqueItems") or value == {}):
        return key in ("contains", "if", "not")
    if key == "minProperties" and isinstance(value, int | float):
        return value > len(_names(schema, "required"))
    if key == "maxProperties" and isinstance(value, int | float) and _is_closed(schema):
        return value < len(_names(schema, "properties") | _names(schema, "required"))
    return True


def _names(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Names of the properties in the value of `properties` or `required`."""
    given = schema.get(key)
    names = given if isinstance(given, Mapping | list | tuple) else ()
    return frozenset(name for name in names if isinstance(name, str))


def _is_closed(schema: Mapping[str, Any]) -> bool:
    """True if a schema allows no properties other than the named ones."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def _is_count(schema: Mapping[str, Any]) -> bool:
    """True if llguidance can enforce the number of properties.

    It can if all named properties are required, or if at most one more property may or must follow the required ones.
    """
    required = _names(schema, "required")
    if _names(schema, "properties") <= required:
        return True
    counts = schema.get("minProperties", 0), schema.get("maxProperties", len(required) + 1)
    if not all(isinstance(count, int | float) for count in counts):
        return True  # llguidance reports the error
    return _is_closed(schema) and counts[0] <= len(required) + 1 == counts[1]


def _is_multiple(value: float) -> bool:
    """True if llguidance can read this multipleOf: it shifts out the decimals in the same way, and has 32 bits."""
    while value % 1 and abs(value) < 2**32:
        value *= 10.0
    return abs(value) < 2**32


def _why_no_pattern(pattern: str) -> str | None:
    """Reason why a pattern cannot be an automaton; None if no such reason is known."""
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
