"""Every key of every API: a value of a wrong type is refused by the key's name, and so is what is not implemented."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import pytest

from enginewright.runtime.server import anthropic_body, responses_body
from enginewright.runtime.server.anthropic_body import BLOCKS, MESSAGES_KEYS, MessagesBody
from enginewright.runtime.server.chat import CHAT_KEYS, MESSAGE, ChatBody
from enginewright.runtime.server.completions import COMPLETION_KEYS, CompletionBody
from enginewright.runtime.server.embeddings import EmbeddingBody, RerankBody, ScoreBody
from enginewright.runtime.server.keys import Kinds, Known
from enginewright.runtime.server.openapi import OPERATIONS
from enginewright.runtime.server.protocol import TOOL_UNREAD
from enginewright.runtime.server.responses_body import RESPONSES_KEYS, ResponsesBody
from enginewright.runtime.server.tokenization import DetokenizeBody, TokenizeBody
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
# By path: what a body is read into, keys that it shares with a chat, and a body that is good.
BODIES: Mapping[str, tuple[type[msgspec.Struct], Sequence[str], dict[str, Any]]] = {
    CHAT: (ChatBody, (), {"messages": HELLO, "max_tokens": 1}),
    COMPLETIONS: (CompletionBody, (), {"prompt": "x", "max_tokens": 1}),
    RESPONSES: (ResponsesBody, responses_body.SHARED_KEYS, {"input": "x", "max_output_tokens": 1}),
    f"{CHAT}/render": (ChatBody, (), {"messages": HELLO}),
    f"{COMPLETIONS}/render": (CompletionBody, (), {"prompt": "x"}),
    f"{RESPONSES}/render": (ResponsesBody, responses_body.SHARED_KEYS, {"input": "x"}),
    MESSAGES: (MessagesBody, anthropic_body.SHARED_KEYS, {"messages": HELLO, "max_tokens": 1}),
    COUNT: (MessagesBody, anthropic_body.SHARED_KEYS, {"messages": HELLO}),
    "/v1/embeddings": (EmbeddingBody, (), {"input": "x"}),
    "/v1/rerank": (RerankBody, (), {"query": "x", "documents": ["y"]}),
    "/v1/score": (ScoreBody, (), {"text_1": "x", "text_2": "y"}),
    "/tokenize": (TokenizeBody, (), {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, (), {"tokens": [5]}),
}
TABLES: Mapping[str, Known] = {
    CHAT: CHAT_KEYS,
    COMPLETIONS: COMPLETION_KEYS,
    RESPONSES: RESPONSES_KEYS,
    MESSAGES: MESSAGES_KEYS,
}
VALUES: Sequence[Any] = (True, 7, "x", [[0.5]], {"x": [0.5]})


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


def test_every_route_is_tested_and_in_the_documents() -> None:
    aliases = {"/v2/rerank", "/rerank", "/score"}
    assert set(BODIES) | aliases == {operation.path for operation in OPERATIONS if operation.body is not None}
    text = (Path(__file__).parents[2] / "docs/api.md").read_text()
    names = {operation.path.partition("/{")[0] for operation in OPERATIONS}
    assert [name for name in sorted(names) if f"{name}`" not in text] == []


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
        assert any(word in message for word in ("expected `", "is missing", "invalid enum"))


@pytest.mark.parametrize("path", TABLES)
def test_what_is_not_implemented_is_refused_by_its_key(server: Running, path: str) -> None:
    """Such a key is accepted without a warning at a value that has no effect."""
    good, unread = BODIES[path][2], TABLES[path].unread
    for key, one in unread.items():
        for value in VALUES:
            if not one.is_harmless(value, {}):
                answer = server.post(path, {**good, key: value})
                assert answer.status == 400, (key, value, answer.body)
                assert answer.json["error"]["message"] == f"{key} is not implemented: {one.why}"
    for place in range(max(len(one.harmless or ()) for one in unread.values())):
        harmless = {
            key: [*(one.harmless or ()), None][min(place, len(one.harmless or ()))] for key, one in unread.items()
        }
        answer = server.post(path, {**good, **harmless})
        assert answer.status == 200 and "x-enginewright-warning" not in answer.headers, answer.body
    anything = {key: {"x": [0.5]} for key, one in unread.items() if one.harmless is None}
    answer = server.post(path, {**good, **anything})
    assert answer.status == 200 and "x-enginewright-warning" not in answer.headers, answer.body
    assert len(anything) > 10


def test_what_is_not_implemented_of_messages_and_tools(server: Running) -> None:
    part, parts = {"type": "text", "text": "x"}, MESSAGE.read["content"]
    assert isinstance(parts, Kinds) and MESSAGE.unread and parts.by_type["text"].unread
    for key, one in MESSAGE.unread.items():
        answer = server.post(CHAT, {"max_tokens": 1, "messages": [{"role": "user", "content": "x", key: {"x": 1}}]})
        assert answer.status == (200 if one.harmless is None else 400), answer.body
        assert one.harmless is None or answer.error["message"] == f"messages[0].{key} is not implemented: {one.why}"
    for key, one in parts.by_type["text"].unread.items():
        message = {"role": "user", "content": [part | {key: {"x": 1}}]}
        answer = server.post(CHAT, {"max_tokens": 1, "messages": [message]})
        assert answer.status == (200 if one.harmless is None else 400), answer.body
        assert one.harmless is None or answer.error["message"].startswith(f"messages[0].content[0].{key} is not imple")
    block = {**part, **{key: {"x": 1} for key in BLOCKS.by_type["text"].unread}}
    answer = server.post(MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]})
    assert answer.status == 200, answer.body
    for key, one in TOOL_UNREAD.items():
        tool = {"name": "f", "input_schema": {}, key: {"x": 1}}
        answer = server.post(MESSAGES, {"messages": HELLO, "max_tokens": 1, "tools": [tool]})
        why = "the model's chat template shows no tools"
        said = f"tools: {why}" if one.harmless is None else f"tools[0].{key} is not implemented: {one.why}"
        assert answer.json["error"]["message"].startswith(said)
