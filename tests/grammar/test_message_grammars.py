"""Grammars of calls and of reasoning: what they let noise write is what the parser reads, and nothing else passes."""

import json
import random
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from enginewright.errors import UsageError
from enginewright.runtime.grammar.grammar_worker import answer
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.text.messages.calls import ArgumentsPiece, CallFormat, CallPiece
from enginewright.runtime.text.messages.formats import CALL_FORMATS, REASONING_FORMATS, new_parser
from enginewright.runtime.text.messages.gemma import GEMMA4
from enginewright.runtime.text.messages.grammar import (
    MAX_CALLS,
    answer_or_calls,
    before_answer,
    only_calls,
    text_and_calls,
)
from enginewright.runtime.text.messages.harmony import HARMONY
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.llama3_json import LLAMA3_JSON
from enginewright.runtime.text.messages.mistral import MISTRAL
from enginewright.runtime.text.messages.parser import (
    MessageFormat,
    Piece,
    ReasoningPiece,
    ReasoningPlace,
    TextPiece,
    joined,
)
from enginewright.runtime.text.messages.pythonic import PYTHONIC
from enginewright.runtime.text.messages.qwen3_xml import QWEN3_XML
from tests.helpers.token_bytes import byte_level

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
        "code": {"anyOf": [{"type": "string", "pattern": "^[a-c]{3}$"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3, "minItems": 1},
        "ok": {"type": "boolean"},
        "at": {
            "type": "object",
            "properties": {
                "x": {"type": "number", "minimum": 0, "maximum": 1},
                "y": {"type": "string", "maxLength": 3},
            },
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "maxLength": 4}},
}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "weather": WEATHER,
    "stop": {"type": "object", "additionalProperties": False},
}
THINK = REASONING_FORMATS[0]
NAMES = {"ids": lambda one: getattr(one, "name", str(one))}


@cache
def trie() -> LLTokenizer:
    return LLTokenizer(byte_level().to_json(), len(byte_level()), [end()])


def end() -> int:
    token = byte_level().token_id("<|end|>")
    assert token is not None
    return token


def matcher(**wanted: Any) -> LLMatcher:
    """A matcher of a grammar as the engine compiles it."""
    reply = answer(wanted)
    assert "source" in reply, reply
    return LLMatcher(trie(), reply["source"], log_level=0)


def written(found: LLMatcher, seed: int, begun: str = "") -> str:
    """The text that noise writes under a grammar until it may end, and does.

    Args:
        begun: how it begins.
    """
    rng, tokens = random.Random(seed), split(begun)
    assert found.try_consume_tokens(tokens) == len(tokens)
    while len(tokens) < 3000:
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice(bits.nonzero()[0].tolist())
        if token == end():
            return byte_level().decode(tokens, skip_special_tokens=False)
        assert found.consume_token(token)
        tokens.append(token)
    raise AssertionError("it does not end")


def split(text: str) -> list[int]:
    """The tokens of each character, since whole marks are special tokens of this tokenizer's."""
    return [token for char in text for token in byte_level().encode(char, add_special_tokens=False)]


def passes(found: LLMatcher, text: str) -> bool:
    """True if the grammar accepts the text."""
    found, tokens = found.deep_copy(), split(text)
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def read(form: MessageFormat, text: str, *, size: int = 0, is_cut: bool = False, **options: Any) -> list[Piece]:
    """A message as its parser has it, arguments with their call.

    Args:
        size: characters of a push; 0: all of the text.
        is_cut: it was cut off at its end.
        options: of the parser.
    """
    parser = new_parser(form, SCHEMAS, **options)
    assert parser is not None
    given, pieces = list[Piece](), list[Piece]()
    for place in range(0, len(text), size or max(len(text), 1)):
        given += parser.push(text[place : place + size] if size else text)
    for piece in joined(given + parser.end(is_cut=is_cut)):
        if isinstance(piece, ArgumentsPiece):
            assert isinstance(pieces[-1], CallPiece)
            piece = CallPiece(pieces[-1].name, pieces.pop().arguments + piece.text)  # type: ignore[union-attr]
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_calls_alone_are_read_and_follow_their_schema(calls: CallFormat, several: bool) -> None:
    found, counts = matcher(grammar=only_calls(calls, SCHEMAS, {}, several=several)), list[int]()
    for seed in range(6):
        text = written(found.deep_copy(), seed)
        pieces = read(MessageFormat(None, calls), text)
        for piece in pieces:
            assert isinstance(piece, CallPiece), text
            jsonschema.validate(json.loads(piece.arguments), SCHEMAS[piece.name])
        counts.append(len(pieces))
    assert min(counts) == 1
    assert (max(counts) > 1) == (several and calls is not HARMONY)  # which ends its answer with a call


REPLY = {
    "type": "object",
    "properties": {
        "name": {"enum": ["weather", "<tool_call>", "x"]},
        "said": {"enum": ["[TOOL_CALLS]", "<think>", "<|tool_call>call:"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
    },
    "required": ["name", "said"],
    "additionalProperties": False,
}
ANSWERS: tuple[dict[str, Any], ...] = (
    {"json": REPLY},
    {"json": REPLY, "disable_any_whitespace": True},
    {"json": {"type": "array", "items": {"enum": [7, True, None, "["]}, "maxItems": 3}},
    {"choice": ["<tool_cat>", '{"name": "weather"}', "[weather]"]},
)


def either(calls: CallFormat, answer: dict[str, Any], *, several: bool = True, reasons: bool = False) -> LLMatcher:
    """A matcher of calls, or of an answer in their place."""
    form, wanted = MessageFormat(THINK if reasons else None, calls), StructuredOutputsParams(**answer)
    place = ReasoningPlace.BEGUN if reasons else ReasoningPlace.OVER
    options = wanted.json_options if wanted.is_json else None
    return matcher(within=answer_or_calls(form, SCHEMAS, {}, place, options, several=several), **answer)


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_an_answer_or_calls_are_read_as_what_they_are(calls: CallFormat) -> None:
    form, kinds = MessageFormat(THINK, calls), set[type[Piece]]()
    # The messages of harmony that come before, such as an analysis, do not end in noise.
    begins = ["<|channel|>final<|message|>", "<|channel|>commentary to="] if calls is HARMONY else [""]
    for number, wanted in enumerate(ANSWERS):
        found, several = either(calls, wanted, several=number > 0), number > 0
        for seed in range(6):
            begun = begins[seed % len(begins)]
            text = written(found.deep_copy(), seed, begun)
            pieces = read(form, text, only_first=True)
            assert all(read(form, text, only_first=True, size=size) == pieces for size in (1, 5)), text
            kinds |= {type(piece) for piece in pieces}
            if isinstance(pieces[0], TextPiece):
                assert pieces == [TextPiece(text.removeprefix(begins[0]))]
                if "json" in wanted:
                    jsonschema.validate(json.loads(pieces[0].text), wanted["json"])
                continue
            assert several or len(pieces) == 1
            for piece in pieces:
                assert isinstance(piece, CallPiece), text
                jsonschema.validate(json.loads(piece.arguments), SCHEMAS[piece.name])
    assert kinds == {TextPiece, CallPiece}


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_an_answer_or_calls_and_nothing_else(calls: CallFormat) -> None:
    good, reply = call(calls, {"city": "Graz", "unit": "C"}), '{"name": "weather", "said": "<think>", "days": [1]}'
    final = "<|channel|>final<|message|>" if calls is HARMONY else ""
    for wanted in ANSWERS[:2]:
        found = either(calls, wanted)
        assert passes(found, good if wanted is ANSWERS[0] or calls is not LLAMA3_JSON else good.replace(" ", ""))
        assert passes(found, final + (reply if wanted is ANSWERS[0] else reply.replace(" ", "")))
        others = ("", good + reply, final + reply + good, f"I look. {good}", final + reply.replace("weather", "y"))
        assert not any(passes(found, text) for text in others)
        assert read(MessageFormat(None, calls), final + reply, only_first=True) == [TextPiece(reply)]
    thinking = either(calls, ANSWERS[0], reasons=True)
    thought = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant" if calls is HARMONY else "Hm</think>\n\n"
    for text in (good, final + reply):
        assert passes(thinking, thought + text)
        reasoning, one = read(MessageFormat(THINK, calls), thought + text, in_reasoning=True, only_first=True)
        assert reasoning == ReasoningPiece("Hm") and isinstance(one, CallPiece if text is good else TextPiece)
    if calls.open:
        assert not passes(thinking, f"Hm {calls.open}{thought}{good}")


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_the_end_may_come_after_each_whole_call(calls: CallFormat) -> None:
    """The end may come after each complete call, and has to come after the maximum number of calls."""
    arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    for several in (False, True):
        found = matcher(grammar=only_calls(calls, {"stop": arguments}, {}, several=several))
        texts = {written(found.deep_copy(), seed) for seed in range(12 if several else 3)}
        counts = {len(read(MessageFormat(None, calls), text)) for text in texts}
        assert counts == {1} if not several or calls is HARMONY else {1, 2} <= counts <= {*range(1, MAX_CALLS + 1)}
    one, written_calls = call(calls, {"city": "Graz", "unit": "C"}), calls.written
    if written_calls.between is not None:
        found = matcher(grammar=only_calls(calls, SCHEMAS, {}, several=True))
        alone = one.removeprefix(written_calls.first).removesuffix(written_calls.last)
        for count in (MAX_CALLS, MAX_CALLS + 1):
            several_calls = written_calls.between.join([alone] * count)
            text = written_calls.first + several_calls + written_calls.last
            assert passes(found, text) == (count == MAX_CALLS)
    if not written_calls.last:
        for grammar in (only_calls, text_and_calls):
            found = matcher(grammar=grammar(calls, SCHEMAS, {}, several=True))
            tokens = split(one)
            assert found.try_consume_tokens(tokens) == len(tokens)
            bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
            assert bits[end()]


def test_a_call_that_is_an_object_keeps_the_references_of_its_schema() -> None:
    nested = {"type": "object", "properties": {"at": {"$ref": "#/$defs/at"}, "more": {"$ref": "#"}}}
    schemas = {"f": nested | {"additionalProperties": False, "$defs": {"at": {"type": "integer"}}}}
    form, options = MessageFormat(None, LLAMA3_JSON), StructuredOutputsParams(json=REPLY).json_options
    grammar = answer_or_calls(form, schemas, {}, ReasoningPlace.OVER, options, several=True)
    found, one = matcher(within=grammar, json=REPLY), '{"name": "f", "parameters": {"more": {"at": 3}}}'
    assert passes(found, one) and passes(found, f"{one}; {one}")
    assert not passes(found, one.replace("3", '"3"'))


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_calls_alone_are_no_text_wherever_they_are_cut(calls: CallFormat) -> None:
    found = matcher(grammar=only_calls(calls, SCHEMAS, {}, several=True))
    for seed in range(2):
        text = written(found.deep_copy(), seed)
        whole = read(MessageFormat(None, calls), text)
        for end in range(len(text) + 1):
            pieces = read(MessageFormat(None, calls), text[:end], is_cut=True)
            assert len(pieces) <= len(whole)
            for piece, one in zip(pieces, whole, strict=False):
                assert isinstance(piece, CallPiece) and isinstance(one, CallPiece) and piece.name == one.name
                assert piece == one or (piece is pieces[-1] and one.arguments.startswith(piece.arguments))


def call(calls: CallFormat, arguments: Mapping[str, Any]) -> str:
    """A call of `weather` as a grammar has it that allows nothing else."""
    listed = {name: {"const": value} for name, value in arguments.items()}
    schema = {"type": "object", "properties": listed, "required": list(listed), "additionalProperties": False}
    return written(matcher(grammar=only_calls(calls, {"weather": schema}, {}, several=False)), 0)


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_texts_with_calls_that_follow_their_schema(calls: CallFormat) -> None:
    good, bad = (call(calls, {"city": "Graz", "days": days, "unit": "C"}) for days in (5, 50))
    lacking, other = call(calls, {"city": "Graz", "days": 5}), good.replace("weather", "climate")
    found = matcher(grammar=text_and_calls(calls, SCHEMAS, {}, several=True))
    lead, text = ("", "") if not calls.open else ("I look [a { <tool or\n", "I look [a { <tool or\n")
    if calls is HARMONY:
        text = f"<|channel|>final<|message|>{text}"
    elif not calls.open:
        text = "I look { ["
    assert passes(found, text) and passes(found, lead + good)
    assert not any(passes(found, lead + one) for one in (bad, lacking, other, good[:-3]))
    assert isinstance(read(MessageFormat(None, calls), lead + good)[-1], CallPiece)
    if calls.open:
        assert passes(found, f"{lead}{good} and\n{good}.") and not passes(found, f"{lead}{good} and\n{bad}")
        alone = matcher(grammar=text_and_calls(calls, SCHEMAS, {}, several=False))
        assert passes(alone, f"{lead}{good} and") and not passes(alone, f"{lead}{good} and {good}")


@pytest.mark.parametrize("calls", CALL_FORMATS, **NAMES)
def test_tools_without_a_schema_take_any_arguments(calls: CallFormat) -> None:
    found = matcher(grammar=text_and_calls(calls, {"weather": {}}, {}, several=True))
    for arguments in ({}, {"city": "Graz"}, {"days": 5, "more": "x"}):
        assert passes(found, call(calls, arguments)), arguments


@pytest.mark.parametrize("calls", [HERMES, HARMONY, GEMMA4, QWEN3_XML, MISTRAL], **NAMES)
def test_marks_that_are_special_tokens(calls: CallFormat) -> None:
    """Markers are special tokens wherever the format has them, and no text between contains them."""
    marks = MessageFormat(THINK, calls).marks
    special = {mark: 1000 + place for place, mark in enumerate(dict.fromkeys(marks))}
    grammars = [
        only_calls(calls, SCHEMAS, special, several=True),
        text_and_calls(calls, SCHEMAS, special, several=True),
        before_answer(MessageFormat(THINK, calls), special, ReasoningPlace.POSSIBLE) or "",
    ]
    for grammar in grammars:
        assert "<[100" in grammar
        literals = [line for line in grammar.splitlines() if not line.startswith("T")]
        assert not any(mark in line for line in literals for mark in special), grammar


ANSWER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS = (
    {"json": ANSWER},
    {"regex": r'\{"a": ?\d+\}'},
    {"choice": ['{"a": 1}']},
    {"grammar": 'start: "{\\"a\\": " /[0-9]+/ "}"'},
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: next(iter(kind)))
def test_an_answer_begins_where_the_reasoning_ends(kind: dict[str, Any]) -> None:
    def found(form: MessageFormat, place: ReasoningPlace) -> LLMatcher:
        return matcher(before=before_answer(form, {}, place), **kind)

    form, good = MessageFormat(THINK), '{"a": 1}'
    begun = found(form, ReasoningPlace.BEGUN)
    assert passes(begun, f'Hm {{"a": <think> 1.\n</think>\n\n{good}')
    assert not any(
        passes(begun, text) for text in (good, "Hm</think>", f"Hm</think>x{good}", f"Hm</think>{good}</think>")
    )
    possible = found(form, ReasoningPlace.POSSIBLE)
    assert passes(possible, good) and passes(possible, f"<think>Hm</think>{good}")
    assert not any(passes(possible, text) for text in ("Hm", f"Hm</think>{good}", f"<think>{good}"))
    for over in (found(form, ReasoningPlace.OVER), found(MessageFormat(), ReasoningPlace.POSSIBLE)):
        assert passes(over, good) and not passes(over, f"<think>Hm</think>{good}")
    harmony = found(MessageFormat(None, HARMONY), ReasoningPlace.OVER)
    analysis, final = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant", "<|channel|>final<|message|>"
    assert passes(harmony, analysis + final + good) and passes(harmony, final + good)
    assert not passes(harmony, good) and not passes(harmony, analysis + good)


def test_calls_that_are_wanted_come_after_the_reasoning() -> None:
    for calls, thought in (
        (HERMES, "Hm</think>\n\n"),
        (HARMONY, "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant"),
    ):
        form, good = MessageFormat(THINK, calls), call(calls, {"city": "Graz", "unit": "C"})
        before = before_answer(form, {}, ReasoningPlace.BEGUN, is_text=False)
        found = matcher(grammar=only_calls(calls, SCHEMAS, {}, several=True), before=before)
        assert passes(found, thought + good) and not passes(found, thought)
        assert passes(found, good) == (calls is HARMONY)


def test_what_comes_before_is_part_of_the_key() -> None:
    plain = StructuredOutputsParams(json=ANSWER)
    assert StructuredOutputsParams(json=ANSWER, before='start: "x"').key != plain.key
    with pytest.raises(UsageError, match=r"structured_outputs\.before must be a text"):
        StructuredOutputsParams(json=ANSWER, before="")
    assert StructuredOutputsParams(json=ANSWER, within="start: @answer").key != plain.key
    with pytest.raises(UsageError, match=r"structured_outputs\.within cannot be combined with before"):
        StructuredOutputsParams(json=ANSWER, within="start: @answer", before='start: "x"')


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("calls", "schemas", "words"),
    [
        (PYTHONIC, {"a-b": {}}, "the tool 'a-b' cannot be called"),
        (PYTHONIC, {"f": {"properties": {"x-y": {}}}}, "the argument 'x-y' cannot be written"),
        (QWEN3_XML, {"f": {"properties": {"x>": {}}}}, "the argument 'x>' cannot be written"),
        (QWEN3_XML, {"f": {"properties": 3}}, "properties must be an object"),
        (QWEN3_XML, {"f": {"required": 3}}, "required a list"),
        (QWEN3_XML, {"f": {"anyOf": [{"type": "object"}, {"type": "null"}]}}, "requires one object"),
        (QWEN3_XML, {"f": {"properties": {"x": {"not": {}}}}}, "not cannot be split into types"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "#/x"}}}}, "'#/x' is not in the schema"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "http://x"}}}}, "leads outside of the schema"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "#/properties/x"}}}}, "too many references"),
        (
            QWEN3_XML,
            {"f": {"properties": {"x": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object"}]}}}},
            "alternatives of lists and objects",
        ),
        (GEMMA4, {"f": {"properties": {"x": _nested(100)}}}, "nested too deeply"),
        (HERMES, {"f": {"properties": {"x": _nested(2000)}}}, "nested too deeply"),
        (QWEN3_XML, {"f": {"properties": {"x": _nested(2000)}}}, "nested too deeply"),
        (
            GEMMA4,
            {"f": {"properties": {name: {"$ref": "#"} for name in "abc"}}},
            "refer to themselves|nested too deeply",
        ),
    ],
)
def test_schemas_that_a_form_cannot_hold(calls: CallFormat, schemas: Mapping[str, Any], words: str) -> None:
    for several in (True, False):
        with pytest.raises(UsageError, match=words):
            only_calls(calls, schemas, {}, several=several)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "pattern": "^a/b"}, ["a/b", "a/bc\n"], ["xa/b", ""]),
        ({"type": "string", "pattern": r"\d\/$"}, ["5/", "x5/"], ["5/x"]),
        ({"type": "string", "pattern": "b"}, ["abc"], ["a"]),
        ({"type": "string", "maxLength": 2}, ["", "\n", "ab"], ["abc"]),
        ({"enum": ["a b", 5, True]}, ["a b", "5", "true"], ["a", "false", "6"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, ["a", "null"], ["b"]),
        ({"const": 'it\'s "x"'}, ['it\'s "x"'], ["x"]),
        ({"type": ["boolean", "string"], "maxLength": 2}, ["true", "ab"], ["abc"]),
        ({"type": "string"}, ["null", "<p>", "x </parameter"], ["</function>", "<tool_call>", "a</parameter>b"]),
        ({}, ["x", '{"a": 1}'], ["<parameter="]),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, ['{"a": 1}'], ["x", '{"a": "b"}']),
    ],
    ids=str,
)
def test_bare_texts(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    found = matcher(
        grammar=only_calls(QWEN3_XML, {"f": {"properties": {"x": schema}, "required": ["x"]}}, {}, several=False)
    )

    def whole(text: str) -> str:
        return f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"

    assert [text for text in good if not passes(found, whole(text))] == []
    assert [text for text in bad if passes(found, whole(text))] == []


def test_a_message_of_calls_without_marks_begins_with_one() -> None:
    """Any other text does not begin so."""
    for calls, text in ((LLAMA3_JSON, '{"a": 1}'), (PYTHONIC, "[1]")):
        found = matcher(grammar=text_and_calls(calls, SCHEMAS, {}, several=True))
        assert passes(found, f"So: {text}") and passes(found, "") and not passes(found, text)
        assert not passes(found, f" \n{text}")
