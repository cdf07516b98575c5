"""Random answers under many schemas: each that comes to its own end is what its schema says."""

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import jsonschema
import pytest

from enginewright import LLM, SamplingParams, StructuredOutputsParams
from tests.helpers.serving import LIMITS, tiny_engine

TEXT: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 9},
    {"type": "string", "pattern": "^(ab|[0-9]{2,4})-?$"},
    {"enum": ["", 'ä"\\', "x" * 20]},
    *({"type": "string", "format": name} for name in ("date", "date-time", "uuid", "ipv4", "ipv6")),
]
NUMBER: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -120, "maximum": 35},
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 1000, "multipleOf": 5},
    {"type": "number", "minimum": -0.5, "maximum": 12.25},
    {"const": 1.5},
]
OTHER: list[dict[str, Any]] = [
    {"type": ["boolean", "null"]},
    {"oneOf": [{"type": "boolean"}, {"const": "neither"}]},
    {"$ref": "#/$defs/leaf"},
]
LEAF = {"type": "object", "properties": {"leaf": {"type": "null"}}, "required": ["leaf"], "additionalProperties": False}


def schemas() -> Iterator[dict[str, Any]]:
    """Bounded, so that random answers end."""
    fields = list(product(TEXT, NUMBER, OTHER))
    for number, (text, amount, other) in enumerate(fields[:: len(fields) // 50 or 1][:50]):
        inner: dict[str, Any] = {"type": "array", "items": amount, "minItems": number % 3, "maxItems": number % 3 + 1}
        if number % 4 == 1:
            inner = {"type": "array", "prefixItems": [amount, other], "minItems": 2, "items": False}
        elif number % 4 == 2:
            inner = {"anyOf": [{"type": "array", "items": inner, "maxItems": 2}, text]}
        properties = {"text": text, "inner": inner, "other": other}
        is_open = number % 10 == 7
        required = sorted(properties)[: 3 if is_open else number % 4]
        yield {
            "$defs": {"leaf": LEAF},
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": amount if is_open else False,
            **({"maxProperties": 4} if is_open else {}),
        }


def test_every_answer_that_ends_is_valid() -> None:
    every = list(schemas())
    assert len(every) == 50
    with LLM(tiny_engine(), **LIMITS) as llm:
        params = [
            SamplingParams(n=10, max_tokens=600, seed=seed, structured_outputs=StructuredOutputsParams(json=schema))
            for seed, schema in enumerate(every)
        ]
        outputs = llm.generate(["An answer: "] * len(every), params)
    ended = 0
    for schema, output in zip(every, outputs, strict=True):
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for choice in output.outputs:
            assert choice.finish_reason in ("stop", "length")
            if choice.finish_reason == "stop":
                check.validate(json.loads(choice.text))
                ended += 1
    assert ended > 450


@pytest.mark.parametrize("company", [1, 8])
def test_a_hard_grammar_holds_nobody_up_for_long(company: int) -> None:
    """Whatever such a grammar takes, others finish, and with the same tokens."""
    hard = [
        {"grammar": 'start: s\ns: s s | s s s | "a" | ""'},
        {"regex": "((a{1000}){1000}){1000}"},
        {"regex": "(a|b)*a(a|b){30}"},
        {"regex": "(.*a.{50}.*b.{70})"},
        {"json": {"enum": [f"v{number}" for number in range(5000)]}},
    ]
    free = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(tiny_engine(), **LIMITS) as llm:
        (alone,) = llm.generate(["Free"], free)
        params = [SamplingParams(max_tokens=200, seed=0, structured_outputs=one) for one in hard]  # type: ignore[arg-type]
        prompts = ["Hard"] * len(hard) + ["Free"] * company
        *_, last = llm.generate(prompts, [*params, *[free] * company])
        assert last.outputs == alone.outputs
