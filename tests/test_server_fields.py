"""Every key of every API: a value of a wrong type is refused by the key's name, and so is what is not implemented."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_type_hints

import msgspec
import pytest

from enginewright.runtime.server import anthropic_body, protocol, responses_body
from enginewright.runtime.server.anthropic_body import MessagesBody
from enginewright.runtime.server.chat import MESSAGE_OFF, PART_OFF, ChatBody
from enginewright.runtime.server.completions import CompletionBody
from enginewright.runtime.server.embeddings import EmbeddingBody, RerankBody, ScoreBody
from enginewright.runtime.server.responses_body import ResponsesBody
from enginewright.runtime.server.tokenization import DetokenizeBody, TokenizeBody
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running, running

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# By path: what a body is read into, keys that it shares with a chat, and a body that is good.
BODIES: Mapping[str, tuple[type[msgspec.Struct], Sequence[str], dict[str, Any]]] = {
    CHAT: (ChatBody, (), {"messages": HELLO, "max_tokens": 1}),
    COMPLETIONS: (CompletionBody, (), {"prompt": "x", "max_tokens": 1}),
    RESPONSES: (ResponsesBody, responses_body.SAME, {"input": "x", "max_output_tokens": 1}),
    MESSAGES: (MessagesBody, anthropic_body.SAME, {"messages": HELLO, "max_tokens": 1}),
    COUNT: (MessagesBody, anthropic_body.SAME, {"messages": HELLO}),
    "/v1/embeddings": (EmbeddingBody, (), {"input": "x"}),
    "/v1/rerank": (RerankBody, (), {"query": "x", "documents": ["y"]}),
    "/v1/score": (ScoreBody, (), {"text_1": "x", "text_2": "y"}),
    "/tokenize": (TokenizeBody, (), {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, (), {"tokens": [5]}),
}
OFF: Mapping[str, Mapping[str, Sequence[Any]]] = {
    CHAT: protocol.OFF,
    COMPLETIONS: protocol.OFF,
    RESPONSES: responses_body.OFF,
    MESSAGES: anthropic_body.OFF,
}
VALUES: Sequence[Any] = (True, 7, "x", [[0.5]], {"x": [0.5]})


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as opened:
        yield opened


def wrong_values(path: str) -> Iterator[tuple[str, Any]]:
    """Each key of a body, with each of VALUES that its type does not have."""
    kind, same, _ = BODIES[path]
    hints = get_type_hints(kind) | {name: get_type_hints(ChatBody)[name] for name in same}
    for key, hint in hints.items():
        for value in VALUES:
            try:
                msgspec.convert({"key": value}, dict[str, hint], str_keys=True)
            except msgspec.ValidationError:
                yield key, value


@pytest.mark.parametrize("path", BODIES)
def test_a_wrong_type_is_refused_by_its_key(server: Running, path: str) -> None:
    kind, same, good = BODIES[path]
    wrong = list(wrong_values(path))
    assert {key for key, _ in wrong} == {*kind.__struct_fields__, *same}
    for key, value in wrong:
        answer = server.post(path, {**good, key: value})
        assert answer.status == 400, (key, value, answer.body)
        message = answer.json["error"]["message"]
        assert message.startswith(key), (key, value, message)
        assert any(word in message for word in ("expected `", "is missing", "unknown field", "invalid enum"))


@pytest.mark.parametrize("path", OFF)
def test_what_is_not_implemented_is_refused_by_its_key(server: Running, path: str) -> None:
    """And taken where it asks for nothing."""
    kind, same, good = BODIES[path]
    for key, harmless in OFF[path].items():
        if key in (*kind.__struct_fields__, *same):
            continue
        for value in VALUES:
            answer = server.post(path, {**good, key: value})
            assert answer.status == (200 if protocol.is_off(value, harmless) else 400), (key, value, answer.body)
            assert answer.status == 200 or answer.json["error"]["message"].startswith(f"{key} is not implemented")
        for value in (None, *harmless):
            assert server.post(path, {**good, key: value}).status == 200, (key, value)


def test_what_is_not_implemented_of_messages_and_tools(server: Running) -> None:
    part = {"type": "text", "text": "x"}
    for key in MESSAGE_OFF:
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": "x", key: {"x": 1}}]})
        assert answer.error["message"] == f"messages[0].{key} is not implemented"
    for key in PART_OFF:
        answer = server.post(CHAT, {"messages": [{"role": "user", "content": [part | {key: {"x": 1}}]}]})
        assert answer.error["message"] == f"messages[0].content[0].{key} is not implemented"
    for key in anthropic_body.TOOL_OFF:
        tool = {"name": "f", "input_schema": {}, key: [5]}
        answer = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 1, "tools": [tool]})
        assert answer.json["error"]["message"] == f"tools[0].{key} is not implemented"
