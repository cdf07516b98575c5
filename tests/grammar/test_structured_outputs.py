"""Answers that have to be something: JSON of a schema, a match, one of some texts, a sentence of a grammar."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest
from click.testing import CliRunner

from enginewright import LLM, SamplingParams, StructuredOutputsParams
from enginewright.cli import main
from enginewright.errors import UsageError
from enginewright.runtime.api.vllm_options import runtime_config
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.stats import Stats
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.grammar.grammar_protocol import LIMITS as LEXER_LIMITS
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.sampling.token_mask import WORD_BITS, Mask
from tests.helpers.late_executor import LateExecutor
from tests.helpers.schemas import BOUNDED, check_answers
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LIMITS, Running, tiny_engine

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SERVER = {"served_model_names": ("tiny",)}


class Person(pydantic.BaseModel, extra="forbid"):
    """What PERSON describes."""

    name: str = pydantic.Field(max_length=5)
    kind: Literal["cat", "dog"]
    ages: list[Annotated[int, pydantic.Field(ge=0, le=99)]] = pydantic.Field(default=[], max_length=2)


def texts(llm: LLM, n: int = 4, **wanted: Any) -> list[str]:
    """Random answers that have come to their own end."""
    structured = StructuredOutputsParams(**wanted)
    params = SamplingParams(n=n, max_tokens=400, seed=3, structured_outputs=structured)
    (output,) = llm.generate(["An answer: "], params)
    assert {one.finish_reason for one in output.outputs} == {"stop"}
    return [one.text for one in output.outputs]


def test_json_follows_its_schema(llm: LLM) -> None:
    found = texts(llm, 8, json=PERSON)
    assert len(set(found)) == 8
    for text in found:
        Person.model_validate_json(text)
    assert found == texts(llm, 8, json=json.dumps(PERSON)), "the text of a schema is the schema"


def test_a_structure_does_not_care_for_company(llm: LLM) -> None:
    wanted = [{"json": PERSON}, {"regex": r"\d{2}-[a-c]+"}, {"choice": ["cat", "caterpillar"]}]
    params = [SamplingParams(max_tokens=40, seed=1, structured_outputs=one) for one in wanted]  # type: ignore[arg-type]
    free = SamplingParams(max_tokens=40, seed=1)
    prompts = ["One: ", "Two: ", "Three: ", "Four: "]
    together = llm.generate(prompts, [*params, free])
    alone = [llm.generate([prompt], [one])[0] for prompt, one in zip(prompts, [*params, free], strict=True)]
    assert [one.outputs[0] for one in together] == [one.outputs[0] for one in alone]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ({"const": 'é"/'}, r'"é\\"/"'),
        ({"type": "string", "format": "date"}, r'"\d{4}-\d\d-\d\d"'),
        ({"type": "string", "pattern": "^[ab]{3}$"}, '"[ab]{3}"'),
        ({"oneOf": [{"const": 1}, {"const": None}]}, "1|null"),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}, r"\[\s*(true|false)\s*,.*\]"),
        ({"$defs": {"a": {"enum": [0.5]}}, "$ref": "#/$defs/a"}, r"0\.5"),
    ],
)
def test_schemas(llm: LLM, schema: dict[str, Any], pattern: str) -> None:
    for text in texts(llm, 2, json=schema):
        json.loads(text)
        assert re.fullmatch(pattern, text, re.DOTALL), text


def test_answers_follow_bounded_schemas(llm: LLM) -> None:
    """A part of what tests/long/test_structured_outputs.py does with all of them."""
    schemas = list(BOUNDED.values())[::6]
    params = [
        SamplingParams(n=2, max_tokens=200, seed=seed, structured_outputs=StructuredOutputsParams(json=schema))
        for seed, schema in enumerate(schemas)
    ]
    assert check_answers(schemas, llm.generate(["An answer: "] * len(schemas), params)) > len(schemas)


def test_whitespace_has_an_end(llm: LLM) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    found = {*texts(llm, 8, json=schema)}
    assert len(found) > 1 and all(re.fullmatch(r"(\S( |\n[ \t]{0,16})?)+", text) for text in found)
    assert {*texts(llm, json=schema, disable_any_whitespace=True)} == {"[1,1,1]"}
    assert all(text.replace("_", "") == "[1,1,1]" for text in texts(llm, json=schema, whitespace_pattern="_"))


def test_other_structures(llm: LLM) -> None:
    assert {*texts(llm, 16, choice=["a|b", '"d', "é\n"])} == {"a|b", '"d', "é\n"}
    assert all(re.fullmatch(r"[0-9]{3}/[^\s]", text) for text in texts(llm, regex=r"\d{3}/\S"))
    assert all(re.fullmatch("ab{1,3}", text) for text in texts(llm, grammar='start: "a" /b{1,3}/'))
    assert all(re.fullmatch("[xy]z", text) for text in texts(llm, grammar='root ::= ("x" | "y") z\nz ::= "z"'))


def test_the_end_is_the_grammars(llm: LLM) -> None:
    (output,) = llm.generate(["x"], SamplingParams(max_tokens=2, structured_outputs={"json": PERSON}))
    assert output.outputs[0].finish_reason == "length", "max_tokens cuts what is not complete"
    params = SamplingParams(max_tokens=9, logprobs=1, structured_outputs={"choice": ["yes"]})
    (choice,) = llm.generate(["x"], params)[0].outputs
    assert choice.text == "yes" and choice.logprobs is not None
    assert all(one[token].logprob < 0 for one, token in zip(choice.logprobs, choice.token_ids, strict=True))


def test_tokens_without_a_choice_take_no_step_each(llm: LLM) -> None:
    text = "It is always the same. " * 6
    before = llm.stats().num_steps
    params = SamplingParams(max_tokens=200, seed=1, logprobs=3, structured_outputs={"regex": f"{text}[ab]{text}"})
    (choice,) = llm.generate(["x"], params)[0].outputs
    assert re.fullmatch(f"{text}[ab]{text}", choice.text) and choice.logprobs is not None
    assert llm.stats().num_steps - before < len(choice.token_ids) / 4
    (scored,) = llm.generate([[*llm.encode("x"), *choice.token_ids]], SamplingParams(max_tokens=0, prompt_logprobs=3))
    assert scored.prompt_logprobs is not None
    expected = scored.prompt_logprobs[-len(choice.token_ids) :]
    assert choice.logprobs == expected, "as if each had been sampled by itself"


def test_a_grammar_beyond_its_limits_fails_alone(llm: LLM) -> None:
    hard = SamplingParams(
        max_tokens=400,
        seed=0,
        logit_bias=dict.fromkeys(llm.engine.eos_token_ids, -100),
        structured_outputs={"grammar": 'start: s\ns: s s | s s s | "a" | ""'},  # type: ignore[arg-type]
    )
    free = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    failed, whole = llm.generate(["One", "Two"], [hard, free])
    assert (failed.outputs[0].finish_reason, failed.outputs[0].stop_reason) == ("error", "grammar")
    assert whole.outputs == llm.generate(["Two"], free)[0].outputs


def test_what_others_have_answered_changes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matchers of a grammar share their lexer's states, which are limited; each answer by itself needs 200 or more."""
    params = SamplingParams(n=3, max_tokens=100, seed=1, structured_outputs={"regex": "(.*a.{50}.*b.{70})"})  # type: ignore[arg-type]
    found = []
    for limit in (20_000, 500):
        monkeypatch.setitem(LEXER_LIMITS, "max_lexer_states", limit)
        with LLM(tiny_engine(), **LIMITS) as llm:
            found += [llm.generate(["x"], params)[0].outputs for _ in range(2)]
    assert all(one == found[0] for one in found)
    assert {one.finish_reason for one in found[0]} == {"length"}


class SlowSteps:
    """Up from token to token by one to `highest`; what may come next takes `waits` more calls of `wait` each time."""

    failed = False

    def __init__(self, highest: int, waits: int) -> None:
        self._last, self._highest, self._waits, self._left = 0, highest, waits, waits

    @property
    def forced(self) -> list[int]:
        return [self._token(self._last, step) for step in (1, 2, 3)] if self._highest == 1 else []

    @staticmethod
    def _token(last: int, step: int) -> int:
        return 10 + (last - 10 + step) % 200

    def begin(self) -> None:
        """Does nothing: the first mask is being computed."""

    end = rest = begin

    def look(self, tokens: Sequence[int]) -> None:
        """Does nothing: the masks after draft tokens are known with the next one."""

    def wait(self, seconds: float, after: Sequence[int] = ()) -> bool:
        self._left -= 1
        return self._left < 0

    def allow(self, mask: Mask, after: Sequence[int] = ()) -> None:
        assert self._left < 0
        for step in range(1, self._highest + 1):
            token = self._token(after[-1] if after else self._last, step)
            mask[token // WORD_BITS] |= 1 << token % WORD_BITS

    def take(self, token: int) -> None:
        self._last, self._left = token, self._waits


@pytest.mark.parametrize("highest", [5, 1])
@pytest.mark.parametrize("limits", [{}, {"max_model_len": 64, "kv_cache_memory": 130 << 10}])
@pytest.mark.parametrize("executor", [CpuExecutor, LateExecutor])
def test_a_late_mask_delays_its_answer_alone(
    llm: LLM, executor: type[CpuExecutor], highest: int, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("enginewright.runtime.core.engine_core.open_executor", executor)
    free = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    held = SamplingParams(max_tokens=20, seed=2, logprobs=2)
    prompts = [[*range(20 + number, 40)] for number in range(4)]

    def answers(waits: int) -> tuple[list[list[SampledToken]], list[int], Stats]:
        """The tokens of four requests, the last two of which a grammar holds, and when those of the first came."""
        core = EngineCore(llm.engine, runtime_config(**{**LIMITS, **limits}))
        grammars = [(), (), [SlowSteps(highest, waits)], [SlowSteps(highest, waits)]]
        requests = [
            core.request(prompt, held if grammar else free, lambda _: None, grammars=grammar)
            for prompt, grammar in zip(prompts, grammars, strict=True)
        ]
        for request in requests:
            core.add(request)
        tokens: list[list[SampledToken]] = [[] for _ in requests]
        came: list[int] = []
        while core.has_work:
            for request, delta in core.step():
                tokens[requests.index(request)] += delta.tokens
                came += [core.stats().num_steps] if request is requests[0] else []
        stats = core.stats()
        core.close()
        return tokens, came, stats

    (plain, _, before), (tokens, came, after) = answers(0), answers(7)
    assert tokens == plain and [len(one) for one in plain] == [30, 30, 20, 20]
    assert came == list(range(came[0], came[0] + 30)), "a token of the first in each step"
    assert (before.num_preemptions > 0) == (after.num_preemptions > 0) == bool(limits)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "must have one of json, regex, choice, grammar, json_object, not 0"),
    ({"regex": "a", "choice": ["a"]}, "not 2"),
    ({"jsn": {}}, "there is no structured output called jsn: did you mean json?"),
    ({"json": "{"}, "is no JSON schema"),
    ({"json": "[]"}, "is no JSON schema"),
    ({"json": 5}, "structured_outputs.json must be a JSON schema, not 5"),
    ({"json_object": False}, "json_object must be true"),
    ({"regex": ""}, "structured_outputs.regex must be a text"),
    ({"choice": []}, "must be texts, one at least"),
    ({"choice": "yes"}, "must be texts"),
    ({"choice": ["x"] * 10_001}, "must not hold more than 10000 texts"),
    ({"grammar": "x" * 200_000}, "must not be longer than 131072 characters"),
    ({"choice": ["a", "x" * 16_385]}, "must not hold a text of more than 16384 characters"),
    ({"regex": "a{1000000000}"}, "regex must not repeat anything more than 100000 times"),
    ({"regex": "[ab]{0,100001}"}, "regex must not repeat anything more than 100000 times"),
    ({"grammar": 'start: "a"{999999999999999999999999}'}, "grammar must not repeat anything more than 100000 times"),
    ({"json": {"items": {"pattern": "a{1000000}"}}}, "json must not repeat anything more than 100000 times"),
    ({"json": {"patternProperties": {"a{1000000}": {}}}}, "json must not repeat anything more than 100000 times"),
    ({"json": {"properties": {f"p{n}": {} for n in range(1001)}}}, "must not name more than 1000 properties, not 1001"),
    ({"json": {"const": "\ud800"}}, "holds what is no JSON"),
    ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace goes with json or json_object"),
    ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern goes with json or json_object"),
    (
        {"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True},
        "whitespace_pattern cannot be combined with disable_any_whitespace",
    ),
]
CHAIN = "\n".join(f"r{n}: r{n + 1}" for n in range(5000))
UNCOMPILABLE: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "foo"}}, "Invalid type: foo"),
    ({"json": {"not": {"type": "string"}}}, "not cannot be held"),
    ({"json": {"type": "string", "format": "wombat"}}, "the format 'wombat' is not known"),
    ({"json": {"enum": []}}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/none"}}, "Pointer '/$defs/none' does not exist"),
    ({"json": {"$ref": "#"}}, "no text follows it"),
    ({"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, "no text"),
    ({"json": {"$ref": "http://example.com/x.json"}}, "Resource 'http://example.com/x.json' is not present"),
    ({"json": {"type": "number", "multipleOf": 1e-300}}, "multipleOf cannot be held: it has too many digits"),
    ({"json": {"type": "integer", "maximum": -(10**300)}}, "maximum: this range of integers cannot be held"),
    ({"grammar": "start: start"}, "no text follows it"),
    ({"json": {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for n in range(9)]} for m in range(20)]}}, ""),
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "(" * 5000 + "a" + ")" * 5000}, ""),
    ({"grammar": "start: other"}, 'unknown name: "other"'),
    ({"grammar": "root ::= ("}, ""),
    ({"grammar": "("}, ""),
    ({"grammar": "start: " + "(" * 3000 + '"a"' + ")" * 3000}, "nested"),
    ({"whitespace_pattern": "(", "json_object": True}, ""),
    ({"grammar": f'start: r0\n{CHAIN}\nr5000: "x"'}, "nested too deeply"),
    ({"grammar": "root ::= r0\n" + CHAIN.replace(":", " ::=") + '\nr5000 ::= "x"'}, ""),
    ({"json": {"allOf": [{"type": "string", "pattern": f".*{n}.*"} for n in range(200)]}}, "it takes more than"),
    ({"regex": "((a{1000}){1000}){1000}"}, "it takes more than"),
]


@pytest.mark.parametrize(("wanted", "why"), WRONG)
def test_what_cannot_be_asked(wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        SamplingParams(structured_outputs=wanted)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "why"), UNCOMPILABLE)
def test_what_cannot_be_compiled(llm: LLM, wanted: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=f"structured_outputs cannot be compiled: .*{re.escape(why)}"):
        llm.generate(["x"], SamplingParams(structured_outputs=wanted))  # type: ignore[arg-type]


def test_deep_json_is_refused(llm: LLM) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(500):
        schema = {"type": "array", "items": schema}
    with pytest.raises(UsageError, match="recursion limit exceeded"):
        llm.generate(["x"], SamplingParams(structured_outputs=StructuredOutputsParams(json=schema)))


@pytest.mark.parametrize("also", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_what_would_keep_an_answer_from_its_end(also: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="makes no sense with structured_outputs"):
        SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True), **also)


# Over HTTP


def test_response_format(server: Running, llm: LLM) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    asked = {"max_tokens": 400, "seed": 5, "temperature": 1}
    found = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Person, **asked)  # type: ignore[call-overload]
    (choice,) = found.choices
    assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Person)
    named = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True}}
    body = {"messages": HELLO, "response_format": named, "stream": True}
    events = server.post(CHAT, asked | body).events
    Person.model_validate_json("".join(event["choices"][0]["delta"].get("content", "") for event in events[:-1]))
    answer = server.complete("x", ignore_eos=None, response_format={"type": "json_object"}, **asked)
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(answer["choices"][0]["text"]), dict)


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": ["ab", "ac"]}},
        {"guided_choice": ["ab", "ac"]},
        {"guided_regex": "a[bc]"},
        {"guided_grammar": 'start: "a" /[bc]/'},
        {"guided_json": {"enum": ["ab", "ac"]}},
    ],
)
def test_vllms_names(server: Running, asked: dict[str, Any]) -> None:
    (choice,) = server.complete("x", max_tokens=20, temperature=1, ignore_eos=None, **asked)["choices"]
    assert choice["text"].strip('"') in ("ab", "ac") and choice["finish_reason"] == "stop"


ONE_OF = "must have one of json, regex, choice, grammar, json_object"
SCHEMA_OF = "response_format.json_schema.schema"
REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"response_format": "json"}, "response_format", "expected `object | null`, got `str`"),
    ({"response_format": {}}, "response_format.type", "response_format.type is missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid enum value 'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "response_format has no json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, SCHEMA_OF, "schema is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, SCHEMA_OF, "expected `object`"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
        "response_format.json_schema.strict",
        "expected `bool | null`, got `int`",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
        "response_format",
        "response_format cannot be compiled: Invalid type: foo",
    ),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "response_format.json_schema is only for the type json_schema",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "is only for the type json_schema",
    ),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "is only for the type json_object"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", "cannot be combined"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "makes no sense with structured"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "makes no sense with structured"),
    ({"structured_outputs": []}, "structured_outputs", "expected `object | null`, got `array`"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", f"{ONE_OF}, not 2"),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", f"{ONE_OF}, not 0"),
    (
        {"structured_outputs": {"structural_tag": "a"}},
        "structured_outputs",
        "no structured output called structural_tag",
    ),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "choice must be texts, one at least"),
    ({"structured_outputs": {"json_object": True, "whitespace_pattern": 5}}, "structured_outputs", "must be a text"),
    ({"structured_outputs": {"json_object": True, "disable_any_whitespace": 5}}, "structured_outputs", "true or false"),
    ({"guided_choice": []}, "guided_choice", "must be texts, one at least"),
    ({"guided_choice": "a"}, "guided_choice", "expected `array | null`, got `str`"),
    ({"guided_choice": [5]}, "guided_choice[0]", "expected `str`, got `int`"),
    ({"guided_choice": ["x"] * 10_001}, "guided_choice", "must not hold more than 10000 texts"),
    ({"guided_regex": 5}, "guided_regex", "expected `str | null`, got `int`"),
    ({"guided_regex": ""}, "guided_regex", "regex must be a text, not ''"),
    ({"guided_regex": "x" * 200_000}, "guided_regex", "must not be longer than 131072 characters"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
    ({"guided_json": 5}, "guided_json", "expected `str | object | null`, got `int`"),
    ({"guided_json": "{"}, "guided_json", "json is no JSON schema"),
    ({"guided_json": {"type": "foo"}}, "guided_json", "Invalid type: foo"),
    ({"guided_json": {"$ref": "#"}}, "guided_json", "no text follows it"),
    ({"guided_grammar": {}}, "guided_grammar", "expected `str | null`, got `object`"),
    ({"guided_grammar": ""}, "guided_grammar", "grammar must be a text, not ''"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "structured_outputs cannot be compiled"),
    ({"guided_grammar": "start: other"}, "guided_grammar", 'unknown name: "other"'),
]


@pytest.mark.parametrize(("asked", "param", "why"), REFUSED)
def test_refusals(server: Running, asked: dict[str, Any], param: str | None, why: str) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", **asked})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert why in answer.error["message"]


def test_a_grammar_beyond_its_limits_over_http(server: Running) -> None:
    grammar = 'start: s\ns: s s | s s s | "a" | ""'
    ends = {str(token): -100 for token in (1, 2)}
    answer = server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 400, "guided_grammar": grammar, "logit_bias": ends})
    assert (answer.status, answer.error["code"]) == (400, "grammar")


# The command


def test_engine_generate(tmp_path: Path) -> None:
    def run(*options: str) -> str:
        result = CliRunner().invoke(main, ["generate", str(tiny_engine()), "-p", "x", "--temperature", "1", *options])
        assert result.exit_code == 0, result.stderr
        return result.stdout.strip()

    assert run("--choice", "up", "--choice", "down") in ("up", "down")
    Person.model_validate_json(run("--json-schema", json.dumps(PERSON), "--max-tokens", "400"))
    assert re.fullmatch("a[0-9]", run("--regex", r"a\d"))
    assert run("--grammar", 'start: "z"') == "z"


def test_a_batch(tmp_path: Path) -> None:
    lines = [
        {"id": 1, "prompt": "x", "structured_outputs": {"choice": ["up"]}},
        {
            "custom_id": "2",
            "method": "POST",
            "url": COMPLETIONS,
            "body": {
                "prompt": "x",
                "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 7}}},
            },
        },
    ]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    result = CliRunner().invoke(main, ["generate", str(tiny_engine()), "--input", str(tmp_path / "in")])
    assert result.exit_code == 0, result.stderr
    first, second = map(json.loads, result.stdout.splitlines())
    assert first["text"] == "up" and second["response"]["body"]["choices"][0]["text"] == "7"
