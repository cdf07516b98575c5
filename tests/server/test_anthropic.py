"""Anthropic's API over HTTP, with Anthropic's client and by hand."""

import asyncio
import json
from typing import Any

import anthropic
import jsonschema
import pytest

from enginewright.runtime.server.anthropic_body import read_messages
from enginewright.runtime.server.keys import UnusedKeys
from tests.helpers.serving import HELLO, Answer, Running, exactly, named_events, running

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "add", "description": "Adds.", "input_schema": ADD}, {"name": "stop", "input_schema": {}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MESSAGE = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
THINKING: Any = {"type": "enabled", "budget_tokens": 100}
SERVER = {"kind": "calls tools", "served_model_names": ("tiny",), "api_keys": ("key",)}


def asked(text: str = MESSAGE, **keys: Any) -> Any:
    """A request that is answered with this text."""
    wanted = {"structured_outputs": exactly(text)}
    return {"model": "tiny", "max_tokens": 400, "messages": HELLO, "extra_body": wanted, **keys}


def post(server: Running, body: Any, path: str = MESSAGES) -> Answer:
    return server.post(path, {"max_tokens": 8, "messages": HELLO, **body}, {"X-Api-Key": "key"})


def shown(server: Running, claude: anthropic.Anthropic, **keys: Any) -> str:
    """The prompt that the model sees, whose number of tokens count_tokens must give."""
    counted = claude.messages.count_tokens(model="tiny", **keys).input_tokens
    seen: list[Any] = []
    encode = server.llm.encode

    async def noting(prompt: Any, **options: Any) -> list[int]:
        seen.extend(await encode(prompt, **options))
        return seen

    server.llm.encode = noting  # type: ignore[method-assign]
    try:
        assert post(server, {"max_tokens": None} | keys, COUNT).json == {"input_tokens": counted}
    finally:
        server.llm.encode = encode  # type: ignore[method-assign]
    assert len(seen) == counted
    return server.llm.engine.tokenizer.decode(seen)


def test_blocks(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(**asked(tools=TOOLS, thinking=THINKING))
    thinking, text, *calls = message.content
    assert thinking.type == "thinking" and thinking.thinking == "Hm." and thinking.signature
    assert text.type == "text" and text.text == "I add."
    assert [call.type == "tool_use" and (call.name, call.input) for call in calls] == [("add", {"a": 1})] * 2
    assert len({call.id for call in calls if call.type == "tool_use"}) == 2
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "tiny")
    with claude.messages.stream(**asked(tools=TOOLS, thinking=THINKING)) as stream:
        again = stream.get_final_message()
    for one, other in zip(message.content, again.content, strict=True):
        ids = {"id", "signature"}
        assert other.model_dump(exclude=ids | {"parsed_output"}) == one.model_dump(exclude=ids)
    assert again.stop_reason == "tool_use" and again.usage.output_tokens == message.usage.output_tokens


def test_async_client(server: Running) -> None:
    async def ask() -> list[str]:
        url = f"http://127.0.0.1:{server.port}"
        async with (
            anthropic.AsyncAnthropic(base_url=url, api_key="key", max_retries=0) as client,
            client.messages.stream(**asked("Yes, I do.")) as stream,
        ):
            return [text async for text in stream.text_stream]

    assert "".join(asyncio.run(ask())) == "Yes, I do."


def test_events(server: Running) -> None:
    body = {"max_tokens": 400, "tools": TOOLS, "thinking": THINKING, "structured_outputs": exactly(MESSAGE)}
    start, ping, *blocks, delta, stop = named_events(post(server, body | {"stream": True}))
    assert start["type"] == "message_start" and ping == {"type": "ping"} and stop == {"type": "message_stop"}
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    assert delta["type"] == "message_delta" and delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] > 10
    types = [(event["index"], event["type"].removeprefix("content_block_")) for event in blocks]
    kinds = [event["delta"]["type"] for event in blocks if event["type"] == "content_block_delta"]
    assert types == sorted(types, key=lambda one: one[0]) and {index for index, _ in types} == {0, 1, 2, 3}
    for index in range(4):
        first, *deltas, last = (type for place, type in types if place == index)
        assert (first, last) == ("start", "stop") and deltas and set(deltas) == {"delta"}
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert [event["content_block"]["type"] for event in blocks if "content_block" in event] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]


def test_stop_reasons(claude: anthropic.Anthropic) -> None:
    assert claude.messages.create(**asked("Yes.")).stop_reason == "end_turn"
    assert claude.messages.create(**asked("Yes.", max_tokens=1)).stop_reason == "max_tokens"
    message = claude.messages.create(**asked("Yes, sir.", stop_sequences=["no", ", s"]))
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ", s")
    assert message.content[0].type == "text" and message.content[0].text == "Yes"
    with claude.messages.stream(**asked("Yes, sir.", stop_sequences=["no", ", s"])) as stream:
        again = stream.get_final_message()
    assert (again.stop_reason, again.stop_sequence) == ("stop_sequence", ", s")


def test_arguments_that_were_cut_off(server: Running, claude: anthropic.Anthropic) -> None:
    """A message that is not streamed holds them in Anthropic's form of arguments that are not JSON."""
    count = len(server.llm.engine.tokenizer.encode(CALL[: CALL.index("1}}")], add_special_tokens=False))
    message = claude.messages.create(**asked(CALL, tools=TOOLS, max_tokens=count))
    (block,) = message.content
    assert block.type == "tool_use" and message.stop_reason == "max_tokens"
    cut = block.input["INVALID_JSON"]
    assert isinstance(cut, str) and cut and '{"a": 1}'.startswith(cut)
    body = {"max_tokens": count, "tools": TOOLS, "structured_outputs": exactly(CALL), "stream": True}
    deltas = [event["delta"] for event in named_events(post(server, body)) if event["type"] == "content_block_delta"]
    assert "".join(delta["partial_json"] for delta in deltas) == cut


def test_strict_tools(server: Running) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "tools": [TOOLS[0] | {"strict": True}]}
    wanted = read_messages(json.dumps(body).encode(), 9, UnusedKeys(is_strict=True)).chat.structure(
        server.llm.engine.tokenizer, [5]
    )
    assert wanted is not None and wanted.grammar is not None and "<tool_call>" in wanted.grammar


def test_usage_tells_cached_tokens_apart(claude: anthropic.Anthropic) -> None:
    text = "The same again. " * 20
    for _ in range(2):
        usage = claude.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": text}]).usage
    counted = claude.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": text}]).input_tokens
    assert usage.cache_read_input_tokens and usage.cache_creation_input_tokens == 0 and usage.output_tokens == 1
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_what_the_model_sees(server: Running, claude: anthropic.Anthropic) -> None:
    cached = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Two"},
                {"type": "tool_use", "id": "abc123def", "name": "add", "input": {"a": 77}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "abc123def", "content": [{"type": "text", "text": "78"}]},
                {"type": "tool_result", "tool_use_id": "abc123def", "content": "no", "is_error": True},
                {"type": "text", "text": "Three"},
                {"type": "text", "text": "four"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief", "cache_control": cached}]
    text = (
        "system: Be\nbrief; user: One; assistant: Two<tool_call>add 77; tool: 78; tool: Error: no; user: Three\nfour; "
    )
    assert shown(server, claude, messages=messages, system=system) == text + "assistant: "
    hello: Any = HELLO
    assert shown(server, claude, messages=hello, system="Be") == "system: Be; user: Hello; assistant: "
    assert shown(server, claude, messages=hello, tools=TOOLS) == "add stop user: Hello; assistant: "
    assert shown(server, claude, messages=hello, tools=TOOLS, tool_choice={"type": "none"}).startswith("user")
    assert shown(server, claude, messages=hello, thinking=THINKING).endswith("assistant: <think>\n")
    assert shown(server, claude, messages=hello, thinking={"type": "disabled"}).endswith("assistant: ")


def test_thinking_is_left_out(claude: anthropic.Anthropic) -> None:
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive", "display": "omitted"}):
        keys: Any = {} if thinking is None else {"thinking": thinking}
        (block,) = claude.messages.create(**asked("<think>Hm.</think>Yes.", **keys)).content
        assert block.type == "text" and block.text == "Yes."
    kinds = [block.type for block in claude.messages.create(**asked(MESSAGE, thinking={"type": "adaptive"})).content]
    assert kinds == ["thinking", "text"]  # without tools, calls are text


def test_one_call_if_asked(claude: anthropic.Anthropic) -> None:
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    content = claude.messages.create(**asked(f"{CALL}\n{CALL}", tools=TOOLS, tool_choice=choice)).content
    assert [block.type for block in content] == ["tool_use"]


def test_a_call_that_is_wanted_comes(at_once: Running) -> None:
    """Even a model of random weights calls a tool: exactly once if one is named, or if parallel calls are off."""
    alone = {"disable_parallel_tool_use": True}
    for choice, names in (
        ({"type": "any"}, {"add", "stop"}),
        ({"type": "any", **alone}, {"add", "stop"}),
        ({"type": "tool", "name": "add"}, {"add"}),
        ({"type": "tool", "name": "add", **alone}, {"add"}),
    ):
        for seed in range(3):
            body = {"max_tokens": 2000, "tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": seed}
            answer = post(at_once, body).json
            assert answer["stop_reason"] == "tool_use" and {one["name"] for one in answer["content"]} <= names
            assert len(answer["content"]) == 1 or choice == {"type": "any"}


def test_tools_may_be_called_where_the_answer_has_a_format(at_once: Running) -> None:
    """A model of random weights either calls tools or answers in the format, streamed and not."""
    config = {"format": {"type": "json_schema", "schema": ADD}}
    body = {"max_tokens": 1000, "tools": [TOOLS[0] | {"strict": True}], "output_config": config, "temperature": 1.0}
    kinds = set()
    for seed in range(8):
        for choice in ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "add"}, {"type": "none"}):
            asked = body | {"seed": seed, "tool_choice": choice}
            answer = post(at_once, asked).json
            streamed = named_events(post(at_once, asked | {"stream": True}))
            starts = [one["content_block"]["type"] for one in streamed if one["type"] == "content_block_start"]
            assert starts == [block["type"] for block in answer["content"]]
            for block in answer["content"]:
                value = block["input"] if block["type"] == "tool_use" else json.loads(block["text"])
                jsonschema.validate(value, ADD)
                kinds.add((choice["type"], block["type"]))
            assert len(answer["content"]) == 1 or choice["type"] in ("auto", "any")
    calls = {("auto", "tool_use"), ("any", "tool_use"), ("tool", "tool_use")}
    assert kinds == calls | {("auto", "text"), ("none", "text")}


def test_an_answer_of_a_schema(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"], "additionalProperties": False}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = claude.messages.create(model="tiny", max_tokens=99, messages=HELLO, output_config=config).content  # type: ignore[arg-type]
    assert block.type == "text" and json.loads(block.text) == {"a": 3}


def test_errors_have_anthropics_form(server: Running, claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as found:
        claude.messages.create(model="other", max_tokens=1, messages=[{"role": "user", "content": "x"}])
    assert found.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "there is no model 'other' here, only tiny"},
    }
    for headers in ({}, {"X-Api-Key": "other"}, {"Authorization": "Bearer other", "X-Api-Key": "key"}):
        refused = server.post(MESSAGES, {"messages": HELLO}, headers)
        assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")
    assert server.post(MESSAGES, {"messages": HELLO, "max_tokens": 1}, {"Authorization": "Bearer key"}).status == 200
    assert server.ask("GET", MESSAGES, headers={"X-Api-Key": "key"}).json["type"] == "error"
    long = post(server, {"messages": [{"role": "user", "content": "x " * 5000}]})
    assert (long.status, long.json["error"]["type"]) == (400, "invalid_request_error")
    assert "maximum context length" in long.json["error"]["message"]


def test_a_timeout(server: Running) -> None:
    asked = {"max_tokens": 4000, "messages": HELLO, "ignore_eos": True}
    answer = post(server, asked | {"timeout": 0.2})
    assert (answer.status, answer.json["error"]["type"]) == (504, "timeout_error")
    *_, last = named_events(server.begin_with_timeout(MESSAGES, asked, {"X-Api-Key": "key"}))
    assert last["error"]["type"] == "timeout_error"


def test_a_server_that_ends_is_overloaded() -> None:
    with running(drain_seconds=1) as server:
        server.call(setattr, server.service, "draining", True)
        answer = post(server, {})
        assert (answer.status, answer.json["error"]["type"]) == (529, "overloaded_error")
        assert answer.headers["retry-after"] == "1"
        server.call(setattr, server.service, "draining", False)


def test_a_stream_that_fails() -> None:
    with running(kind="NaN") as server:
        late = {"temperature": 1, "seed": 24, "ignore_eos": True}  # draws the token of NaN after hundreds of others
        answer = post(server, {"max_tokens": 4000, "stream": True, **late})
        first, *_, last = answer.body.decode().strip().split("\n\n")
        assert first.startswith("event: message_start\n")
        assert last.startswith("event: error\n") and json.loads(last.partition("data: ")[2]) == {
            "type": "error",
            "error": {"type": "api_error", "message": "the model's logits are not numbers"},
        }


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, *HELLO]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": "8"}, "max_tokens: expected `int | null`, got `str`"),
        ({"messages": None}, "messages: expected `array`"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [3]}, "messages[0]: expected `object`"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: invalid enum value 'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "So"}]}, "messages[1] is not implemented: the last"),
        (user(), "messages[0].content is empty"),
        (user({"text": "x"}), "messages[0].content[0].type is not implemented: 'None'; there are text, tool_result"),
        (user(IMAGE), "messages[0].content[0].type is not implemented: 'image'"),
        (user({"type": "document"}), "messages[0].content[0].type is not implemented: 'document'"),
        (user({"type": "tool_use"}), "messages[0].content[0].type is not implemented: 'tool_use'"),
        (user({"type": "text"}), "messages[0].content[0].text is missing"),
        (user({"type": "tool_result", "content": "x"}), "messages[0].content[0].tool_use_id is missing"),
        (user({"type": "tool_result", "tool_use_id": "x", "content": 3}), "messages[0].content[0].content: expected"),
        (
            user({"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}),
            "messages[0].content[0].content[0].type is not implemented: 'image'; there are text",
        ),
        (user({"type": "tool_result", "tool_use_id": "x", "is_error": "y"}), "messages[0].content[0].is_error"),
        (assistant({"type": "redacted_thinking"}), "messages[0].content[0].data is missing"),
        (assistant({"type": "thinking"}), "messages[0].content[0].thinking is missing"),
        (assistant({"type": "tool_use", "id": "x", "name": "f"}), "messages[0].content[0].input is missing"),
        (assistant({"type": "tool_use", "id": "x", "name": "f", "input": []}), "input: expected `object`"),
        ({"system": 3}, "system: expected `str | array | null`"),
        ({"system": [IMAGE]}, "system[0].type is not implemented: 'image'; there are text"),
        ({"stop_sequences": "x"}, "stop_sequences: expected `array | null`"),
        ({"stop_sequences": ["x"] * 65}, "stop_sequences must not hold more than 64"),
        ({"stop_sequences": [""]}, "stop_sequences "),
        ({"temperature": -1}, "temperature "),
        ({"temperature": "x"}, "temperature: expected `float | null`"),
        ({"top_p": 2}, "top_p "),
        ({"top_k": 0.5}, "top_k: expected `int | null`"),
        ({"stream": 1}, "stream: expected `bool | null`"),
        ({"seed": "x"}, "seed: expected `int | null`"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type: invalid enum"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking.budget_tokens must be at least 1, and less"),
        ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens must be at least 1"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1}}, "thinking.budget_tokens is only for the type enabled"),
        ({"thinking": {"type": "adaptive", "display": "x"}}, "thinking.display: invalid enum"),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": False}},
            "thinking and chat_template_kwargs set different values of enable_thinking",
        ),
        ({"max_tokens": -1}, "max_tokens must be between 0 and"),
        ({"tool_choice": {"type": "none", "name": "x"}}, "tool_choice.name is only for the type tool"),
        ({"timeout": 0}, "timeout must be above 0"),
        ({"priority": 1001}, "priority must be between -1000 and 1000"),
        ({"tools": [3]}, "tools[0]: expected `object`"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name must have 1 to 64 letters"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].name: there are two tools of this name"),
        ({"tools": [{**TOOLS[0], "allowed_callers": ["x"]}]}, "tools[0].allowed_callers is not implemented: the model"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "x"}], "tool_choice": {"type": "tool", "name": "x"}},
            "tool_choice wants one of tools: none",
        ),
        ({"tool_choice": "any"}, "tool_choice: expected `object | null`"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type: invalid enum"),
        ({"tool_choice": {"type": "any"}}, "tool_choice wants one of tools: none"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "tool_choice.name is only for the type tool"),
        ({"tool_choice": {"type": "any", "name": "add"}, "tools": TOOLS}, "tool_choice.name is only for the type tool"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": TOOLS}, "tool_choice wants one of tools: add, stop"),
        ({"output_config": {"effort": "much"}}, "output_config.effort: invalid enum"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type: invalid enum"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}},
            "output_config.format cannot be compiled",
        ),
        ({"container": "x"}, "container is not implemented"),
        ({"mcp_servers": [{}]}, "mcp_servers is not implemented"),
        ({"n": 2}, "n is not implemented: there is one answer in this API"),
        ({"max_completion_tokens": 2}, "max_completion_tokens is not implemented"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls is not implemented: this API has another key for it"),
    ],
)
def test_what_cannot_be(server: Running, body: dict[str, Any], words: str) -> None:
    answer = post(server, body)
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer.json["error"]["message"], answer.body


@pytest.mark.parametrize("form", ["text", "blocks"])
def test_a_billing_line_does_not_spoil_the_prefix(server: Running, form: str) -> None:
    """Claude Code writes one at the head of its system prompt, other in each turn."""

    def system(cch: str | None, rest: str) -> Any:
        line = (
            "" if cch is None else f"x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={cch};"
        )
        if form == "text":
            return "\n".join(filter(None, (line, rest)))
        return [{"type": "text", "text": text} for text in (line, rest) if text]

    def usage(cch: str | None, rest: str, **turn: Any) -> Any:
        return post(server, {"system": system(cch, rest), "cache_salt": form, **turn}).json["usage"]

    rest = "You are Claude Code.\nx-anthropic-billing-header: of a later line stays. " + "Rules. " * 20
    first = usage("a1b2c", rest)
    turn = {"messages": [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]}
    second = usage("fa690", rest, **turn)
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] >= first["input_tokens"] // 32 * 32 - 32 > 100
    total = second["input_tokens"] + second["cache_read_input_tokens"]
    without = usage(None, rest, **turn)
    assert without["input_tokens"] + without["cache_read_input_tokens"] == total
    alone, none = (post(server, {"system": one}, COUNT).json for one in (system("00000", ""), None))
    assert alone == none


def test_what_changes_nothing(server: Running) -> None:
    harmless = {
        "metadata": {"user_id": "x"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "tools": [],
        "speed": "standard",
        "container": None,
    }
    assert post(server, harmless).json["content"] == post(server, {}).json["content"]


def test_the_timeout_of_a_count(server: Running) -> None:
    answer = post(server, {"timeout": -1}, COUNT)
    assert answer.status == 400 and answer.json["error"]["message"].startswith("timeout must be above 0")


def test_a_model_that_does_not_think() -> None:
    with running() as server:
        answer = post(server, {"thinking": {"type": "enabled"}})
        assert answer.status == 400 and "has no reasoning" in answer.json["error"]["message"]
        answer = post(server, {"tools": TOOLS})
        assert answer.status == 400 and "tools: the model's chat template shows no tools" in answer.body.decode()
        forced = {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}, "max_tokens": 400}
        (block,) = post(server, forced).json["content"]
        assert (block["type"], block["name"]) == ("tool_use", "add")
