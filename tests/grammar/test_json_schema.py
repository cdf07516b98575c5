"""JSON schemas as they are held: integers of any size, bounds, and keywords that no grammar has."""

import json
from datetime import datetime, time, timedelta
from decimal import Decimal
from math import inf, nextafter
from typing import Annotated, Any
from uuid import UUID

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, WithJsonSchema

from enginewright.errors import UsageError
from enginewright.runtime.grammar.json_schema import FORMATS, held
from enginewright.runtime.grammar.schema_bounds import MAX_FORMAT_CHARS, MAX_INTEGER, MIN_INTEGER
from enginewright.runtime.text.messages.calls import CallFormat
from enginewright.runtime.text.messages.grammar import only_calls
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.qwen3_xml import QWEN3_XML
from tests.helpers.grammar_writer import Writer, liking
from tests.helpers.schemas import BOUNDED, accepts, failed, matcher
from tests.helpers.serving import CHAT, HELLO, Running

INTEGER = {"type": "integer"}
LOOK_AROUND = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # of a Decimal, as pydantic 2.12 writes it
DECIMAL = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": LOOK_AROUND}]}
PRICE = {
    "type": "object",
    "properties": {"price": {"type": "string", "pattern": LOOK_AROUND}},
    "required": ["price"],
    "additionalProperties": False,
}
NAMED = "properties.price.pattern cannot be held: it has a look-around"
SERVER = {"kind": "calls tools at once", "served_model_names": ("tiny",)}


class Order(BaseModel):
    id: UUID
    at: datetime
    opens: time
    lasts: timedelta
    price: Annotated[Decimal, WithJsonSchema(DECIMAL)]
    count: Annotated[int, Field(ge=1, le=99)]
    total: Annotated[int, Field(gt=-(2**63), lt=2**63)]
    note: str | None = None


def written(schema: dict[str, Any], choices: st.DataObject, max_chars: int = 120) -> str | None:
    """A text of those that a schema allows, each byte chosen; None: it has not ended."""
    found, text = matcher(schema), bytearray()
    while len(text) < max_chars:
        if found.is_stopped():
            break
        mask = found.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]
        ends = [byte for byte in allowed if chr(byte) in '"}]']
        if found.is_accepting() and (not allowed or choices.draw(st.booleans())):
            break
        if not allowed:
            break
        byte = choices.draw(st.sampled_from(ends if ends and choices.draw(st.booleans()) else allowed))
        assert found.consume_token(byte)
        text.append(byte)
    return text.decode() if found.is_accepting() or found.is_stopped() else None


# Integers


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"const": 2**53}, [2**53], [2**53 + 1]),
        ({"const": 2**62}, [2**62], [2**62 + 1, 2**62 - 1]),
        ({"enum": [-(2**53), MAX_INTEGER, 7]}, [-(2**53), MAX_INTEGER, 7], [MAX_INTEGER + 1, 8]),
        ({**INTEGER, "minimum": -(2**63)}, [MIN_INTEGER, 0, MAX_INTEGER], [-(2**63) - 1]),
        ({**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1}, [MIN_INTEGER, 0, MAX_INTEGER], [MAX_INTEGER + 1]),
        ({**INTEGER, "minimum": 2**53 + 1}, [2**53 + 2, MAX_INTEGER], [2**53, 2**53 - 1]),
        ({**INTEGER, "exclusiveMinimum": 2**53 - 1, "exclusiveMaximum": 2**53 + 5}, [2**53, 2**53 + 4], [2**53 + 5]),
        ({**INTEGER, "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        (INTEGER, [MIN_INTEGER, 10**18 + 1, MAX_INTEGER], [10**19, -(10**19)]),
        ({"type": ["integer", "null"], "minimum": 0}, [0, MAX_INTEGER], [-1, 10**19]),
    ],
    ids=str,
)
def test_integers_are_exact(schema: dict[str, Any], valid: list[int], invalid: list[int]) -> None:
    assert [accepts(schema, str(one)) for one in valid] == [True] * len(valid)
    assert [accepts(schema, str(one)) for one in invalid] == [False] * len(invalid)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"const": 2**53 + 1}, "const: 9007199254740993"),
        ({"properties": {"id": {"enum": [1, 2**60 + 1]}}}, "properties.id.enum"),
        ({"const": {"a": [10**30]}}, "const: 1000000"),
        ({"items": {**INTEGER, "minimum": -(2**63), "maximum": -(2**63) + 9}}, "items.minimum: this range"),
        ({**INTEGER, "minimum": 2**53 + 1, "maximum": 2**53 + 3}, "minimum: this range"),
        ({**INTEGER, "minimum": 10**30}, "minimum: this range"),
        ({"type": "number", "maximum": 2**53 + 1}, "maximum: 9007199254740993"),
        ({"const": 1e300}, "const: 1e"),
        ({"enum": [0.1, 1.5e-40]}, "enum: 1.5e-40"),
        ({"properties": {"p": {"const": [0.9452706955539223]}}}, "properties.p.const: 0.9452706955539223"),
    ],
    ids=str,
)
def test_inexact_numbers_are_refused(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(UsageError, match=path) as caught:
        matcher(schema)
    assert "cannot be held exactly" in str(caught.value)


@settings(max_examples=30, deadline=None)
@given(st.data(), st.integers(-(2**64), 2**64), st.integers(-(2**64), 2**64))
def test_integers_in_a_range_are_valid(data: st.DataObject, low: int, high: int) -> None:
    schema = {**INTEGER, "minimum": low, "maximum": high}
    try:
        text = written(schema, data)
    except UsageError:
        return
    assert text is None or low <= int(text) <= high


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(-1e9, 1e9), st.floats(0, 1e3), st.booleans())
def test_numbers_in_a_range_are_valid(data: st.DataObject, low: float, width: float, excluded: bool) -> None:
    keys = ("exclusiveMinimum", "exclusiveMaximum") if excluded else ("minimum", "maximum")
    schema = {"type": "number", **dict(zip(keys, (low, low + width), strict=True))}
    try:
        text = written(schema, data)
    except UsageError as error:
        is_narrow = nextafter(low, inf) >= low + width
        assert "cannot be held exactly" in str(error) or (excluded and is_narrow), "there are numbers in it"
        return
    if text is not None:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@settings(max_examples=60, deadline=None)
@example(1801439850948199.0)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_constants_are_exact_or_refused(number: float) -> None:
    try:
        found = matcher({"const": number})
    except UsageError as error:
        assert "cannot be held exactly" in str(error)
        return
    text = found.compute_ff_bytes()
    assert float(text) == number


# Bounds


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("date-time", "2026-01-02T03:04:05.{}+01:00"),
        ("time", "03:04:05.{}+01:00"),
    ],
)
def test_fractions_of_seconds_have_an_end(format: str, text: str) -> None:
    schema = {"type": "string", "format": format}
    assert accepts(schema, json.dumps(text.format("123456789")))
    assert not accepts(schema, json.dumps(text.format("1" * 30)))
    assert accepts({**schema, "maxLength": 80}, json.dumps(text.format("1" * 30))), "its own bound"


@pytest.mark.parametrize("wanted", ["a", "a1-.:/?#%"])
@pytest.mark.parametrize("format", sorted(FORMATS - {"unknown"}))
def test_formats_have_an_end(format: str, wanted: str) -> None:
    schema = {"type": "string", "format": format}
    writer = Writer(json=schema)
    assert writer.write_all(liking(wanted), 2100), writer.text
    assert len(json.loads(writer.text)) <= MAX_FORMAT_CHARS.get(format, 40)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("email", f"{'a' * 64}@{'b' * 60}.{'c' * 60}.{'d' * 60}.org"),
        ("hostname", ".".join(["a" * 62] * 4)),
        ("uri", f"https://example.org/{'a' * 2000}"),
    ],
)
def test_long_addresses_can_be_written(format: str, text: str) -> None:
    assert accepts({"type": "string", "format": format}, json.dumps(text))


# Keywords


def test_keywords_that_no_grammar_has_are_left_out_and_named() -> None:
    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^a"},
        "properties": {
            "tags": {"type": "array", "items": {"type": "string", "format": "wombat"}, "uniqueItems": True},
            "price": DECIMAL,
            "size": {"type": "integer", "format": "int32"},
            "pattern": {"type": "string", "pattern": r"^\(?!a"},
            "free": {"type": "array", "uniqueItems": False},
        },
    }
    copy, left_out = held(schema)
    assert [one.path for one in left_out] == [
        "propertyNames",
        "properties.tags.items.format",
        "properties.tags.uniqueItems",
        "properties.price.anyOf[1].pattern",
    ]
    assert accepts(copy, '{"tags": ["a", "a"], "price": "1", "size": 3, "pattern": "(!a", "free": []}')
    with pytest.raises(UsageError, match="propertyNames cannot be held"):
        matcher(schema)


def test_a_class_of_pydantics_loses_only_its_look_around() -> None:
    copy, left_out = held(Order.model_json_schema())
    assert [one.path for one in left_out] == ["properties.price.anyOf[1].pattern"]
    order = '{"id": "%s", "at": "2026-01-02T03:04:05Z", "opens": "03:04:05Z", "lasts": "PT5M", "price": "1.5", '
    order += '"count": 3, "total": -9000000000000000000, "note": null}'
    assert accepts(copy, order % UUID(int=5)) and Order.model_validate_json(order % UUID(int=5))


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(sorted(BOUNDED)))
def test_texts_of_a_schema_are_valid(data: st.DataObject, name: str) -> None:
    text = written(BOUNDED[name], data)
    if text is not None:
        jsonschema.Draft202012Validator(BOUNDED[name]).validate(json.loads(text))


WRONG = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "foo"}}}}


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ({"json": {"type": "foo"}}, "Invalid type: foo"),
        ({"json": WRONG}, "properties.a.items: Invalid type: foo"),
        ({"json": {"$defs": {"x": WRONG}, "$ref": "#/$defs/x"}}, "$defs.x.properties.a.items: Invalid type: foo"),
        ({"json": {"oneOf": [{"type": "null"}, WRONG]}}, "anyOf[1].properties.a.items: Invalid type: foo"),
        ({"grammar": 'start: "a" %json {"type": "foo"}'}, "at 1(8): failed to compile"),
    ],
    ids=str,
)
def test_errors_name_the_property(frame: dict[str, Any], why: str) -> None:
    assert failed(frame).startswith(why)


@pytest.mark.parametrize("before", [None, "start: /[ab]/"])
@pytest.mark.parametrize("calls", [HERMES, QWEN3_XML], ids=lambda calls: calls.name)
def test_errors_name_the_tool(calls: CallFormat, before: str | None) -> None:
    grammar = only_calls(calls, {"good": {"type": "object"}, "bad": WRONG}, {}, several=True)
    why = "the tool bad: " if calls is QWEN3_XML else "the tool bad: properties.a."
    found = failed({"grammar": grammar, "before": before})
    assert found.startswith(why) and found.endswith("items: Invalid type: foo")


# Over HTTP

FUNCTION = {"name": "buy", "parameters": PRICE}
CALLED = {"messages": HELLO, "max_tokens": 4, "ignore_eos": False}
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ASKED: list[tuple[str, str, Any]] = [  # the path of the API, of the schema, and a body for each value of strict
    (
        CHAT,
        "response_format.json_schema.schema",
        lambda strict: {
            **CALLED,
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PRICE, "strict": strict}},
        },
    ),
    (
        CHAT,
        "tools[0].function.parameters",
        lambda strict: {
            **CALLED,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": strict}}],
            "tool_choice": "required",
        },
    ),
    (
        RESPONSES,
        "text.format.schema",
        lambda strict: {
            "input": "x",
            "max_output_tokens": 4,
            "text": {"format": {"type": "json_schema", "name": "p", "schema": PRICE, "strict": strict}},
        },
    ),
    (
        RESPONSES,
        "tools[0].parameters",
        lambda strict: {
            "input": "x",
            "max_output_tokens": 4,
            "tools": [{"type": "function", **FUNCTION, "strict": strict}],
            "tool_choice": "required",
        },
    ),
    (
        MESSAGES,
        "tools[0].input_schema",
        lambda strict: {
            "messages": HELLO,
            "max_tokens": 4,
            "tools": [{"name": "buy", "input_schema": PRICE, "strict": strict}],
            "tool_choice": {"type": "any"},
        },
    ),
]


@pytest.mark.parametrize(("api", "path", "body"), ASKED, ids=[f"{api} {path}" for api, path, _ in ASKED])
def test_unheld_keywords_are_a_warning_or_where_strict_an_error(
    server: Running, api: str, path: str, body: Any
) -> None:
    loose = server.post(api, {"model": "tiny", **body(False)})
    assert loose.status == 200 and f"{path}: {NAMED}" in loose.headers["x-enginewright-warning"]
    strict = server.post(api, {"model": "tiny", **body(True)})
    assert (strict.status, strict.json["error"]["message"]) == (400, f"{path}: {NAMED}")


def test_counts_and_unions_are_a_warning_or_where_strict_an_error(server: Running) -> None:
    options = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 2}
    schema = {"type": "object", "properties": {"o": {"oneOf": [options, {"type": "object", "maxProperties": 0}]}}}
    for is_strict in (False, True):
        wanted = {"name": "p", "schema": schema, "strict": is_strict}
        body = {"model": "tiny", **CALLED, "response_format": {"type": "json_schema", "json_schema": wanted}}
        found = server.post(CHAT, body)
        if is_strict:
            assert found.status == 400 and "schema: properties.o.oneOf cannot be held: " in found.error["message"]
        else:
            warning = found.headers["x-enginewright-warning"]
            assert found.status == 200 and "properties.o.oneOf[0].minProperties cannot be held" in warning
            assert "schema: properties.o.oneOf cannot be held: a value may match two" in warning


def test_tools_that_no_grammar_holds_warn_of_nothing(server: Running) -> None:
    found = server.post(CHAT, {"model": "tiny", **CALLED, "tools": [{"type": "function", "function": FUNCTION}]})
    assert found.status == 200 and "x-enginewright-warning" not in found.headers


def test_a_wrong_schema_of_a_tool_names_both(server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "bad", "parameters": WRONG}}]
    found = server.post(CHAT, {"model": "tiny", **CALLED, "tools": tools, "tool_choice": "required"})
    assert (found.status, found.error["param"]) == (400, "tools")
    assert found.error["message"].endswith("the tool bad: properties.a.items: Invalid type: foo")
