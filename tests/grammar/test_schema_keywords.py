"""Each keyword of JSON Schema is held, or left out and named; none is passed over in silence."""

import json
from typing import Any

import jsonschema
import pytest
from jsonschema_specifications import REGISTRY

from enginewright.errors import UsageError
from enginewright.runtime.grammar.json_schema import held, held_whole
from tests.helpers.schemas import accepts

DRAFTS = [
    jsonschema.Draft202012Validator,
    jsonschema.Draft201909Validator,
    jsonschema.Draft7Validator,
    jsonschema.Draft6Validator,
    jsonschema.Draft4Validator,
]
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
INT = {"type": "integer"}
OBJECT = {"type": "object"}
AB = {**OBJECT, "properties": {"a": INT, "b": INT}}
ONLY_AB = {**AB, "additionalProperties": False}
LIST = {"type": "array"}
ANCHORED = {"$ref": "#x", "$defs": {"y": {"$anchor": "x", **INT}}}

# Of a keyword: a schema, a value that is valid and one that is not.
HELD: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("$anchor", ANCHORED, 1, "a"),
    ("$defs", {"$defs": {"x": INT}, "$ref": "#/$defs/x"}, 1, "a"),
    ("$id", {"$id": "https://a.org/b", "$defs": {"x": INT}, "$ref": "https://a.org/b#/$defs/x"}, 1, "a"),
    ("$ref", {"properties": {"a": {"$ref": "#/$defs/x", "minimum": 2}}, "$defs": {"x": INT}}, {"a": 2}, {"a": 1}),
    ("$schema", {**DRAFT_7, **INT}, 1, "a"),
    ("additionalItems", {**DRAFT_7, **LIST, "items": [INT], "additionalItems": {"type": "null"}}, [1, None], [1, 1]),
    ("additionalItems", {**DRAFT_7, **LIST, "items": INT, "additionalItems": False}, [1, 2], [None]),
    ("additionalProperties", {**AB, "additionalProperties": {"type": "null"}}, {"c": None}, {"c": 1}),
    ("allOf", {"allOf": [INT, {"minimum": 3}]}, 3, 2),
    ("anyOf", {"anyOf": [INT, {"type": "null"}]}, None, "a"),
    ("const", {"const": {"a": [1]}}, {"a": [1]}, {"a": [2]}),
    ("definitions", {"definitions": {"x": INT}, "$ref": "#/definitions/x"}, 1, "a"),
    ("enum", {"enum": [1, "b"]}, "b", "a"),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 3}, 2.5, 3),
    ("exclusiveMinimum", {"type": "number", "exclusiveMinimum": 3}, 3.5, 3),
    ("format", {"type": "string", "format": "date"}, "2026-01-02", "2026-02-31"),
    ("items", {**LIST, "items": INT}, [1], ["a"]),
    ("maxItems", {**LIST, "maxItems": 1}, [1], [1, 2]),
    ("maxItems", {**LIST, "maxItems": 1.0}, [1], [1, 2]),
    ("maxLength", {"type": "string", "maxLength": 1}, "é", "ab"),
    ("maxProperties", {**OBJECT, "maxProperties": 1}, {"a": 1}, {"a": 1, "b": 1}),
    ("maxProperties", {**ONLY_AB, "required": ["a"], "maxProperties": 2}, {"a": 1, "b": 1}, {"b": 1}),
    ("maxProperties", {**ONLY_AB, "maxProperties": 1}, {"b": 1}, {"a": 1, "b": 1}),
    ("maxProperties", {"anyOf": [{**OBJECT, "maxProperties": 1}, {"type": "null"}]}, {"a": 1}, {"a": 1, "b": 1}),
    ("maximum", {**INT, "maximum": 3}, 3, 4),
    ("minItems", {**LIST, "minItems": 1}, [1], []),
    ("minLength", {"type": "string", "minLength": 2}, "ab", "a"),
    ("minProperties", {**OBJECT, "minProperties": 1}, {"a": 1}, {}),
    ("minProperties", {**AB, "required": ["b"], "minProperties": 1}, {"b": 1}, {"a": 1}),
    ("minProperties", {**AB, "required": ["a", "b"], "minProperties": 3}, {"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 1}),
    ("minProperties", {**ONLY_AB, "minProperties": 1}, {"b": 1}, {}),
    ("minimum", {**INT, "minimum": 3}, 3, 2),
    ("multipleOf", {**INT, "multipleOf": 3}, -6, 4),
    ("oneOf", {"oneOf": [INT, {"type": "null"}]}, 1, "a"),
    ("oneOf", {"anyOf": [INT, {"type": "null"}], "oneOf": [INT, {"type": "string"}]}, 1, None),
    ("oneOf", {"anyOf": [INT], "oneOf": [INT, {"type": "null"}], "allOf": [{"minimum": 3}]}, 3, 2),
    ("pattern", {"type": "string", "pattern": "^a+$"}, "aa", "b"),
    ("patternProperties", {**OBJECT, "patternProperties": {"^n": INT}}, {"n": 1}, {"n": "a"}),
    ("prefixItems", {**LIST, "prefixItems": [INT]}, [1, "a"], ["a"]),
    ("properties", AB, {"a": 1}, {"a": "a"}),
    ("required", {**AB, "required": ["b"]}, {"b": 1}, {"a": 1}),
    ("type", {"type": ["integer", "null"]}, None, "a"),
    ("unevaluatedItems", {**LIST, "prefixItems": [INT], "unevaluatedItems": False}, [1], [1, 2]),
    ("unevaluatedProperties", {**AB, "unevaluatedProperties": False}, {"a": 1}, {"c": 1}),
]

# Of a keyword: a schema, and a value that it alone makes invalid.
LEFT_OUT: list[tuple[str, dict[str, Any], Any]] = [
    ("$dynamicRef", {"$dynamicRef": "#x", "$defs": {"y": {"$dynamicAnchor": "x", **INT}}}, "a"),
    ("$schema", {"$schema": "https://example.org/own", "type": "string"}, "a"),
    ("contains", {**LIST, "contains": INT}, []),
    ("contains", {**LIST, "contains": True}, []),
    ("dependencies", {**DRAFT_7, **AB, "dependencies": {"a": ["b"]}}, {"a": 1}),
    ("dependentRequired", {**AB, "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    ("dependentSchemas", {**AB, "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    ("else", {**INT, "if": {"minimum": 5}, "else": {"maximum": 2}}, 3),
    ("format", {"type": "string", "format": "idn-email"}, "a"),
    ("if", {**INT, "if": {"minimum": 5}, "then": {"maximum": 7}}, 8),
    ("if", {**INT, "if": True, "then": {"maximum": 7}}, 8),
    ("maxContains", {**LIST, "contains": INT, "maxContains": 1}, [1, 2]),
    ("maxProperties", {**AB, "maxProperties": 1}, {"a": 1, "b": 1}),
    ("maxProperties", {"allOf": [AB, {"maxProperties": 1}]}, {"a": 1, "b": 1}),
    ("maxProperties", {**ONLY_AB, "required": ["a"], "maxProperties": 1}, {"a": 1, "b": 1}),
    ("minContains", {**LIST, "contains": INT, "minContains": 2}, [1]),
    ("minProperties", {**AB, "minProperties": 1}, {}),
    ("minProperties", {**AB, "anyOf": [{"required": ["a"]}, {"minProperties": 2}]}, {"b": 1}),
    ("multipleOf", {**INT, "multipleOf": 10**10}, 3),
    ("multipleOf", {"type": "number", "multipleOf": 0.07}, 0.01),
    ("not", {**INT, "not": {"const": 3}}, 3),
    ("oneOf", {"oneOf": [INT, {"type": "number"}]}, 3),
    ("pattern", {"type": "string", "pattern": "^(?!a)"}, "ab"),
    ("patternProperties", {**OBJECT, "patternProperties": {"^(?!a)": INT}}, {"b": "c"}),
    ("propertyNames", {**OBJECT, "propertyNames": {"pattern": "^a"}}, {"b": 1}),
    ("then", {**INT, "if": {"minimum": 5}, "then": {"maximum": 7}}, 8),
    ("unevaluatedItems", {**LIST, "allOf": [{"prefixItems": [INT]}], "unevaluatedItems": False}, [1, 2]),
    ("unevaluatedProperties", {"allOf": [AB], "unevaluatedProperties": False}, {"c": 1}),
    ("uniqueItems", {**LIST, "uniqueItems": True}, [1, 1]),
    ("$recursiveRef", {**OBJECT, "properties": {"a": {"$recursiveRef": "#"}}, "additionalProperties": False}, {"a": 1}),
]

# Keywords, or values of theirs, that say nothing of what is valid.
SILENT: list[dict[str, Any]] = [
    {"$comment": "c"},
    {"$dynamicAnchor": "x"},
    {"$recursiveAnchor": True},
    {"$vocabulary": {"https://example.org/own": True}},
    {"contentEncoding": "base64", "contentMediaType": "application/json", "contentSchema": {"not": True}},
    {**DRAFT_7, "contentEncoding": "base64"},
    {"default": 10**30, "examples": [10**30], "description": "d", "title": "t"},
    {"deprecated": True, "readOnly": True, "writeOnly": True},
    {"discriminator": {"propertyName": "kind"}},
    {"id": "x"},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"if": {"type": "null"}},
    {"then": False, "else": False},
    {"minContains": 3, "maxContains": 1},
    {"propertyNames": True, "unevaluatedItems": {}, "unevaluatedProperties": True, "uniqueItems": False},
    {"minProperties": 0, "maxLength": 2**70, "maxItems": 2**70, "maxProperties": 2**70},
]


def names_of(schema: dict[str, Any]) -> set[str]:
    """The keywords of a metaschema."""
    found = set(schema.get("properties", {}))
    for part in schema.get("allOf", ()):
        if "$ref" in part:
            found |= names_of(REGISTRY.contents(schema["$id"].rpartition("/")[0] + "/" + part["$ref"]))
    return found


KNOWN = set[str]().union(*(names_of(draft.META_SCHEMA) for draft in DRAFTS))
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2.5,
    10**40,
    "x",
    [],
    [1],
    [None, "a"],
    [{}],
    {},
    {"a": 1},
    {"a": {"a": []}},
]


def test_every_keyword_is_in_a_table() -> None:
    silent = {key for schema in SILENT for key in schema}
    assert KNOWN - {one[0] for one in (*HELD, *LEFT_OUT)} - silent == set()


def writes(schema: dict[str, Any], value: Any) -> bool:
    """True if an answer may be this value."""
    return accepts(schema, json.dumps(value, ensure_ascii=False))


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    return draft(schema, format_checker=draft.FORMAT_CHECKER).is_valid(value)


@pytest.mark.parametrize(
    ("key", "schema", "valid", "invalid"), HELD, ids=[f"{one[0]} {n}" for n, one in enumerate(HELD)]
)
def test_keywords_are_held(key: str, schema: dict[str, Any], valid: Any, invalid: Any) -> None:
    assert (is_valid(schema, valid), is_valid(schema, invalid)) == (True, False), "the table is right"
    assert held(schema)[1] == []
    assert (writes(schema, valid), writes(schema, invalid)) == (True, False)


@pytest.mark.parametrize("place", range(len(LEFT_OUT)), ids=[one[0] for one in LEFT_OUT])
def test_other_keywords_are_left_out_and_named(place: int) -> None:
    key, schema, value = LEFT_OUT[place]
    copy, left_out = held(schema)
    named = [one for one in left_out if key in one.path.split(".")]
    assert len(named) == 1 and named[0].why
    with pytest.raises(UsageError, match="cannot be held: "):
        held_whole(schema)
    assert writes(copy, value)
    if key not in ("$dynamicRef", "$recursiveRef", "$schema", "format", "multipleOf"):
        assert not is_valid(schema, value), "the table is right"


@pytest.mark.parametrize("silent", SILENT, ids=lambda schema: " ".join(schema))
def test_keywords_that_say_nothing_are_no_reason_to_warn(silent: dict[str, Any]) -> None:
    schema = {"type": ["integer", "array", "string", "object"], **silent}
    assert held(schema)[1] == []
    assert all(writes(schema, value) for value in (1, [1, 1], "a", {"b": 1}))


@pytest.mark.parametrize("key", sorted(KNOWN))
@pytest.mark.parametrize("others", [{}, {**AB, "required": ["a"]}, {"oneOf": [AB, {"type": "number"}]}, ANCHORED])
def test_values_that_no_keyword_has_are_no_failure_of_ours(key: str, others: dict[str, Any]) -> None:
    for junk in JUNK:
        for schema in ({**others, key: junk}, {"oneOf": [{**others, key: junk}, {"type": "object", key: junk}]}):
            try:
                copy, _ = held(schema)
            except UsageError:
                continue
            assert json.loads(json.dumps(held_whole(copy))) == copy


@pytest.mark.parametrize("key", ["title", "default", "not", "$ref", "minProperties", "oneOf"])
def test_properties_may_be_named_as_keywords(key: str) -> None:
    schema = {**OBJECT, "properties": {key: INT}, "required": [key], "additionalProperties": False}
    assert held(schema)[1] == [] and writes(schema, {key: 1}) and not writes(schema, {key: "a"})
