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
from enginewright.runtime.grammar_worker import answer
from enginewright.runtime.messages.calls import Arguments, Call, CallFormat
from enginewright.runtime.messages.formats import CALL_FORMATS, REASONING_FORMATS, new_parser
from enginewright.runtime.messages.gemma import GEMMA4
from enginewright.runtime.messages.grammar import before_answer, only_calls, text_and_calls
from enginewright.runtime.messages.harmony import HARMONY
from enginewright.runtime.messages.hermes import HERMES
from enginewright.runtime.messages.llama3_json import LLAMA3_JSON
from enginewright.runtime.messages.mistral import MISTRAL
from enginewright.runtime.messages.parser import MessageFormat, Piece, ReasoningPlace
from enginewright.runtime.messages.pythonic import PYTHONIC
from enginewright.runtime.messages.qwen3_xml import QWEN3_XML
from enginewright.runtime.structured_outputs import StructuredOutputsParams
from enginewright.runtime.tokenizer import Tokenizer
from tests.helpers.tiny import MemoryCheckpoint

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
def tokenizer() -> Tokenizer:
    return Tokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None)


@cache
def trie() -> LLTokenizer:
    return LLTokenizer(tokenizer().to_json(), len(tokenizer()), [end()])


def end() -> int:
    token = tokenizer().token_id("<|end|>")
    assert token is not None
    return token


def matcher(**wanted: Any) -> LLMatcher:
    """Of a grammar as the engine compiles it."""
    reply = answer(wanted)
    assert "source" in reply, reply
    return LLMatcher(trie(), reply["source"], log_level=0)


def written(found: LLMatcher, seed: int) -> str:
    """What noise writes under a grammar until it may end, and does."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < 3000:
        bits = np.unpackbits(np.frombuffer(found.compute_bitmask(), np.uint8), bitorder="little")
        token = rng.choice(bits.nonzero()[0].tolist())
        if token == end():
            return tokenizer().decode(tokens, skip_special_tokens=False)
        assert found.consume_token(token)
        tokens.append(token)
    raise AssertionError("it does not end")


def passes(found: LLMatcher, text: str) -> bool:
    """Whether a text is one of a grammar's."""
    found = found.deep_copy()
    # Character by character, since whole marks are special tokens of this tokenizer's.
    tokens = [token for char in text for token in tokenizer().encode(char, add_special_tokens=False)]
    return found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting()


def read(form: MessageFormat, text: str) -> list[Piece]:
    """What a message is, arguments with their call."""
    parser = new_parser(form, SCHEMAS)
    assert parser is not None
    pieces = list[Piece]()
    for piece in parser.push(text) + parser.end():
        if isinstance(piece, Arguments):
            assert isinstance(pieces[-1], Call)
            piece = Call(pieces[-1].name, pieces.pop().arguments + piece.text)  # type: ignore[union-attr]
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
            assert isinstance(piece, Call), text
            jsonschema.validate(json.loads(piece.arguments), SCHEMAS[piece.name])
        counts.append(len(pieces))
    assert min(counts) == 1
    assert (max(counts) > 1) == (several and calls is not HARMONY)  # which ends its answer with a call


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
    assert isinstance(read(MessageFormat(None, calls), lead + good)[-1], Call)
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
    """They stand as tokens wherever they are a part of the form, and no text between has them."""
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


def test_calls_that_are_wanted_come_behind_the_reasoning() -> None:
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
        (QWEN3_XML, {"f": {"anyOf": [{"type": "object"}, {"type": "null"}]}}, "wants one object"),
        (QWEN3_XML, {"f": {"properties": {"x": {"not": {}}}}}, "not cannot be taken apart"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "#/x"}}}}, "'#/x' is not in the schema"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "http://x"}}}}, "leads out of the schema"),
        (QWEN3_XML, {"f": {"properties": {"x": {"$ref": "#/properties/x"}}}}, "too many references"),
        (
            QWEN3_XML,
            {"f": {"properties": {"x": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "object"}]}}}},
            "beside lists and objects",
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
