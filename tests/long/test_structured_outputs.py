"""Random answers under many schemas: each that comes to its own end is what its schema says."""

import json
import operator
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest

from enginewright import LLM, SamplingParams, StructuredOutputsParams
from tests.helpers.schemas import BOUNDED, check_answers
from tests.helpers.serving import COMPLETIONS, LIMITS, Answer, Running, running, tiny_engine

MAX_PAUSE_S = 0.5  # half of what the worst schema takes


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
    "long": {"enum": ["x" * 1000 + str(number) for number in range(200)]},
}


def read_stream(server: Running, body: dict[str, Any]) -> tuple[str, float]:
    """The text of a stream of 3000 tokens, and the longest time in seconds between two pieces of it."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    response, pieces, times = connection.getresponse(), [], []
    while piece := response.read1():
        pieces.append(piece)
        times.append(time.monotonic())
    connection.close()
    *events, done = Answer(response.status, {"content-type": "text/event-stream"}, b"".join(pieces)).events
    assert done == "[DONE]" and events[-1]["choices"][0]["finish_reason"] == "length"
    # A slow reader gets several tokens in one event, so the number of events is not always the same.
    return "".join(event["choices"][0]["text"] for event in events), max(map(operator.sub, times[1:], times))


def test_hostile_schemas_hold_nobody_up() -> None:
    """Each is refused, the worker ends those that take more than a second of CPU time, and streams go on."""
    free = {"prompt": "Free", "max_tokens": 3000, "temperature": 1, "seed": 3, "ignore_eos": True, "stream": True}
    with running(served_model_names=("tiny",)) as server, ThreadPoolExecutor() as pool:
        alone, _ = read_stream(server, free)
        stream = pool.submit(read_stream, server, free)
        refused = {
            name: pool.submit(server.post, COMPLETIONS, {"prompt": "x", "guided_json": schema})
            for name, schema in HOSTILE.items()
        }
        assert {name: answer.result().status for name, answer in refused.items()} == dict.fromkeys(HOSTILE, 400)
        text, pause_s = stream.result()
        assert text == alone and pause_s < MAX_PAUSE_S


@pytest.mark.parametrize("num_others", [1, 8])
def test_a_hard_grammar_holds_nobody_up_for_long(num_others: int) -> None:
    """Whatever such a grammar takes, others finish, and with the same tokens."""
    hard = [
        {"grammar": 'start: s\ns: s s | s s s | "a" | ""'},
        {"regex": "a{100000}"},
        {"choice": ["ab" * 8000]},
        {"regex": "(a|b)*a(a|b){30}"},
        {"regex": "(.*a.{50}.*b.{70})"},
        {"json": {"enum": [f"v{number}" for number in range(5000)]}},
    ]
    free = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(tiny_engine(), **LIMITS) as llm:
        (alone,) = llm.generate(["Free"], free)
        params = [SamplingParams(max_tokens=200, seed=0, structured_outputs=one) for one in hard]  # type: ignore[arg-type]
        prompts = ["Hard"] * len(hard) + ["Free"] * num_others
        *_, last = llm.generate(prompts, [*params, *[free] * num_others])
        assert last.outputs == alone.outputs
