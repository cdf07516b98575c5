"""Hostile values in every key of a body, at every depth: each gets a 400 before anything is computed with it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.sampling import request as sampling_request
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server import protocol
from enginewright.runtime.server.protocol import MAX_CONTAINERS, SAMPLING, UNREAD
from enginewright.runtime.server.wire import SHORT_BODY_BYTES, BodyReader
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LIMITS, Answer, Running, tiny_engine

# What no key may hold: numbers out of range, halves of surrogate pairs, bytes that are no UTF-8, what is no JSON.
NO_VALUES = [b"1e999", b"-1e999", b"9" * 5000, b'"\\ud800"', b'"\\udc00x"', b'"\xff"', b'"\xc3"', b"[" * 3000, b"nul"]
HOLE = "@@"


def bodies() -> Iterator[tuple[str, Any]]:
    """A body for each key at each depth, with a hole in its value."""
    keys = sorted({*SAMPLING, *UNREAD, "model", "stream", "stream_options", "cache_salt", "logprobs"})
    deep: list[Any] = [HOLE, [HOLE], {"x": HOLE}, [{"x": [HOLE]}]]
    for key in keys:
        for value in deep:
            yield COMPLETIONS, {"prompt": "x", key: value}
    for value in deep:
        yield COMPLETIONS, {"prompt": value}
        yield CHAT, {"messages": value}
    part = {"type": "text", "text": "x"}
    for key in ("role", "name", "tool_calls", "refusal", "audio", "annotations", "id", "reasoning_content", "x"):
        for value in deep:
            yield CHAT, {"messages": [{"role": "user", "content": "x", key: value}]}
    for key in ("text", "image_url", "cache_control", "x"):
        for value in deep:
            yield CHAT, {"messages": [{"role": "user", "content": [part | {key: value}]}]}
    for key in ("chat_template_kwargs", "top_logprobs", "max_completion_tokens", "add_generation_prompt"):
        for value in deep:
            yield CHAT, {"messages": [{"role": "user", "content": "x"}], key: value}
    yield COMPLETIONS, {"prompt": "x", HOLE: 1}
    yield CHAT, {"messages": [{"role": "user", "content": "x", HOLE: 1}]}


def test_no_value_of_any_key_is_a_fault_of_the_server(server: Running) -> None:
    count = 0
    for path, body in bodies():
        text = json.dumps(body).encode()
        for value in NO_VALUES:
            answer = server.post(path, text.replace(b'"%s"' % HOLE.encode(), value))
            assert answer.status == 400 and answer.error["code"] == "invalid_json", (path, body, value, answer.body)
            count += 1
    assert count > 2000


def refused(answer: Answer) -> dict[str, Any]:
    assert answer.status == 400, answer.body
    return answer.error


def test_lists_and_objects_are_counted(server: Running) -> None:
    """Each takes a hundred times as long to read as a character; those in texts do not count."""
    many = b"[]," * MAX_CONTAINERS + b"[]"
    error = refused(server.post(COMPLETIONS, b'{"prompt": "x", "metadata": [%s]}' % many))
    assert "lists and objects" in error["message"]
    text = b'{"prompt": "%s"}' % (b"{[" * MAX_CONTAINERS + b'\\"[')
    assert refused(server.post(COMPLETIONS, text))["code"] == "context_length_exceeded"
    unfinished = b'{"prompt": "%s' % (b"[" * MAX_CONTAINERS + b'\\"' * MAX_CONTAINERS)
    assert refused(server.post(COMPLETIONS, unfinished))["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allowed_token_ids", [5] * 400_000),
        ("stop", ["x"] * 400_000),
        ("stop_token_ids", [5] * 400_000),
        ("logit_bias", {str(number): 0 for number in range(200_000)}),
    ],
)
def test_long_lists_are_refused_by_their_length(server: Running, key: str, value: Any) -> None:
    error = refused(server.post(COMPLETIONS, {"prompt": "x", "n": 128, key: value}))
    assert error["param"] == key and "entries" in error["message"]


def test_allowed_tokens_are_looked_at_once_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many answers it has: 128 of a large vocabulary took minutes."""
    calls, made = 0, sampling_request.mask_of

    def counting(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return made(*arguments)

    monkeypatch.setattr(sampling_request, "mask_of", counting)
    with LLM(tiny_engine(), **LIMITS) as llm:
        params = SamplingParams(n=8, max_tokens=2, allowed_token_ids=[7, 9], seed=1)
        (output,) = llm.generate("x", params)
    assert calls == 1 and {token for one in output.outputs for token in one.token_ids} <= {7, 9}


def test_long_bodies_are_given_out_one_in_a_turn() -> None:
    """Work on a long body keeps streams waiting, so streams go on between two of them."""
    log, num_bodies = list[str](), 5
    scope = {"headers": [(b"content-type", b"application/json")]}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"x" * (SHORT_BODY_BYTES + 1), "more_body": False}

    async def read(bodies: BodyReader) -> None:
        await bodies.read(scope, receive)
        log.append("body")

    async def stream() -> None:
        while log.count("body") < num_bodies:
            log.append("stream")
            await asyncio.sleep(0)

    async def main() -> None:
        bodies = BodyReader(1 << 20)
        await asyncio.gather(stream(), *(read(bodies) for _ in range(num_bodies)))

    asyncio.run(main())
    assert "body,body" not in ",".join(log) and log.count("body") == num_bodies


def test_a_structure_is_checked_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema is checked once, because a long one takes milliseconds in which no stream goes on."""
    checked, held = list[StructuredOutputsParams](), list[Any]()
    check, hold = StructuredOutputsParams._check_schema, protocol.held

    def note_check(self: StructuredOutputsParams) -> None:
        checked.append(self)
        check(self)

    def note_hold(schema: Any) -> Any:
        held.append(schema)
        return hold(schema)

    monkeypatch.setattr(StructuredOutputsParams, "_check_schema", note_check)
    monkeypatch.setattr(protocol, "held", note_hold)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    asked = {"response_format": {"type": "json_object", "schema": {"enum": ["a"]}}, "max_tokens": 9}
    for body in (asked, {"tools": [tool], "tool_choice": "required", "max_tokens": 9}):
        answer = server.post(CHAT, {"messages": HELLO, **body})
        assert answer.status in (200, 400), answer.body
        # As it was sent, and once more without what cannot be held.
        assert len(checked) <= 2 and len(held) <= 1, body
        checked.clear()
        held.clear()
