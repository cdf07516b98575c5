"""Interprets JSON schemas, as far as needed for formats that do not write arguments as JSON."""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
MAX_STEPS = 256  # maximum number of references and alternatives that are followed
# Keywords that imply a type if none is given.
_IMPLIED_TYPES = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_APART = ("allOf", "else", "if", "not", "then")  # keywords that cannot be expressed as schemas of one type


def branches(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Splits a schema into alternatives of one type each; {} is any value. `const` becomes `enum`.

    Args:
        schema: the schema.
        root: the schema that references are in.

    Raises:
        ValueError: it has keywords that cannot be split this way, or invalid references.
    """
    found, rest = list[dict[str, Any]](), [schema]
    for _ in range(MAX_STEPS):
        if not rest:
            return found
        one = rest.pop(0)
        if not isinstance(one, Mapping):
            found.append({})
            continue
        one = dict(one)
        if "const" in one:
            one["enum"] = [one.pop("const")]
        alternatives = one.get("anyOf", one.get("oneOf"))
        if "$ref" in one:
            rest.insert(0, {**_target(one.pop("$ref"), root), **one})
        elif isinstance(alternatives, list):
            others = {key: value for key, value in one.items() if key not in ("anyOf", "oneOf")}
            rest[:0] = [{**others, **(each if isinstance(each, Mapping) else {})} for each in alternatives]
        elif isinstance(one.get("allOf"), list) and len(one["allOf"]) == 1:
            rest.insert(0, {**one["allOf"][0], **{key: value for key, value in one.items() if key != "allOf"}})
        elif any(key in one for key in _APART):
            raise ValueError(f"{next(key for key in _APART if key in one)} cannot be split into types")
        elif isinstance(one.get("type"), list):
            rest[:0] = [{**one, "type": each} for each in one["type"]]
        else:
            found += _of_type(one)
    raise ValueError("it has too many references or alternatives")


def _of_type(one: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Splits a schema without alternatives by the types of the values that it lists."""
    if "enum" not in one or not isinstance(one["enum"], list):
        meant = (type for type, keys in _IMPLIED_TYPES.items() if any(key in one for key in keys))
        type = one["type"] if one.get("type") in TYPES else next(meant, None)
        yield {} if type is None else {**one, "type": type}
        return
    for type in dict.fromkeys(map(type_of, one["enum"])):
        if one.get("type", type) in (type, *(("number",) if type == "integer" else ())):
            yield {**one, "type": type, "enum": [value for value in one["enum"] if type_of(value) == type]}


def kinds(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Types that a value may have; all types if the schema is too complicated or empty."""
    try:
        found = {one.get("type") for one in branches(schema, root)}
    except ValueError:
        return TYPES
    if None in found or not found:
        return TYPES
    return frozenset(filter(None, found | ({"integer"} if "number" in found else set())))


def type_of(value: Any) -> str:
    """JSON type of a decoded value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _target(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a reference names. Raises ValueError."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ValueError("a reference leads outside of the schema")
    found: Any = root
    for name in filter(None, reference[1:].split("/")):
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping):
        raise ValueError(f"{reference[:60]!r} is not in the schema")
    return found
