"""Calls that `max_tokens` or a stop string cuts, and calls whose arguments JSON hardly has, in all three APIs."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.helpers.serving import CHAT, HELLO, Running, exactly

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ODD = r'{"a": "\ud800", "b": NaN, "c": [-Infinity, 1e999], "d": 123456789012345678901234567890}'
ODD_AS_JSON = ODD.replace("NaN", "null").replace("-Infinity", "null")
SERVER = {"kind": "calls tools"}


@dataclass
class Given:
    """A completion in a client's view."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # the name and the arguments of each
    end: str | None = None  # why it ended, as a chat says it


def chat(server: Running, text: str, stream: bool, **keys: Any) -> Given:
    tools = [{"type": "function", "function": {"name": "add"}}]
    body = {"messages": HELLO, "tools": tools, "structured_outputs": exactly(text), "stream": stream, **keys}
    answer = server.post(CHAT, body)
    assert answer.status == 200, answer.body
    given = Given()
    for value in values(answer.body, stream):
        (choice,) = value["choices"]
        message = choice["delta" if stream else "message"]
        given.content += message.get("content") or ""
        for call in message.get("tool_calls", ()):
            if "name" in call["function"]:
                given.calls.append([call["function"]["name"], ""])
            given.calls[-1][1] += call["function"]["arguments"]
        given.end = choice["finish_reason"]
    return given


def responses(server: Running, text: str, stream: bool, **keys: Any) -> Given:
    keys["max_output_tokens"] = keys.pop("max_tokens")
    tools = [{"type": "function", "name": "add"}]
    body = {"input": "Hello", "tools": tools, "structured_outputs": exactly(text), "stream": stream, **keys}
    answer = server.post(RESPONSES, body)
    assert answer.status == 200, answer.body
    last = values(answer.body, stream)[-1]
    response = last["response"] if stream else last
    given = Given(end="length" if response["status"] == "incomplete" else "tool_calls")
    for item in response["output"]:
        if item["type"] == "function_call":
            given.calls.append([item["name"], item["arguments"]])
        else:
            given.content += "".join(part["text"] for part in item["content"])
    return given


def messages(server: Running, text: str, stream: bool, **keys: Any) -> Given:
    tools = [{"name": "add", "input_schema": {}}]
    body = {"messages": HELLO, "tools": tools, "structured_outputs": exactly(text), "stream": stream, **keys}
    answer = server.post(MESSAGES, body)
    assert answer.status == 200, answer.body
    given, ends = Given(), {"max_tokens": "length", "tool_use": "tool_calls"}
    if not stream:
        (value,) = values(answer.body, stream)
        for block in value["content"]:
            if block["type"] == "tool_use":
                written = block["input"].get("INVALID_JSON", json.dumps(block["input"]) if block["input"] else "")
                given.calls.append([block["name"], written])
            else:
                given.content += block["text"]
        given.end = ends[value["stop_reason"]]
        return given
    for value in values(answer.body, stream):
        match value:
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                given.calls.append([name, ""])
            case {"delta": {"partial_json": part}}:
                given.calls[-1][1] += part
            case {"delta": {"text": part}}:
                given.content += part
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                given.end = ends[reason]
    return given


def values(body: bytes, stream: bool) -> list[Any]:
    """The JSON of a response, or of the events of a stream. JSON has no NaN."""
    lines = [line.removeprefix("data: ") for line in body.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line, parse_constant=refuse) for line in (lines if stream else [body.decode()])]


def refuse(constant: str) -> None:
    raise AssertionError(f"JSON has no {constant}")


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_nothing_of_a_call_is_content_however_few_tokens_there_are(server: Running, ask: Any) -> None:
    tokens = server.llm.engine.tokenizer.encode(CALL, add_special_tokens=False)
    lengths = set[int]()
    for count in range(1, len(tokens)):
        whole, streamed = (ask(server, CALL, stream, max_tokens=count) for stream in (False, True))
        assert whole == streamed
        assert (whole.content, whole.end) == ("", "length"), count
        assert len(whole.calls) <= 1
        for name, arguments in whole.calls:
            assert name == "add" and '{"a": 1}'.startswith(arguments)
            lengths.add(len(arguments))
    assert {0, 8} <= lengths and len(lengths) > 4


@pytest.mark.parametrize("ask", [chat, responses, messages])
def test_arguments_that_json_hardly_has(server: Running, ask: Any) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {ODD}}}\n</tool_call>'
    for stream in (False, True):
        assert ask(server, text, stream, max_tokens=400) == Given("", [["add", ODD_AS_JSON]], "tool_calls")


def test_a_stop_string_cuts_a_call_too(server: Running) -> None:
    for stream in (False, True):
        assert chat(server, CALL, stream, max_tokens=400, stop=["name"]) == Given("", [], "stop")
        text = f"I add.\n{CALL}"
        assert chat(server, text, stream, max_tokens=400, stop=["name"]) == Given("I add.", [], "stop")
