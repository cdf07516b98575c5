"""Tools and reasoning over HTTP: what is shown to the model, and what its messages become."""

import json
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from enginewright import LLM, SamplingParams, StructuredOutputsParams
from enginewright.errors import UsageError
from enginewright.runtime.commands.batch import run_batch
from enginewright.runtime.commands.inspect import describe, summarize
from enginewright.runtime.server.chat import ChatBody
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.protocol import ResponseFormat, convert
from enginewright.runtime.server.tools import NO_PARAMETERS
from enginewright.runtime.text.messages.grammar import MAX_CALLS, before_answer, text_and_calls
from enginewright.runtime.text.messages.hermes import HERMES
from enginewright.runtime.text.messages.parser import ReasoningPiece, ReasoningPlace, TextPiece
from enginewright.runtime.text.messages.plain import describe_tools
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LIMITS, Running, exactly, running, tiny_engine

ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD}},
    {"type": "function", "function": {"name": "stop"}},
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
ONE_TOOL = (
    (TOOLS[1:], "auto"),
    (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[1:]}}),
)
# A class as openai-agents' Agent(output_type=…) sends it, with a tool of its function_tool.
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Graz", "Linz"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
AGENT: dict[str, Any] = {
    "messages": [{"role": "system", "content": "You help."}, {"role": "user", "content": "Which city?"}],
    "tools": [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}],  # type: ignore[dict-item]
    "response_format": {"type": "json_schema", "json_schema": {"name": "final_output", "strict": True, "schema": CITY}},
    "ignore_eos": False,
}
MESSAGE = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
SERVER = {"kind": "calls tools", "served_model_names": ("tiny",)}


def say(server: Running, text: str, **options: Any) -> Any:
    """A chat whose answer is this text."""
    wanted = exactly(text)
    return server.chat(structured_outputs=wanted, max_tokens=400, ignore_eos=False, **options)


def joined(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message of a stream, as a client puts it together, and why it ended."""
    assert events[-1] == "[DONE]"
    message: dict[str, Any] = {}
    for (choice,) in (event["choices"] for event in events[:-1]):
        for key, value in choice["delta"].items():
            if key == "tool_calls":
                _join_calls(message.setdefault(key, []), value)
            else:
                message[key] = message[key] + value if key in message else value
    return message, events[-2]["choices"][0]["finish_reason"]


def _join_calls(calls: list[dict[str, Any]], parts: list[dict[str, Any]]) -> None:
    for part in parts:
        if part["index"] == len(calls):
            assert set(part) == {"index", "id", "type", "function"} and set(part["function"]) == {"name", "arguments"}
            calls.append(part)
        else:
            assert set(part) == {"index", "function"} and set(part["function"]) == {"arguments"}
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]


def test_reasoning_text_and_calls(server: Running) -> None:
    whole = say(server, MESSAGE, tools=TOOLS)["choices"][0]
    message = whole["message"]
    calls = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": "I add.", "reasoning": "Hm.", "reasoning_content": "Hm."}
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in calls}) == 2 and all(call["type"] == "function" for call in calls)
    assert whole["finish_reason"] == "tool_calls"

    streamed, reason = joined(say(server, MESSAGE, tools=TOOLS, stream=True))
    again = streamed.pop("tool_calls")
    assert streamed == message and reason == "tool_calls"
    assert [(call["index"], call["function"]) for call in again] == list(enumerate(call["function"] for call in calls))


@pytest.mark.parametrize("keys", [{}, {"include_reasoning": False}, {"n": 2}], ids=str)
def test_usage_has_reasoning_tokens(server: Running, keys: dict[str, Any]) -> None:
    """Reasoning tokens are those that begin between its markers, and those of the closing marker."""
    whole = say(server, MESSAGE, tools=TOOLS, logprobs=True, **keys)
    expected = 0
    for choice in whole["choices"]:
        texts = [entry["token"] for entry in choice["logprobs"]["content"]]
        begins = accumulate(map(len, texts), initial=0)
        expected += sum(len("<think>") <= begin < MESSAGE.index("\n\nI add") for begin in begins)
    assert expected > 3 and whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    *_, last, done = say(server, MESSAGE, tools=TOOLS, stream=True, stream_options={"include_usage": True}, **keys)
    assert done == "[DONE]" and last["choices"] == []
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": expected}
    none = say(server, "Yes.", **keys)["usage"]
    assert none["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_without_tools_calls_are_text(server: Running) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        whole = say(server, MESSAGE, **options)["choices"][0]
        assert whole["message"]["content"] == f"I add.\n{CALL}\n{CALL}" and whole["finish_reason"] == "stop"
        assert joined(say(server, MESSAGE, stream=True, **options))[0]["content"] == f"I add.\n{CALL}\n{CALL}"


def test_one_call_and_no_reasoning_if_asked(server: Running) -> None:
    options = {"tools": TOOLS, "parallel_tool_calls": False, "include_reasoning": False}
    message = say(server, MESSAGE, **options)["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1 and "reasoning" not in message and "reasoning_content" not in message


def test_a_call_alone_has_no_content(server: Running) -> None:
    message = say(server, CALL, tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1


def test_reasoning_that_the_prompt_begins(server: Running) -> None:
    tokens = {"max_tokens": 4, "ignore_eos": True}
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    whole = server.chat(**tokens, **kwargs)["choices"][0]["message"]
    streamed, reason = joined(server.chat(**tokens, **kwargs, stream=True))
    assert whole["content"] == "" and whole["reasoning"] == whole["reasoning_content"] == streamed["reasoning"]
    assert streamed["content"] == "" and reason == "length"
    for off in ({"reasoning_effort": "none"}, {}):
        assert "reasoning" not in server.chat(**tokens, **off)["choices"][0]["message"]

    tokenizer = server.llm.engine.tokenizer
    for name, expected in (
        ("<think>\n", [ReasoningPiece("So."), TextPiece("Yes.")]),
        ("x", [TextPiece("So.</think>Yes.")]),
    ):
        (parser,) = ChatBody(messages=HELLO).parsers(tokenizer, tokenizer.encode(f"assistant: {name}"), 1)
        assert parser is not None and parser.push("So.</think>Yes.") + parser.end() == expected


def test_an_answer_of_a_structure_is_text(server: Running) -> None:
    """An answer of a structure is text, whatever its strings contain."""
    schema = {"type": "string", "const": "<think>a</think><tool_call>"}
    options = {"max_tokens": 100, "ignore_eos": False}
    whole = {"json": schema, "before": 'start: ""'}
    message = server.chat(**options, structured_outputs=whole, tools=TOOLS)["choices"][0]["message"]
    assert json.loads(message["content"]) == schema["const"] and "reasoning" not in message
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = server.chat(**options, **thinking, structured_outputs=exactly("Yes."))["choices"][0]["message"]
    assert message["content"] == "Yes." and "reasoning" not in message


def test_an_answer_of_a_structure_comes_after_the_reasoning(server: Running) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": ADD, "name": "x"}}
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "response_format": form}
    answer = server.chat(**thinking, max_tokens=6, ignore_eos=False)["choices"][0]
    assert answer["message"]["content"] == "" and answer["message"]["reasoning"] and answer["finish_reason"] == "length"
    streamed, _ = joined(server.chat(**thinking, max_tokens=6, ignore_eos=False, stream=True))
    assert streamed["reasoning"] == answer["message"]["reasoning"] and streamed["content"] == ""

    tokenizer = server.llm.engine.tokenizer
    places = {"<think>\n": ReasoningPlace.BEGUN, "<think>\n\n</think>\n\n": ReasoningPlace.OVER}
    body = ChatBody(messages=HELLO, response_format=convert(form, ResponseFormat))
    for end, place in {**places, "": ReasoningPlace.POSSIBLE}.items():
        prompt = tokenizer.encode(f"assistant: {end}")
        assert tokenizer.reasoning_place(prompt) is place
        wanted = body.structure(tokenizer, prompt)
        assert wanted is not None and wanted.json == ADD
        assert wanted.before == before_answer(tokenizer.message_format, {}, place)
        (parser,) = body.parsers(tokenizer, prompt, 1)
        assert parser is not None
        begun = "So.</think>" if place is ReasoningPlace.BEGUN else "<think>So.</think>"
        found = parser.push(f'{begun}{{"a": "<think>"}}') + parser.end()
        assert found == [ReasoningPiece("So."), TextPiece('{"a": "<think>"}')]
    assert ChatBody(messages=HELLO).structure(tokenizer, [5]) is None


@pytest.mark.parametrize("several", [True, False])
def test_strict_tools_are_held_to_their_schemas(server: Running, several: bool) -> None:
    tokenizer = server.llm.engine.tokenizer
    strict = [{"type": "function", "function": {"name": "add", "parameters": ADD, "strict": True}}]
    body = ChatBody(messages=HELLO, tools=[*strict, TOOLS[1]], parallel_tool_calls=several)
    for prompt in ("assistant: ", "assistant: <think>\n"):  # where a call begins, it is one, also in the reasoning
        wanted = body.structure(tokenizer, tokenizer.encode(prompt))
        grammar = text_and_calls(HERMES, {"add": ADD, "stop": {}}, {}, several=several)
        assert wanted == StructuredOutputsParams(grammar=grammar)
    assert ChatBody(messages=HELLO, tools=TOOLS).structure(tokenizer, [5]) is None
    assert ChatBody(messages=HELLO, tools=strict, tool_choice="none").structure(tokenizer, [5]) is None
    options = {"tools": strict, "temperature": 1.0, "seed": 1, "max_tokens": 20, "ignore_eos": False}
    assert server.chat(**options)["choices"][0]["finish_reason"] in ("length", "stop")


def test_arguments_that_were_cut_off(server: Running) -> None:
    """Arguments that were cut off are given as generated, streamed or not."""
    count = len(server.llm.engine.tokenizer.encode(CALL[: CALL.index("1}}")], add_special_tokens=False))
    options = {"tools": TOOLS, "max_tokens": count, "structured_outputs": exactly(CALL), "ignore_eos": False}
    whole = server.chat(**options)["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and whole["finish_reason"] == "length"
    assert call["function"]["arguments"] and '{"a": 1}'.startswith(call["function"]["arguments"])
    streamed, reason = joined(server.chat(**options, stream=True))
    assert streamed["tool_calls"][0]["function"] == call["function"] and reason == "length"


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "add"}}, allowed("add")], ids=str
)
def test_a_call_that_is_wanted_comes(at_once: Running, choice: Any) -> None:
    """Even a model of random weights calls a tool: exactly once if one is named, or if parallel calls are off."""
    is_named = isinstance(choice, dict) and choice["type"] == "function"
    for parallel in ({"parallel_tool_calls": False}, {"parallel_tool_calls": True}, {}):
        sampling = {"temperature": 1.0, "seed": 1, "n": 4, "max_tokens": 2000, "ignore_eos": False}
        for answer in at_once.chat(tools=TOOLS, tool_choice=choice, **parallel, **sampling)["choices"]:
            assert answer["finish_reason"] == "tool_calls"
            calls = [call["function"] for call in answer["message"]["tool_calls"]]
            assert len(calls) == 1 or (not is_named and parallel.get("parallel_tool_calls", True))
            assert len(calls) <= MAX_CALLS
            assert {call["name"] for call in calls} <= ({"add", "stop"} if choice == "required" else {"add"})
            for call in calls:
                jsonschema.validate(json.loads(call["arguments"]), ADD if call["name"] == "add" else NO_PARAMETERS)


def test_tools_may_be_called_where_the_answer_has_a_format(at_once: Running) -> None:
    """The format applies to the answer alone, in the first turn and in the one after a call."""
    kinds, call = set(), {"id": "44a8fe7f9", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turn = [
        {"role": "assistant", "tool_calls": [call], "content": None},
        {"role": "tool", "tool_call_id": "44a8fe7f9", "content": "1"},
    ]
    for seed in range(8):
        body = {**AGENT, "temperature": 1.0, "seed": seed, "max_tokens": 1000}
        body["messages"] = [*AGENT["messages"], *turn] if seed % 2 else AGENT["messages"]
        whole = at_once.chat(**body)["choices"][0]
        kinds.add(check_agent(whole["message"], whole["finish_reason"]))
        message, reason = joined(at_once.chat(**body, stream=True))
        assert reason == whole["finish_reason"] and message["content"] == (whole["message"]["content"] or "")
        calls = [[call["function"] for call in one.get("tool_calls", ())] for one in (message, whole["message"])]
        assert calls[0] == calls[1]
    assert kinds == {"stop", "tool_calls"}


def check_agent(message: dict[str, Any], reason: str) -> str:
    """The message is an answer of CITY, or calls of `add`, as the reason says, which comes back."""
    if reason == "stop":
        jsonschema.validate(json.loads(message["content"]), CITY)
        assert "tool_calls" not in message
    for call in message.get("tool_calls", ()):
        assert call["function"]["name"] == "add" and message["content"] is None
        jsonschema.validate(json.loads(call["function"]["arguments"]), ADD)
    return reason


@pytest.mark.parametrize(
    ("choice", "reasons"),
    [
        ("required", {"tool_calls"}),
        ({"type": "function", "function": {"name": "add"}}, {"tool_calls"}),
        ("none", {"stop"}),
    ],
    ids=str,
)
def test_a_choice_of_tools_decides_whether_the_format_binds(at_once: Running, choice: Any, reasons: set[str]) -> None:
    sampling = {"temperature": 1.0, "seed": 2, "n": 4, "max_tokens": 2000}
    answers = at_once.chat(**AGENT, tool_choice=choice, **sampling)["choices"]
    assert {check_agent(answer["message"], answer["finish_reason"]) for answer in answers} == reasons
    if isinstance(choice, dict):
        assert [len(answer["message"]["tool_calls"]) for answer in answers] == [1] * 4


def test_all_structures_leave_room_for_calls(at_once: Running) -> None:
    structures: tuple[dict[str, Any], ...] = (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"regex": "yes|no"}},
        {"guided_grammar": 'start: "yes" | "no"'},
    )
    tokenizer = at_once.llm.engine.tokenizer
    for structure in structures:
        body = {**AGENT, "response_format": None, **structure, "temperature": 1.0, "n": 8, "seed": 1, "max_tokens": 60}
        answers = at_once.chat(**body)["choices"]
        called = [answer for answer in answers if "tool_calls" in answer["message"]]
        assert called and len(called) < len(answers), structure
        if "response_format" not in structure:
            others = [answer for answer in answers if answer not in called]
            assert all(answer["message"]["content"] in ("yes", "no") for answer in others)
    # But one that says what comes before it is all of the message.
    body = ChatBody(messages=HELLO, tools=TOOLS, structured_outputs=exactly("x"))
    assert body.structure(tokenizer, [5]) == StructuredOutputsParams(**exactly("x"))


def test_inspect_says_how_a_model_writes_calls() -> None:
    written = "\n  messages   calls as of --tool-call-parser hermes, reasoning in <think>…</think>\n"
    assert written in describe(summarize(tiny_engine("calls tools")))
    assert "  messages " not in describe(summarize(tiny_engine()))


def test_a_tool_that_is_not_allowed_is_not_shown(server: Running) -> None:
    alone, some = (server.chat(tools=tools, tool_choice=choice)["usage"]["prompt_tokens"] for tools, choice in ONE_TOOL)
    assert alone == some


def test_calls_and_results_are_shown_to_the_model(server: Running) -> None:
    call = {"id": "abc123def", "type": "function", "function": {"name": "add", "arguments": '{"a": 77}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "78"},
    ]
    tokens = server.post("/tokenize", {"messages": messages}).json["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert text == "user: Hello; assistant: <tool_call>add 77; tool: 78; assistant: "
    plain = server.chat()["usage"]["prompt_tokens"]
    assert server.chat(tools=TOOLS)["usage"]["prompt_tokens"] > plain
    assert server.chat(tools=TOOLS, tool_choice="none")["usage"]["prompt_tokens"] == plain


def test_llm_shows_tools_too(llm: LLM) -> None:
    with LLM(tiny_engine("calls tools"), **LIMITS) as opened:
        params = SamplingParams(max_tokens=1)
        (plain,), (shown,) = opened.chat(HELLO, params), opened.chat(HELLO, params, tools=TOOLS)
        assert len(shown.prompt_token_ids) > len(plain.prompt_token_ids)
    with pytest.raises(UsageError, match="tools cannot be shown"):
        llm.chat(HELLO, SamplingParams(max_tokens=1), tools=TOOLS)


def test_a_batch_has_them_too(tmp_path: Path) -> None:
    """Lines of OpenAI's batch form are answered as the server would."""
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 400, "structured_outputs": exactly(MESSAGE)}
    refused = {"messages": HELLO, "tools": TOOLS, "tool_choice": "any"}
    lines = [
        {"custom_id": str(place), "method": "POST", "url": CHAT, "body": one}
        for place, one in enumerate((body, refused))
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with LLM(tiny_engine("calls tools"), **LIMITS) as opened:
        run_batch(opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", {})
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    (choice,) = first["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning"] == "Hm."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"] * 2
    assert second["response"]["status_code"] == 400
    wanted = {"messages": HELLO, "tools": TOOLS, "tool_choice": "required", "max_tokens": 2000}
    (tmp_path / "in.jsonl").write_text(json.dumps({"custom_id": "", "method": "POST", "url": CHAT, "body": wanted}))
    with LLM(tiny_engine("calls tools at once"), **LIMITS) as opened:
        run_batch(opened, tmp_path / "in.jsonl", tmp_path / "out.jsonl", {})
    (choice,) = json.loads((tmp_path / "out.jsonl").read_text())["response"]["body"]["choices"]
    assert choice["finish_reason"] == "tool_calls"


def test_openais_client(client: openai.OpenAI) -> None:
    wanted = {"structured_outputs": exactly(MESSAGE)}
    body: dict[str, Any] = {"model": "tiny", "messages": HELLO, "tools": TOOLS, "max_tokens": 400}
    (choice,) = client.chat.completions.create(**body, extra_body=wanted).choices
    assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
    with client.chat.completions.stream(**body, extra_body=wanted) as stream:
        final = stream.get_final_completion().choices[0].message
    assert final.tool_calls is not None
    assert [call.function.arguments for call in final.tool_calls] == ['{"a": 1}'] * 2  # type: ignore[union-attr]
    messages = [
        *HELLO,
        choice.message,
        {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "2"},
    ]
    assert client.chat.completions.create(**{**body, "messages": messages}).choices


class City(BaseModel):
    city: Literal["Graz", "Linz"]


class Add(BaseModel):
    """Adds."""

    a: Literal[1, 2]


def test_openais_client_parses_answers_and_calls(at_once: Running) -> None:
    """The client parses both for one request with a class of answers and a tool."""
    kinds = set()
    with openai.OpenAI(base_url=f"http://127.0.0.1:{at_once.port}/v1", api_key="none", max_retries=0) as client:
        tools, messages = [openai.pydantic_function_tool(Add)], [{"role": "user", "content": "Which?"}]
        options: dict[str, Any] = {"model": "tiny", "messages": messages, "tools": tools, "response_format": City}
        for seed in range(8):
            completion = client.chat.completions.parse(**options, seed=seed, temperature=1, max_tokens=1000)
            message = completion.choices[0].message
            kinds.add(type(message.parsed))
            arguments = [call.function.parsed_arguments for call in message.tool_calls or ()]
            assert all(isinstance(one, Add) for one in arguments) and (message.parsed is None) == bool(arguments)
    assert kinds == {City, type(None)}


def _function(**keys: Any) -> list[Any]:
    return [{"type": "function", "function": keys}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tools": [{}]}, "tools[0].type", "missing"),
        ({"tools": [3]}, "tools[0]", "expected `object`"),
        (
            {"tools": [{"type": "custom"}], "tool_choice": {"type": "custom", "custom": {"name": "x"}}},
            "tool_choice",
            "of one of tools: none",
        ),
        ({"tools": _function(description="x")}, "tools[0].function.name", "missing"),
        ({"tools": _function(name="a b")}, "tools[0].function.name", "1 to 64 letters"),
        ({"tools": _function(name="f") * 2}, "tools[1].function.name", "two tools"),
        ({"tools": _function(name="f", parameters=[])}, "tools[0].function.parameters", "expected `object"),
        ({"tools": [_function(name=f"f{place}")[0] for place in range(129)]}, "tools", "more than 128"),
        ({"tool_choice": "required"}, "tool_choice", "of one of tools: none"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "add, stop"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "add, stop"),
        ({"tools": TOOLS, "tool_choice": allowed("x")}, "tool_choice.allowed_tools.tools", "of tools: add, stop"),
        ({"tools": TOOLS, "tool_choice": allowed()}, "tool_choice.allowed_tools.tools", "of tools: add, stop"),
        ({"tools": TOOLS, "tool_choice": allowed("add", mode="x")}, "tool_choice.allowed_tools.mode", "invalid enum"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools", "missing"),
        (
            {"tools": _function(name="f", strict=True, parameters={"type": "object", "properties": 3})},
            "tools",
            "tools cannot be compiled",
        ),
        (
            {"tools": _function(name="f", parameters={"type": "object", "properties": 3}), "tool_choice": "required"},
            "tools",
            "tools cannot be compiled",
        ),
        ({"tools": _function(name="f", strict=1)}, "tools[0].function.strict", "expected `bool"),
        ({"structured_outputs": {"regex": "a", "before": 3}}, "structured_outputs", "before must be a text"),
        ({"structured_outputs": {"regex": "a", "before": "start: ("}}, "structured_outputs", "cannot be compiled"),
        ({"reasoning_effort": "much"}, "reasoning_effort", "invalid enum"),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "reasoning_effort and chat_template_kwargs set different values of enable_thinking",
        ),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "tool"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "expected `str | object | null`",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ],
)
def test_what_cannot_be(server: Running, body: dict[str, Any], param: str, words: str) -> None:
    answer = server.post(CHAT, {"messages": HELLO, **body})
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert words in answer.error["message"]


@pytest.mark.parametrize("depth", [100, 960, 5000])
def test_deep_parameters_are_no_error_of_ours(server: Running, depth: int) -> None:
    deep = b'{"properties":' * depth + b"{}" + b"}" * depth
    tools = b'[{"type":"function","function":{"name":"f","parameters":' + deep + b"}}]"
    for choice in (b'"required"', b'"auto"'):
        body = b'{"messages":[{"role":"user","content":"x"}],"max_tokens":1,"tools":' + tools + b',"tool_choice":'
        answer = server.post(CHAT, body + choice + b"}")
        assert answer.status in (200, 400), answer.body


def test_a_model_that_always_thinks() -> None:
    with running(kind="always thinks") as server:
        answer = server.post(CHAT, {"messages": HELLO, "reasoning_effort": "none"})
        assert (answer.status, answer.error["param"]) == (400, "reasoning_effort")
        assert "the model's chat template always lets it think" in answer.error["message"]
        assert server.chat()["choices"]


def test_a_model_without_tools() -> None:
    with running() as server:
        answer = server.post(COMPLETIONS, {"prompt": "x", "tools": TOOLS})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        answer = server.post(CHAT, {"messages": HELLO, "tools": TOOLS})
        assert (answer.status, answer.error["param"]) == (400, "tools")
        assert "template shows no tools" in answer.error["message"]
        sampling = {"temperature": 1.0, "seed": 1, "n": 4, "max_tokens": 2000, "ignore_eos": False}
        choices: tuple[Any, ...] = ("required", {"type": "function", "function": {"name": "add"}}, allowed("add"))
        for choice in choices:
            answers = server.chat(tools=TOOLS, tool_choice=choice, **sampling)["choices"]
            for one in answers:
                assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
                calls = [call["function"] for call in one["message"]["tool_calls"]]
                assert len(calls) == 1 or choice != choices[1]
                assert {call["name"] for call in calls} <= ({"add", "stop"} if choice == "required" else {"add"})
                for call in calls:
                    jsonschema.validate(json.loads(call["arguments"]), ADD if call["name"] == "add" else NO_PARAMETERS)
            body = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 2000, "ignore_eos": False}
            whole, streamed = server.chat(**body)["choices"][0], joined(server.chat(**body, stream=True))[0]
            functions = [[call["function"] for call in one["tool_calls"]] for one in (whole["message"], streamed)]
            assert functions[0] == functions[1]
        kept = server.chat(tools=TOOLS, tool_choice="none", max_tokens=1)["usage"]["prompt_tokens"]
        assert kept == server.chat(max_tokens=1)["usage"]["prompt_tokens"]


def test_a_model_without_tools_is_shown_them_as_text() -> None:
    def call(name: str, arguments: str) -> dict[str, Any]:
        return {"id": f"id_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}

    results = [{"role": "tool", "tool_call_id": f"id_{name}", "content": "78"} for name in ("add", "stop", "other")]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {"role": "assistant", "content": "I add.", "tool_calls": [call("add", '{"a": 77}'), call("stop", "")]},
        *results,
        {"role": "assistant", "content": None, "tool_calls": [call("stop", "{}")]},
        results[1],
    ]
    history = (
        'user: Hello<|turn|>\nassistant: I add.\n{"name": "add", "parameters": {"a": 77}}; '
        '{"name": "stop", "parameters": {}}<|turn|>\n'
        "user: Result of add:\n78\n\nResult of stop:\n78\n\nResult of a call:\n78<|turn|>\n"
        'assistant: {"name": "stop", "parameters": {}}<|turn|>\nuser: Result of stop:\n78<|turn|>\nassistant: '
    )
    described = (
        "You can call these functions. Each is an object of JSON, with the schema of its parameters:\n"
        f'{{"name": "add", "description": "Adds.", "parameters": {json.dumps(ADD)}}}\n{{"name": "stop"}}\n\n'
        "To call one, answer with an object of JSON and nothing else:\n"
        '{"name": "name of the function", "parameters": {"name of a parameter": "its value"}}<|turn|>\n'
    )
    with LLM(tiny_engine(), **LIMITS) as opened:
        tokenizer = opened.engine.tokenizer
        for choice, given, shown in (
            ("none", messages, f"system: Be brief.<|turn|>\n{history}"),
            ("required", messages, f"system: Be brief.\n\n{described}{history}"),
            ("required", HELLO, f"system: {described}user: Hello<|turn|>\nassistant: "),
        ):
            (prompt,) = ChatBody(messages=given, tools=TOOLS, tool_choice=choice).prompts()
            assert tokenizer.decode(opened.encode(prompt), skip_special_tokens=False) == shown
        with pytest.raises(UsageError, match="it must have a function with a name"):
            opened.chat([*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}])
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"properties": deep}
    with pytest.raises(UsageError, match="nested too deeply"):
        describe_tools([], _function(name="f", parameters=deep))


def test_a_parser_by_name() -> None:
    with running(kind="calls tools", tool_call_parser="glm") as server:
        call = "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
        message = say(server, call, tools=TOOLS)["choices"][0]["message"]
        assert [one["function"] for one in message["tool_calls"]] == [{"name": "add", "arguments": '{"a": 1}'}]
    with running(kind="calls tools at once", tool_call_parser="pythonic") as server:
        choice: dict[str, Any] = {"type": "function", "function": {"name": "add"}}
        options = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, "ignore_eos": False}
        (call,) = server.chat(**options, parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"] in range(10)
        for key, choice in (("tool_choice", "required"), ("tools", "auto")):
            body = {"messages": HELLO, "tools": _function(name="a-b", strict=True), "tool_choice": choice}
            answer = server.post(CHAT, body)
            assert (answer.status, answer.error["param"]) == (400, key), answer.body
            assert "the tool 'a-b' cannot be called" in answer.error["message"]
    with pytest.raises(UsageError, match=r"no tool call parser 'none'.*hermes"):
        ServerConfig(tool_call_parser="none")
