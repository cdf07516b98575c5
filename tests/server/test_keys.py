"""Keys of bodies that nothing uses: named in a warning, or refused by `--strict-keys`; and what clients really send."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from enginewright.runtime.server import keys
from enginewright.runtime.server.anthropic_body import MESSAGES_KEYS
from enginewright.runtime.server.chat import CHAT_KEYS
from enginewright.runtime.server.completions import COMPLETION_KEYS
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.keys import MAX_NAME_CHARS, MAX_NAMED, Known, UnusedKeys, used_keys
from enginewright.runtime.server.responses_body import RESPONSES_KEYS
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Answer, Running, running

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
WARNING = "x-enginewright-warning"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO, "max_tokens": 1},
    COMPLETIONS: {"prompt": "x", "max_tokens": 1},
    RESPONSES: {"input": "x", "max_output_tokens": 1},
    MESSAGES: {"messages": HELLO, "max_tokens": 1},
    COUNT: {"messages": HELLO},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
SERVER = {"kind": "calls tools"}


@pytest.fixture(scope="module")
def strict() -> Iterator[Running]:
    with running(kind="calls tools", strict_keys=True) as opened:
        yield opened


def message_of(answer: Answer) -> str:
    text: str = answer.json["error"]["message"]
    return text


def both(server: Running, strict: Running, path: str, **given: Any) -> str:
    """The warning about keys that are added to a good body; a strict server refuses them in the same words."""
    answer, refused = (one.post(path, {**GOOD[path], **given}) for one in (server, strict))
    assert answer.status == 200, answer.body
    assert refused.status == 400 and message_of(refused) == answer.headers[WARNING], refused.body
    return answer.headers[WARNING]


@pytest.mark.parametrize("path", GOOD)
def test_an_unknown_key_is_named(server: Running, strict: Running, path: str) -> None:
    assert both(server, strict, path, frobnicate=1) == "frobnicate is an unknown key"
    for one in (server, strict):
        answer = one.post(path, {**GOOD[path], "frobnicate": None, "logprobs": None})
        assert answer.status == 200 and WARNING not in answer.headers


def test_the_nearest_key_is_suggested(server: Running, strict: Running) -> None:
    said = "temprature is an unknown key: did you mean temperature?"
    assert both(server, strict, CHAT, temprature=0) == both(server, strict, COMPLETIONS, temprature=0) == said
    assert both(server, strict, RESPONSES, max_output_token=5).endswith("did you mean max_output_tokens?")
    stream = server.post(CHAT, {**GOOD[CHAT], "stream": True, "temprature": 0})
    assert stream.headers[WARNING] == said and stream.events[-1] == "[DONE]"


@pytest.mark.parametrize(
    ("path", "given", "name"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x", "contents": 5}]}, "messages[0].contents"),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "user", "content": [{"type": "text", "text": "x", "txet": 1}]}]},
            "messages[1].content[0].txet",
        ),
        (CHAT, {"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}]}, "tools[0].function.x"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "response_format.x"),
        (CHAT, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (MESSAGES, {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        (MESSAGES, {"system": [{"type": "text", "text": "x", "x": 1}]}, "system[0].x"),
        (MESSAGES, {"thinking": {"type": "disabled", "x": 1}}, "thinking.x"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "parameters": {}}]}, "tools[0].parameters"),
        (RESPONSES, {"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
        (RESPONSES, {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        (RESPONSES, {"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_unknown_keys_of_objects(server: Running, strict: Running, path: str, given: Any, name: str) -> None:
    assert both(server, strict, path, **given).startswith(f"{name} is an unknown key")


@pytest.mark.parametrize(
    ("path", "tool", "function"),
    [
        (CHAT, {"type": "custom", "custom": {"name": "patch"}}, {"type": "function", "function": FUNCTION}),
        *((RESPONSES, {"type": kind, "name": "x"}, {"type": "function", **FUNCTION})
          for kind in ("web_search", "namespace", "custom", "image_generation", "local_shell", "mcp", "file_search")),
        (MESSAGES, {"type": "web_search_20250305", "name": "web_search"}, {"name": "add", "input_schema": {}}),
        (MESSAGES, {"type": "bash_20250124", "name": "bash"}, {"name": "add", "input_schema": {}}),
    ],
)  # fmt: skip
def test_hosted_tools_are_left_out(server: Running, strict: Running, path: str, tool: Any, function: Any) -> None:
    """The template gets the others, and errors in them name their positions in the body."""
    said = both(server, strict, path, tools=[tool, function])
    assert said.startswith(f"tools[0] is not implemented: its type is {tool['type']}, not ")

    def prompt_tokens(tools: list[Any]) -> int:
        usage = server.post(path, {**GOOD[path], "tools": tools}).json["usage"]
        return next(usage[key] for key in ("prompt_tokens", "input_tokens") if key in usage) + usage.get(
            "cache_read_input_tokens", 0
        )

    assert prompt_tokens([tool, function]) == prompt_tokens([function]) > prompt_tokens([tool]) == prompt_tokens([])
    wrong = json.loads(json.dumps(function).replace('"add"', '"a b"'))
    answer = server.post(path, {**GOOD[path], "tools": [tool, function, wrong]})
    assert answer.status == 400 and message_of(answer).startswith("tools[2].")
    named = {"type": "tool", "name": tool.get("name", "")} if path == MESSAGES else {"type": tool["type"]}
    answer = server.post(path, {**GOOD[path], "tools": [tool, function], "tool_choice": named})
    assert answer.status == 400 and message_of(answer).startswith("tool_choice")


def test_efforts_that_a_template_does_not_know(server: Running, strict: Running) -> None:
    why = "is not implemented: the model's chat template knows none"
    assert both(server, strict, CHAT, reasoning_effort="low") == f"reasoning_effort {why}"
    assert both(server, strict, RESPONSES, reasoning={"effort": "high"}) == f"reasoning.effort {why}"
    assert both(server, strict, MESSAGES, output_config={"effort": "max"}) == f"output_config.effort {why}"
    assert both(server, strict, COUNT, output_config={"effort": "low"}) == f"output_config.effort {why}"


@pytest.mark.parametrize(
    ("path", "given"),
    [
        (MESSAGES, {"context_management": {"edits": []}}),
        (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        *((MESSAGES, {key: {"x": "y"}}) for key in ("inference_geo", "diagnostics", "user_profile_id", "workspace_id")),
        (
            MESSAGES,
            {
                "tools": [
                    {
                        "name": "f",
                        "input_schema": {},
                        "defer_loading": True,
                        "input_examples": [{"a": 1}],
                        "eager_input_streaming": True,
                    }
                ]
            },
        ),
        (
            MESSAGES,
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
                    *HELLO,
                ]
            },
        ),
        (RESPONSES, {"client_metadata": {"a": "b"}, "access_programs": ["x"]}),
        (RESPONSES, {"truncation": "auto"}),
        (RESPONSES, {"text": {"verbosity": "low"}}),
        (RESPONSES, {"reasoning": {"summary": "detailed", "generate_summary": "auto"}}),
        (RESPONSES, {"max_tool_calls": 3, "include": ["web_search_call.action.sources"]}),
        (
            RESPONSES,
            {
                "input": [
                    {"role": "user", "content": "x"},
                    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "refusal", "refusal": "No."}],
                    },
                    {"role": "user", "content": "x"},
                ]
            },
        ),
        (CHAT, {"verbosity": "high", "prediction": {"type": "content", "content": "x"}}),
        (
            CHAT,
            {
                "no_stop_trim": False,
                "separate_reasoning": True,
                "stream_reasoning": True,
                "return_hidden_states": False,
            },
        ),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": None, "refusal": "No."}, *HELLO]},
        ),
        (
            CHAT,
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HELLO]},
        ),
    ],
)
def test_hints_change_nothing(server: Running, strict: Running, path: str, given: Any) -> None:
    for one in (server, strict):
        answer = one.post(path, {**GOOD[path], **given})
        assert answer.status == 200 and WARNING not in answer.headers, answer.body


@pytest.mark.parametrize("key", ["no_stop_trim", "separate_reasoning", "stream_reasoning", "return_hidden_states"])
def test_other_values_of_routers_keys_are_refused(server: Running, key: str) -> None:
    value = key in ("no_stop_trim", "return_hidden_states")
    answer = server.post(CHAT, {**GOOD[CHAT], key: value})
    assert answer.status == 400 and message_of(answer).startswith(f"{key} is not implemented")


def test_refusals_are_shown_to_the_model(server: Running) -> None:
    """Refusals in the history are texts to the model; encrypted reasoning leaves no empty message."""

    def count(path: str, **given: Any) -> int:
        usage = server.post(path, {**GOOD[path], **given}).json["usage"]
        return int(usage.get("prompt_tokens", usage.get("input_tokens")))

    said, user = {"role": "assistant", "content": "No."}, {"role": "user", "content": "x"}
    plain = count(CHAT, messages=[user, said, user])
    part = {"type": "refusal", "refusal": "No."}
    assert count(CHAT, messages=[user, {"role": "assistant", "content": None, "refusal": "No."}, user]) == plain
    assert count(CHAT, messages=[user, {"role": "assistant", "content": [part]}, user]) == plain
    assert count(RESPONSES, input=[user, {"role": "assistant", "content": [part]}, user]) == plain
    sealed = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
    assert count(RESPONSES, input=[user, sealed, said, user]) == plain
    assert count(RESPONSES, input=[user, said, sealed, user]) == plain


HOSTILE = [
    "a\r\nX-Evil: 1",
    "\n",
    "\x00\x1b[31m",
    "\x7f",
    "é\u2028\U0001f600",
    '"; x is an unknown key',
    "k" * 50_000,
    "\n" * 50_000,
    "",
]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: repr(name[:12]))
def test_names_of_keys_are_escaped(server: Running, strict: Running, name: str) -> None:
    for path, others in (
        (CHAT, {name: 1}),
        (CHAT, {"messages": [{"role": "user", "content": "x", name: 1}]}),
        (RESPONSES, {"tools": [{"type": name}]}),
    ):
        answer = server.post(path, {**GOOD[path], **others})
        assert answer.status == 200 and "x-evil" not in answer.headers, answer.body
        text = answer.headers[WARNING]
        assert text.isascii() and text.isprintable() and len(text) < 300
        assert len(message_of(strict.post(path, {**GOOD[path], **others}))) < 300


@given(st.text(max_size=200))
def test_shown_names_fit_a_header(name: str) -> None:
    text = keys.shown(name)
    assert text.isascii() and text.isprintable() and 0 < len(text) <= MAX_NAME_CHARS + 3


def test_a_warning_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many keys a body has, of which no more are compared with all others than are named."""
    compared: list[str] = []
    monkeypatch.setattr(keys, "get_close_matches", lambda word, *_, **__: compared.append(word) or [])
    unused = UnusedKeys(is_strict=False)
    used = used_keys({"messages": HELLO, **{f"{place}-{'k' * 100}": 1 for place in range(50_000)}}, CHAT_KEYS, unused)
    assert used == {"messages": HELLO} and unused.warning is not None
    assert unused.warning.endswith(f"; and {50_000 - MAX_NAMED} more") and len(unused.warning) < 1000
    assert len(compared) == MAX_NAMED


def test_deep_bodies_are_not_walked_further_than_tables_go() -> None:
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    for known, key in ((CHAT_KEYS, "messages"), (RESPONSES_KEYS, "input"), (MESSAGES_KEYS, "system")):
        assert used_keys({key: deep}, known, UnusedKeys(is_strict=True)) == {key: deep}


def tables(known: Any) -> Iterator[Known]:
    """A table, and all in it."""
    if isinstance(known, keys.Kinds):
        for one in known.by_type.values():
            yield from tables(one)
    elif known is not None:
        yield known
        for one in known.read.values():
            yield from tables(one)


@pytest.mark.parametrize("known", [CHAT_KEYS, COMPLETION_KEYS, RESPONSES_KEYS, MESSAGES_KEYS])
def test_tables_name_their_reasons(known: Known) -> None:
    found = list(tables(known))
    for table in found:
        assert not set(table.read) & set(table.unread)
        assert set(table.kind.__struct_fields__) <= set(table.read)
        assert not msgspec.inspect.type_info(table.kind).forbid_unknown_fields  # type: ignore[attr-defined]
        assert all(one.why and one.why[0].islower() for one in table.unread.values())
    with pytest.raises(ApiError, match="is an unknown key"):
        used_keys({"frobnicate": 1}, known, UnusedKeys(is_strict=True))
