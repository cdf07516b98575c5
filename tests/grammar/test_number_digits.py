"""Numbers of JSON have an end, however much a model likes digits, and all that are needed can be written."""

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright import LLM, SamplingParams
from enginewright.runtime.grammar.number_digits import MAX_DIGITS, MAX_EXPONENT_DIGITS
from enginewright.runtime.text.messages.calls import CallFormat
from enginewright.runtime.text.messages.grammar import only_calls
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.qwen3_xml import QWEN3_XML
from tests.helpers.grammar_writer import TRIE, Writer, liking
from tests.helpers.serving import LIMITS, tiny_engine

NUMBER = {"type": "number"}
POINT = {"type": "object", "properties": {"x": NUMBER, "y": {}}, "required": ["x", "y"], "additionalProperties": False}
SIZE = {"type": "object", "properties": {"x": NUMBER, "y": {"type": ["null", "number"]}}, "required": ["x", "y"]}
DRAFT_4 = "http://json-schema.org/draft-04/schema#"
ENDLESS: dict[str, dict[str, Any]] = {
    "number": {"json": NUMBER},
    "several types": {"json": {"type": ["null", "number", "boolean"]}},
    "minimum": {"json": {**NUMBER, "minimum": 3}},
    "maximum": {"json": {**NUMBER, "maximum": 3.25}},
    "between": {"json": {**NUMBER, "minimum": -0.5, "maximum": 12.25}},
    "above zero": {"json": {**NUMBER, "exclusiveMinimum": 0}},
    "above": {"json": {**NUMBER, "exclusiveMinimum": 3}},
    "below zero": {"json": {**NUMBER, "exclusiveMaximum": 0}},
    "below": {"json": {**NUMBER, "exclusiveMaximum": 3, "minimum": 0}},
    "above as of draft 4": {"json": {"$schema": DRAFT_4, **NUMBER, "minimum": 0, "exclusiveMinimum": True}},
    "without a type": {"json": {"exclusiveMinimum": 0, "enum": [0, 3e-9, 0.3]}},
    "multiple": {"json": {**NUMBER, "multipleOf": 7}},
    "small multiple": {"json": {**NUMBER, "multipleOf": 0.25}},
    "multiple above": {"json": {**NUMBER, "multipleOf": 7, "minimum": 1}},
    "integer": {"json": {"type": "integer"}},
    "anything": {"json": {"enum": [POINT, {}, [3.5]]}},
    "object": {"json": POINT},
    "constant": {"json": {"const": 1.5e-25}},
    "numbers": {"json": {"type": "array", "items": NUMBER, "maxItems": 2}},
}


def validate(schema: dict[str, Any], text: str) -> None:
    jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))


@pytest.mark.parametrize("wanted", [".e3", ".0e", "-0.3e+", "9"])
@pytest.mark.parametrize("frame", ENDLESS.values(), ids=ENDLESS.keys())
def test_every_number_has_an_end(frame: dict[str, Any], wanted: str) -> None:
    writer = Writer(**frame)
    assert writer.write_all(liking(wanted)), writer.text
    validate(frame["json"], writer.text)
    runs = re.findall(r"\d+", writer.text)
    assert "const" in frame["json"] or max(map(len, runs), default=0) <= MAX_DIGITS


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from(sorted(ENDLESS)))
def test_numbers_that_end_are_valid(data: st.DataObject, name: str) -> None:
    writer = Writer(**ENDLESS[name])

    def choose(allowed: list[int]) -> int:
        digits = [token for token in allowed if TRIE.decode_bytes([token])[:1] in (*map(b"%d".__mod__, range(10)),)]
        return data.draw(st.sampled_from(digits if digits and data.draw(st.integers(0, 9)) else allowed))

    if writer.write_all(choose, 150):
        validate(ENDLESS[name]["json"], writer.text)


@pytest.mark.parametrize("calls", [HERMES, QWEN3_XML], ids=lambda calls: calls.name)
def test_numbers_of_calls_have_an_end(calls: CallFormat) -> None:
    wanted = {"grammar": only_calls(calls, {"move": SIZE}, {}, several=False), "before": r"start: /[0-9]{40}\n/"}
    writer = Writer(**wanted)
    assert writer.write_all(liking(".e3")), writer.text


@pytest.mark.parametrize(
    "text",
    [
        str(2**63 - 1),
        str(-(2**64)),
        "1.7976931348623157e+308",
        "-5e-324",
        "0." + "3" * MAX_DIGITS,
        "9" * MAX_DIGITS + "." + "9" * MAX_DIGITS + "E-" + "9" * MAX_EXPONENT_DIGITS,
    ],
)
def test_every_double_and_integer_of_64_bits_can_be_written(text: str) -> None:
    for frame in ({"json": NUMBER}, {"json": {}}):
        assert Writer(**frame).writes(text)


@pytest.mark.parametrize("text", ["0." + "3" * (MAX_DIGITS + 1), "3" * (MAX_DIGITS + 1), "1e0000", "1e+1234"])
def test_longer_numbers_cannot_be_written(text: str) -> None:
    assert not Writer(json=NUMBER).writes(text)


LONG = "3" * 45


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        ({"json": {"type": "string"}}, f'"{LONG}e{LONG}"'),
        ({"json": {"type": "string", "minLength": 60}}, f'"{LONG}{LONG}"'),
        ({"json": {"type": "string", "pattern": "^[0-9]{40,50}$"}}, f'"{LONG}"'),
        ({"json": {"type": "string", "pattern": "^[0-9a-f]{46}$"}}, f'"{LONG}a"'),
        ({"json": {"const": 1.5e-25}}, f"0.{'0' * 24}15"),
        ({"json": {"enum": [LONG, LONG + "3"]}}, f'"{LONG}"'),
        ({"json": {}, "before": "start[lazy]: /(?s:.*)=/"}, f"{LONG} {LONG}=3"),
        ({"regex": "3+[,.]?"}, LONG),
        ({"choice": [LONG, LONG + ","]}, LONG),
        ({"grammar": "start: /3+,?/"}, LONG),
    ],
    ids=str,
)
def test_digits_that_are_no_numbers_are_as_many_as_wanted(frame: dict[str, Any], text: str) -> None:
    assert Writer(**frame).writes(text)


def test_a_model_that_likes_digits_comes_to_an_end() -> None:
    with LLM(tiny_engine(), **LIMITS) as llm:
        bias = {token: 90.0 for digit in ".3" for token in llm.encode(digit)[-1:]}
        params = SamplingParams(max_tokens=120, seed=1, logit_bias=bias, structured_outputs={"json": NUMBER})
        (output,) = llm.generate(["An answer: "], params)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text.count("3") >= MAX_DIGITS
