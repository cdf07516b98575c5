"""Fifty JSON schemas whose documents have an end, by the feature that each is about, and grammars of schemas."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from enginewright.errors import UsageError
from enginewright.runtime.core.outputs import RequestOutput
from enginewright.runtime.grammar.grammar_protocol import LIMITS
from enginewright.runtime.grammar.grammar_worker import answer, failure

Schema = dict[str, Any]
BYTES = LLTokenizer("byte")

TEXT: Schema = {"type": "string", "maxLength": 9}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 40}
FLAG: Schema = {"type": "boolean"}


def closed(required: str = "", **properties: Schema) -> Schema:
    """An object of these properties and no others; the names of those that it must have, apart by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def some(items: Schema, min_items: int, max_items: int) -> Schema:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


POINT = closed("x y", x=COUNT, y=COUNT)
CIRCLE = closed("kind radius", kind={"const": "circle"}, radius=COUNT)
SQUARE = closed("kind side", kind={"const": "square"}, side=COUNT)
TREE = {  # three levels, each named by the one above
    "leaf": closed("value", value=COUNT),
    "branch": closed("left", left={"$ref": "#/$defs/leaf"}, right={"$ref": "#/$defs/leaf"}),
}

BOUNDED: dict[str, Schema] = {
    "enum of texts": {"enum": ["red", "green", "blue"]},
    "enum of all types": {"enum": [None, True, 1.5, "", 'ä"\\\n', [1, {"a": []}], {"b": None}]},
    "enum with one beginning": {"enum": ["a", "ab", "abc", "abcd" * 9]},
    "typed enum": {"type": "string", "enum": ["on", "off"]},
    "const text": {"const": "é\u2028\U0001f600"},
    "const object": {"const": {"a": [1, 2, {"b": "c"}], "d": None}},
    "null": {"type": "null"},
    "several types": {"type": ["boolean", "null", "integer"], "minimum": -9, "maximum": 9},
    "integer": {"type": "integer", "minimum": -120, "maximum": 35},
    "integer, exclusive": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000},
    "integer, multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5},
    "number": {"type": "number", "minimum": -0.5, "maximum": 12.25},
    "number, exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "large integer": {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 999},
    "text": {"type": "string", "minLength": 1, "maxLength": 12},
    "text of one length": {"type": "string", "minLength": 4, "maxLength": 4},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{1,4}$"},
    "pattern of alternatives": {"type": "string", "pattern": "^(ab|cd|[0-9]{2,4})[-_.]?$"},
    "pattern of escapes": {"type": "string", "pattern": r'^\\\d{1,3}"$'},
    "pattern within": {"type": "string", "pattern": "b", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time", "maxLength": 20},
    "date-time": {"type": "string", "format": "date-time", "maxLength": 30},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email", "maxLength": 20},
    "array": some(COUNT, 0, 4),
    "array of one length": some(FLAG, 3, 3),
    "nested arrays": some(some(some(COUNT, 1, 2), 0, 2), 2, 2),
    "array of objects": some(POINT, 1, 3),
    "tuple": {"type": "array", "prefixItems": [TEXT, COUNT, FLAG], "minItems": 3, "items": False},
    "tuple with more": {"type": "array", "prefixItems": [COUNT], "items": FLAG, "minItems": 1, "maxItems": 4},
    "object": POINT,
    "object, all optional": closed(a=TEXT, b=COUNT, c=FLAG, d={"type": "null"}),
    "object, some optional": closed("b d", a=TEXT, b=COUNT, c=FLAG, d={"const": "d"}, e=COUNT),
    "objects in objects": closed("a", a=closed("b", b=closed("c", c=closed("d", d=FLAG)))),
    "names with escapes": closed('a"b', **{'a"b': FLAG, "ü": COUNT, "$ref": FLAG}),
    "no property": closed(),
    "additionalProperties": {"type": "object", "additionalProperties": COUNT, "maxProperties": 3},
    "additional and named": {**POINT, "additionalProperties": FLAG, "maxProperties": 4},
    "patternProperties": {
        "type": "object",
        "patternProperties": {"^n_[a-z]{1,3}$": COUNT},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "anyOf": {"anyOf": [TEXT, some(COUNT, 0, 2), {"type": "null"}]},
    "anyOf objects": {"anyOf": [CIRCLE, SQUARE, POINT]},
    "oneOf": {"oneOf": [FLAG, {"const": "neither"}, COUNT]},
    "oneOf objects": {"oneOf": [CIRCLE, SQUARE]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 12}]},
    "$ref": {"$defs": TREE, **some({"$ref": "#/$defs/branch"}, 1, 2)},
    "$ref and siblings": {"definitions": {"n": COUNT}, **closed("a b", a={"$ref": "#/definitions/n"}, b=FLAG)},
    "everything": closed(
        "id shape tags",
        id={"type": "string", "format": "uuid"},
        shape={"oneOf": [CIRCLE, SQUARE]},
        tags=some({"enum": ["new", "used", "broken"]}, 1, 3),
        note={"anyOf": [{"type": "null"}, TEXT]},
        at=some(POINT, 0, 2),
    ),
}


def check_answers(schemas: Sequence[Schema], outputs: Sequence[RequestOutput]) -> int:
    """Checks that each completion that ended by itself fits its schema; gives their number."""
    ended = 0
    for schema, output in zip(schemas, outputs, strict=True):
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        for choice in output.outputs:
            assert choice.finish_reason in ("stop", "length"), (schema, choice)
            if choice.finish_reason == "stop":
                check.validate(json.loads(choice.text))
                ended += 1
    return ended


def failed(frame: dict[str, Any]) -> str:
    """The reason why a grammar cannot be compiled; empty: it can."""
    made = answer(frame)
    return made["failed"] if "failed" in made else failure(frame, made["source"])


def matcher(schema: dict[str, Any]) -> LLMatcher:
    """Raises UsageError for a schema that cannot be held."""
    made = answer({"json": schema})
    if why := failed({"json": schema}):
        raise UsageError(why)
    return LLMatcher(BYTES, made["source"], limits=LLParserLimits(**LIMITS))


def accepts(schema: dict[str, Any], text: str) -> bool:
    found, data = matcher(schema), text.encode()
    return found.try_consume_tokens(list(data)) == len(data) and found.is_accepting()
