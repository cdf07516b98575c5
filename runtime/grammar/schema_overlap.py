"""Proves, where possible, that no value matches two of a list of JSON schemas, so that oneOf means the same as anyOf.

llguidance proves this only for a `oneOf` without references, and refuses all others.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import inf
from typing import Any
from urllib.parse import unquote

MAX_COMPARISONS = 2000  # maximum number of comparisons for one outermost schema
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_NUMBERS = frozenset(("integer", "number"))

# A list of schemas that all apply to a value. A value matches a schema if it matches one of the schema's alternatives.
Alternative = tuple[Mapping[str, Any], ...]


class Overlaps:
    """Compares the schemas inside a schema.

    Args:
        root: the outermost schema, in which references are resolved.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self.num_compared = root, 0

    def are_apart(self, schemas: Sequence[Any]) -> bool:
        """True if it is proved that no value matches two of these schemas."""
        try:
            every = [self._alternatives(schema) for schema in schemas]
            return self._have_tags(every) or all(self._apart(one, other) for one, other in combinations(every, 2))
        except (_TooManyError, RecursionError):  # RecursionError: circular references
            return False

    def _alternatives(self, schema: Any) -> list[Alternative]:
        self._count()
        if schema is False:
            return []
        if not isinstance(schema, Mapping):
            return [()]
        found: list[Alternative] = [(schema,)]
        parts = list[list[Alternative]]()
        if "$ref" in schema:
            parts.append(self._alternatives(self._target(schema["$ref"])))
        for key in ("anyOf", "oneOf"):
            if isinstance(given := schema.get(key), list | tuple):
                parts.append([alternative for one in given for alternative in self._alternatives(one)])
        if isinstance(given := schema.get("allOf"), list | tuple):
            parts += map(self._alternatives, given)
        for part in parts:
            self._count(len(found) * len(part))
            found = [(*one, *other) for one, other in product(found, part)]
        return found

    def _target(self, reference: Any) -> Any:
        """Schema that a reference names; True, which all values match, if it is not in the root."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return True
        found: Any = self._root
        for name in unquote(reference[2:]).split("/") if reference[2:] else ():
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return True if found is None else found

    def _have_tags(self, every: Sequence[Sequence[Alternative]]) -> bool:
        """True if all schemas are objects with a common property whose values tell them apart.

        This check compares no pairs, so it also succeeds for long lists.

        Args:
            every: the alternatives of each schema.
        """
        alternatives = [alternative for one in every for alternative in one]
        if not alternatives or any(_types(one) != {"object"} for one in alternatives):
            return False
        return any(self._is_tag(every, key) for key in _required(alternatives[0]))

    def _is_tag(self, every: Sequence[Sequence[Alternative]], key: str) -> bool:
        seen = set[str]()
        for alternatives in every:
            tags = set[str]()
            for one in alternatives:
                values = _values(tuple(schema for schema in _property(one, key) if isinstance(schema, Mapping)))
                required = _required(one)
                self._count_values(values, required)
                if values is None or key not in required:
                    return False
                tags.update(map(_text, values))
            if not seen.isdisjoint(tags):
                return False
            seen |= tags
        return True

    def _apart(self, one: Sequence[Alternative], other: Sequence[Alternative]) -> bool:
        return all(self._are_apart(left, right) for left, right in product(one, other))

    def _are_apart(self, one: Alternative, other: Alternative) -> bool:
        values, others = _values(one), _values(other)
        self._count_values(values, others, _required(one), _required(other))
        types = _types(one) & _types(other)
        if not types:
            return True
        if values is not None and others is not None and set(map(_text, values)).isdisjoint(map(_text, others)):
            return True
        if types <= _NUMBERS and (_maximum(one) < _minimum(other) or _maximum(other) < _minimum(one)):
            return True
        if types != {"object"}:
            return False
        for key in dict.fromkeys((*_required(one), *_required(other))):
            pairs = product(_property(one, key) or [True], _property(other, key) or [True])
            if any(self._apart(self._alternatives(left), self._alternatives(right)) for left, right in pairs):
                return True
        return False

    def _count_values(self, *lists: Sequence[Any] | None) -> None:
        """Counts one comparison, and more for long lists of values, which take more time."""
        self._count(1 + sum(len(one) for one in lists if one is not None) // 8)

    def _count(self, number: int = 1) -> None:
        self.num_compared += number
        if self.num_compared > MAX_COMPARISONS:
            raise _TooManyError


class _TooManyError(Exception):
    pass


def _types(alternative: Alternative) -> frozenset[str]:
    """Types that a value may have; a whole number counts as an integer."""
    found = _TYPES
    for schema in alternative:
        given = schema.get("type")
        if isinstance(given, str | list | tuple):
            names = {given} if isinstance(given, str) else {name for name in given if isinstance(name, str)}
            found &= names | ({"integer"} if "number" in names else set())
    values = _values(alternative)
    return found if values is None else found & set(map(_type_of, values))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list | tuple) else "object"


def _values(alternative: Alternative) -> Sequence[Any] | None:
    """Values that an alternative allows; None if it does not list them."""
    for schema in alternative:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list | tuple):
            return list(schema["enum"])
    return None


def _text(value: Any) -> str:
    """Text of a value that is the same for equal values, such as 1 and 1.0."""
    match value:
        case float() if value.is_integer():
            return str(int(value))
        case Mapping():
            return f"{{{','.join(sorted(f'{key!r}:{_text(one)}' for key, one in value.items()))}}}"
        case list() | tuple():
            return f"[{','.join(map(_text, value))}]"
    return json.dumps(value)


def _required(alternative: Alternative) -> list[str]:
    given = (schema.get("required") for schema in alternative)
    return [name for names in given if isinstance(names, list | tuple) for name in names if isinstance(name, str)]


def _property(alternative: Alternative, key: str) -> list[Any]:
    """Schemas of a property, all of which its value must match."""
    return [found for schema in alternative for found in _property_of(schema, key)]


def _property_of(schema: Mapping[str, Any], key: str) -> Iterator[Any]:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        yield properties[key]
    elif "additionalProperties" in schema and not schema.get("patternProperties"):
        yield schema["additionalProperties"]


def _minimum(alternative: Alternative) -> float:
    return max((number for number in _bounds(alternative, "minimum", "exclusiveMinimum")), default=-inf)


def _maximum(alternative: Alternative) -> float:
    return min((number for number in _bounds(alternative, "maximum", "exclusiveMaximum")), default=inf)


def _bounds(alternative: Alternative, *keys: str) -> Iterator[int | float]:
    given = (schema.get(key) for schema in alternative for key in keys)
    return (number for number in given if isinstance(number, int | float) and not isinstance(number, bool))
