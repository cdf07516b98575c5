"""Random answers under many schemas: each that comes to its own end is what its schema says."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from enginewright import LLM, SamplingParams, StructuredOutputsParams
from tests.helpers.schemas import BOUNDED, check_answers
from tests.helpers.serving import COMPLETIONS, LIMITS, running, tiny_engine


def test_every_answer_that_ends_is_valid() -> None:
    every = list(BOUNDED.values())
    assert len(every) == 50
    with LLM(tiny_engine(), **LIMITS) as llm:
        params = [
            SamplingParams(n=10, max_tokens=600, seed=seed, structured_outputs=StructuredOutputsParams(json=schema))
            for seed, schema in enumerate(every)
        ]
        assert check_answers(every, llm.generate(["An answer: "] * len(every), params)) > 450


def nested(depth: int, wrap: Callable[[Any], Any]) -> Any:
    inner: Any = {"type": "string"}
    for _ in range(depth):
        inner = wrap(inner)
    return inner


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": nested(500, lambda inner: {"type": "array", "items": inner}),
    "deep anyOf": nested(300, lambda inner: {"anyOf": [inner, {"type": "null"}]}),
    "wide": {"properties": {f"p{number}": {} for number in range(1001)}},
    "wide in parts": {"anyOf": [{"properties": {f"p{n}{m}": {} for n in range(50)}} for m in range(30)]},
    "exponential": {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for n in range(9)]} for m in range(20)]},
    "exponential patterns": {"allOf": [{"type": "string", "pattern": f".*{number}.*"} for number in range(200)]},
    "recursive": {"$ref": "#"},
    "recursive in a circle": {
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "recursive allOf": {"allOf": [{"$ref": "#"}]},
    "digits": {"type": "number", "multipleOf": 1e-300},
    "long": {"enum": ["x" * 1000 + str(number) for number in range(200)]},
}


def test_hostile_schemas_hold_nobody_up() -> None:
    """Each is refused, the worker ends those that take more than a second of CPU time, and streams go on."""
    free = {"prompt": "Free", "max_tokens": 3000, "temperature": 1, "seed": 3, "ignore_eos": True, "stream": True}
    with running(served_model_names=("tiny",)) as server, ThreadPoolExecutor() as pool:
        alone = server.post(COMPLETIONS, free).body.count(b"data: ")
        stream = pool.submit(server.post, COMPLETIONS, free)
        refused = {
            name: pool.submit(server.post, COMPLETIONS, {"prompt": "x", "guided_json": schema})
            for name, schema in HOSTILE.items()
        }
        assert {name: answer.result().status for name, answer in refused.items()} == dict.fromkeys(HOSTILE, 400)
        events = stream.result().events
        assert len(events) == alone and events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"


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
