"""Schemas that no value matches two of, as far as it can be shown."""

import json
import time
from itertools import combinations
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from enginewright.runtime.grammar.json_schema import held
from enginewright.runtime.grammar.schema_overlap import MAX_COMPARISONS, Overlaps
from tests.helpers.schemas import BOUNDED, CIRCLE, COUNT, FLAG, SQUARE, TEXT, accepts, closed


class Cat(BaseModel):
    kind: Literal["cat", "kitten"]
    lives: int = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


def test_pydantics_unions_are_held() -> None:
    schema = Owner.model_json_schema()
    assert "oneOf" in json.dumps(schema) and held(schema)[1] == []
    owner = {"pet": {"kind": "kitten", "lives": 3}, "pets": [{"kind": "dog", "name": "a"}]}
    assert accepts(schema, json.dumps(owner)) and Owner.model_validate(owner)
    assert not accepts(schema, '{"pet": {"kind": "dog", "lives": 3}}')


DEFS = {"a": closed("k", k={"const": "a"}), "b": closed("k", k={"enum": ["b", "c"]}), "loop": {"$ref": "#/$defs/loop"}}
A, B, LOOP = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"$ref": "#/$defs/loop"}


@pytest.mark.parametrize(
    "schemas",
    [
        [A, B, {"type": "null"}, {"type": "array"}, TEXT, COUNT, FLAG],
        [CIRCLE, SQUARE],
        [{"const": 1}, {"const": 2}, {"enum": ["1", True]}],
        [{"type": "integer", "maximum": 0}, {"type": "number", "minimum": 0.5}],
        [{"type": ["string", "null"]}, {"type": ["integer", "boolean"]}],
        [closed("a", a={}), closed("b", b={})],
        [{"anyOf": [A, {"type": "null"}]}, {"allOf": [B, {"required": ["k"]}]}],
        [closed("in", **{"in": A}), closed("in", **{"in": B})],
        [False, {}],
        [closed("k", k={"const": number}) for number in range(200)],
    ],
    ids=lambda schemas: json.dumps(schemas)[:60],
)
def test_schemas_are_shown_to_be_apart(schemas: list[Any]) -> None:
    assert Overlaps({"$defs": DEFS}).are_apart(schemas)


@pytest.mark.parametrize(
    "schemas",
    [
        [A, A],
        [{}, TEXT],
        [{"const": 1}, {"const": 1.0}],
        [{"const": [True]}, {"enum": [[True]]}],
        [{"type": "integer"}, {"type": "number"}],
        [{"type": "integer", "maximum": 1}, {"type": "integer", "minimum": 1}],
        [
            {"properties": {"k": {"const": 1}}, "required": ["k"]},
            {"properties": {"k": {"const": 2}}, "required": ["k"]},
        ],
        [closed("", k={"const": 1}), closed("", k={"const": 2})],
        [closed("a", a={}), {"type": "object", "required": ["a"]}],
        [LOOP, A],
        [{"$ref": "#/$defs/none"}, A],
        [{"type": "string", "pattern": f"^{number}"} for number in range(MAX_COMPARISONS)],
    ],
    ids=lambda schemas: json.dumps(schemas)[:60],
)
def test_others_are_not(schemas: list[Any]) -> None:
    assert not Overlaps({"$defs": DEFS}).are_apart(schemas)


VALUES: list[Any] = [
    *(None, True, 0, 1, 2, 3.5, 40, "", "a", "1", "red", "on", "1970-01-01", [], [1]),
    *({}, {"k": "a"}, {"k": "b"}, {"k": "a", "a": 1}, {"x": 1, "y": 2}, {"a": {"b": None}}),
    *({"kind": "circle", "radius": 1}, {"kind": "square", "side": 1}),
]
POOL = [*BOUNDED.values(), A, B, *DEFS.values(), {"minimum": 2}, {"type": "number", "exclusiveMaximum": 2}]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(POOL), min_size=2, max_size=4))
def test_schemas_that_are_apart_have_no_value_in_common(schemas: list[Any]) -> None:
    for one, other in combinations(schemas, 2):
        defs = {**one.get("$defs", {}), **other.get("$defs", {}), **DEFS}
        root = {"$defs": defs, "definitions": {**one.get("definitions", {}), **other.get("definitions", {})}}
        if Overlaps(root).are_apart([one, other]):
            both = jsonschema.Draft202012Validator({"allOf": [one, other], **root})
            assert not any(both.is_valid(value) for value in VALUES)


def test_a_comparison_takes_little_however_large_the_schemas_are() -> None:
    many = [{"enum": [f"{number} {place}" for place in range(60)]} for number in range(200)]
    wide = [closed(" ".join(f"{number}{place}" for place in range(900))) for number in "ab"]
    for schemas in (many, wide, [{"oneOf": many}] * 2, [{"allOf": [{"anyOf": [{}, {}]}] * 50}] * 2, [LOOP] * 300):
        overlaps, began = Overlaps({"$defs": DEFS}), time.thread_time()
        overlaps.are_apart(schemas)
        assert overlaps.num_compared <= 2 * MAX_COMPARISONS, time.thread_time() - began
