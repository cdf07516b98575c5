"""The Responses API over HTTP, with OpenAI's client and by hand."""

import asyncio
import json
import threading
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from enginewright.errors import UsageError
from enginewright.runtime.core.outputs import Delta, merge
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.config import ServerConfig
from enginewright.runtime.server.form import Choice, PromptPart
from enginewright.runtime.server.responses_store import ResponseStore, StoredResponse
from enginewright.runtime.text.messages.formats import new_parser
from enginewright.runtime.text.messages.parser import joined
from tests.helpers.serving import CHAT, HELLO, Answer, Running, exactly, named_events, running

RESPONSES = "/v1/responses"
LOGPROBS = "message.output_text.logprobs"
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "add", "description": "Adds.", "parameters": ADD, "strict": True},
    {"type": "function", "name": "stop", "parameters": None, "strict": None},
]
REPLY = {
    "type": "object",
    "properties": {"city": {"enum": ["Graz", "Linz"]}, "is_near": {"type": "boolean"}},
    "required": ["city", "is_near"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
MESSAGE = f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
SERVER = {
    "kind": "calls tools",
    "served_model_names": ("tiny",),
    "api_keys": ("key", "other"),
    "responses_store": 8,
}


def asked(text: str = MESSAGE, **keys: Any) -> Any:
    """A request that is answered with this text."""
    wanted = {"structured_outputs": exactly(text)}
    return {"model": "tiny", "max_output_tokens": 400, "input": "Hello", "extra_body": wanted, **keys}


def post(server: Running, body: Any) -> Answer:
    given = {"max_output_tokens": 8, "input": "Hello", **body}
    return server.post(RESPONSES, given, {"Authorization": "Bearer key"})


def get(server: Running, path: str, key: str = "key") -> Answer:
    return server.ask("GET", f"{RESPONSES}/{path}", headers={"Authorization": f"Bearer {key}"})


def events(answer: Answer) -> list[Any]:
    """The events of a stream; each has its number."""
    values = named_events(answer)
    assert [value["sequence_number"] for value in values] == list(range(len(values)))
    return values


def shown(server: Running, **keys: Any) -> str:
    """The prompt that the model sees."""
    seen: list[Any] = []
    prepare = server.llm.prepare

    async def noting(*arguments: Any, **options: Any) -> Any:
        request = await prepare(*arguments, **options)
        seen.extend(request.token_ids)
        return request

    server.llm.prepare = noting  # type: ignore[method-assign]
    try:
        assert post(server, keys).status == 200
    finally:
        server.llm.prepare = prepare  # type: ignore[method-assign]
    return server.llm.engine.tokenizer.decode(seen)


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {key: without_ids(entry) for key, entry in value.items() if key not in changing}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def test_items(client: openai.OpenAI) -> None:
    response = client.responses.create(**asked(tools=TOOLS, metadata={"a": "b"}, instructions="Be brief"))
    reasoning, message, *calls = response.output
    assert reasoning.type == "reasoning" and reasoning.content is not None and reasoning.content[0].text == "Hm."
    assert message.type == "message" and message.role == "assistant" and response.output_text == "I add."
    assert [one.type == "function_call" and (one.name, one.arguments) for one in calls] == [("add", '{"a": 1}')] * 2
    assert len({one.id for one in response.output}) == 4
    assert response.status == "completed" and response.incomplete_details is None and response.model == "tiny"
    assert response.usage is not None and 0 < response.usage.output_tokens_details.reasoning_tokens < 20
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief" and response.completed_at
    assert [tool.name for tool in response.tools if tool.type == "function"] == ["add", "stop"]
    with client.responses.stream(**asked(tools=TOOLS, metadata={"a": "b"}, instructions="Be brief")) as stream:
        again = stream.get_final_response()
    left_out = {"parsed_arguments", "parsed"}
    one, other = response.model_dump(), again.model_dump(exclude={"output": {"__all__": left_out}})
    for item in other["output"]:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    for usage in (one["usage"], other["usage"]):
        usage.pop("input_tokens_details")
        usage.pop("phases")
    assert without_ids(other) == without_ids(one)


def test_reasoning_is_counted_by_token(server: Running) -> None:
    """However many tokens come at once: `merge` makes one delta of those that wait for a slow client."""
    tokens = [SampledToken(token) for token in server.llm.engine.tokenizer.encode(MESSAGE, add_special_tokens=False)]
    texts = [server.llm.engine.tokenizer.decode([one.token], skip_special_tokens=False) for one in tokens]
    deltas = [Delta(0, text, (token,)) for text, token in zip(texts, tokens, strict=True)]
    counts, messages = set(), []
    for size in (1, 2, 3, 7, len(deltas)):
        parser = new_parser(server.llm.engine.tokenizer.message_format, {"add": ADD})
        choice = Choice(0, PromptPart("", (), ()), parser=parser)
        parts = [merge(deltas[start : start + size])[0] for start in range(0, len(deltas), size)]
        messages.append(joined(piece for part in parts for piece in choice.push(part)))
        counts.add(choice.num_reasoning_tokens)
    assert "".join(texts) == MESSAGE and len(counts) == 1 and 0 < counts.pop() < len(tokens) / 2
    assert all(message == messages[0] for message in messages) and len(messages[0]) == 6


def test_events(server: Running) -> None:
    wanted = exactly(MESSAGE)
    body = {"max_output_tokens": 400, "tools": TOOLS, "structured_outputs": wanted, "stream": True}
    created, in_progress, *parts, completed = events(post(server, body))
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == in_progress["response"] and created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == [] and created["response"]["usage"] is None
    assert completed["type"] == "response.completed"
    text = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{}.delta", "{}.done", "output_item.done"]
    forms = [(text, "reasoning_text"), (text, "output_text"), *[(call, "function_call_arguments")] * 2]
    for place, (names, kind) in enumerate(forms):
        mine = [event for event in parts if event["output_index"] == place]
        types = list(dict.fromkeys(event["type"].removeprefix("response.") for event in mine))
        assert types == [name.format(kind) for name in names]
        item = completed["response"]["output"][place]
        assert mine[0]["item"]["status"] == "in_progress" and mine[-1]["item"] == item and item["status"] == "completed"
        assert {event["item_id"] for event in mine[1:-1]} == {item["id"]}
        whole = item["arguments"] if kind.startswith("function") else item["content"][0]["text"]
        assert "".join(event["delta"] for event in mine if event["type"].endswith(".delta")) == whole
        (done,) = (event for event in mine if event["type"] == f"response.{kind}.done")
        assert done["arguments" if kind.startswith("function") else "text"] == whole


def test_logprobs(server: Running, client: openai.OpenAI) -> None:
    """Text has log-probabilities in the form of a chat, in the response and in each event; reasoning and calls none."""
    wanted: Any = {"tools": TOOLS, "include": [LOGPROBS], "top_logprobs": 2}
    response = client.responses.create(**asked(**wanted))
    assert response.top_logprobs == 2
    (message,) = (item for item in response.output if item.type == "message")
    (part,) = message.content
    assert part.type == "output_text" and part.logprobs is not None and part.text == "I add."
    assert "".join(one.token for one in part.logprobs).strip() == part.text
    assert all(bytes(one.bytes).decode() == one.token and len(one.top_logprobs) == 2 for one in part.logprobs)
    given = [one.model_dump() for one in part.logprobs]

    body: Any = {"messages": HELLO, "max_tokens": 400, "logprobs": True, "top_logprobs": 2}
    functions = [{key: entry for key, entry in tool.items() if key != "type"} for tool in TOOLS]
    body |= {"tools": [{"type": "function", "function": function} for function in functions]}
    answer = server.post(CHAT, body | {"structured_outputs": exactly(MESSAGE)}, {"Authorization": "Bearer key"})
    chat = answer.json["choices"][0]["logprobs"]["content"]
    assert any(chat[start : start + len(given)] == given for start in range(len(chat)))

    given_by_hand = {"max_output_tokens": 400, "structured_outputs": exactly(MESSAGE), "stream": True}
    stream = events(post(server, wanted | given_by_hand))
    deltas = [event["logprobs"] for event in stream if event["type"] == "response.output_text.delta"]
    assert all(deltas) and [one for delta in deltas for one in delta] == given
    (done,) = (event for event in stream if event["type"] == "response.output_text.done")
    parts = [event["part"] for event in stream if event["type"].startswith("response.content_part")]
    assert done["logprobs"] == given
    assert [one.get("logprobs") for one in parts] == [None, None, [], given]
    items = [event["item"] for event in stream if event["type"] == "response.output_item.done"]
    assert stream[-1]["response"]["output"] == items and items[1]["content"][0]["logprobs"] == given
    without = client.responses.create(**asked(include=[LOGPROBS])).output[1]
    assert without.type == "message" and without.content[0].type == "output_text"
    assert all(one.top_logprobs == [] and one.logprob <= 0 for one in without.content[0].logprobs or [])


def test_logprobs_of_parts_of_characters(server: Running) -> None:
    """Log-probabilities come with the text of their character, and have bytes of their own."""
    body = {"max_output_tokens": 100, "structured_outputs": exactly("a\U0001f600b"), "include": [LOGPROBS]}
    (item,) = post(server, body).json["output"]
    (content,) = item["content"]
    assert content["text"] == "a\U0001f600b" and len(content["logprobs"]) == 6
    own = [one["bytes"] for one in content["logprobs"]]
    assert own == [[97], *([byte] for byte in "\U0001f600".encode()), [98]]
    deltas = [one for one in events(post(server, body | {"stream": True})) if one["type"].endswith("text.delta")]
    for one in deltas:  # those that wait for a slow client come together
        assert len(one["logprobs"]) == sum({"\U0001f600": 4}.get(char, 1) for char in one["delta"])


def test_a_response_is_kept_by_the_thread_of_the_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long its JSON takes: the store belongs to that thread."""
    store, threads = server.engines.responses, list[str]()
    put = store.put
    monkeypatch.setattr(store, "put", lambda *given: threads.append(threading.current_thread().name) or put(*given))
    for more in ({}, {"stream": True}, {"include": [LOGPROBS]}):
        assert post(server, more).status == 200
    assert threads == ["server"] * 3


def test_async_client(server: Running) -> None:
    async def ask() -> list[str]:
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="key", max_retries=0) as client:
            stream = await client.responses.create(**asked("Yes, I do."), stream=True)
            return [event.delta async for event in stream if event.type == "response.output_text.delta"]

    assert "".join(asyncio.run(ask())) == "Yes, I do."


def test_arguments_that_were_cut_off(server: Running) -> None:
    count = len(server.llm.engine.tokenizer.encode(CALL[: CALL.index("1}}")], add_special_tokens=False))
    body = {"max_output_tokens": count, "tools": TOOLS, "structured_outputs": exactly(CALL)}
    whole = post(server, body).json
    (item,) = whole["output"]
    assert item["type"] == "function_call" and (item["status"], whole["status"]) == ("incomplete", "incomplete")
    assert item["arguments"] and '{"a": 1}'.startswith(item["arguments"])
    streamed = events(post(server, body | {"stream": True}))
    deltas = [event["delta"] for event in streamed if event["type"].endswith("arguments.delta")]
    (done,) = (event for event in streamed if event["type"].endswith("arguments.done"))
    assert "".join(deltas) == done["arguments"] == item["arguments"]


def test_an_answer_that_is_cut_off(server: Running) -> None:
    whole = post(server, {}).json
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in whole["output"]] == ["incomplete"]
    *_, item, last = events(post(server, {"stream": True}))
    assert last["type"] == "response.incomplete" and item["item"]["status"] == "incomplete"
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])


def test_an_answer_of_a_class(client: openai.OpenAI) -> None:
    class Sum(BaseModel):
        a: int
        is_right: bool

    for effort in ("none", None):
        response = client.responses.parse(
            model="tiny", input="Hello", text_format=Sum, max_output_tokens=400, reasoning={"effort": effort}
        )
        assert isinstance(response.output_parsed, Sum)
    form: Any = {"format": {"type": "json_object"}}
    limits: Any = {"max_output_tokens": 500, "temperature": 1}
    texts = [
        client.responses.create(model="tiny", input="Hi", text=form, extra_body={"seed": seed}, **limits).output_text
        for seed in range(8)
    ]
    assert any(texts) and all(text[:1] in ("", "{") for text in texts)  # some think for all of their tokens


def test_a_call_that_is_wanted_comes(at_once: Running) -> None:
    """Even a model of random weights makes the call."""
    named = {"type": "function", "name": "add"}
    for choice, names in (
        ("required", {"add", "stop"}),
        (named, {"add"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}, {"stop"}),
    ):
        for seed in range(3):
            body = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "seed": seed, "max_output_tokens": 2000}
            one = {} if choice is named else {"parallel_tool_calls": False}
            output = post(at_once, body | one).json["output"]
            assert len(output) == 1 and {one["name"] for one in output} <= names


def test_tools_may_be_called_where_the_answer_has_a_format(at_once: Running) -> None:
    """A model of random weights calls a tool or answers in the format. The body is that of an agent with an output type
    and a tool, as openai-agents sends it, streamed and not, and with a call that has to come.
    """
    text = {"format": {"type": "json_schema", "name": "final_output", "schema": REPLY, "strict": True}}
    first: list[dict[str, Any]] = [{"content": "Which?", "role": "user"}]
    called = {"arguments": '{"a": 1}', "call_id": "44a8fe7f9", "name": "add", "type": "function_call"}
    later = [
        *first,
        {**called, "id": "fc_d06ad52e3601c14203b1cb1b", "status": "completed"},
        {"call_id": "44a8fe7f9", "output": "1", "type": "function_call_output"},
    ]
    agent = {
        "instructions": "You help.",
        "include": [],
        "tools": TOOLS[:1],
        "text": text,
        "max_output_tokens": 1000,
        "temperature": 1.0,
    }
    kinds, named = set(), {"type": "function", "name": "add"}
    for seed in range(8):
        for choice in (None, "required", named):
            body = agent | {"seed": seed} | ({} if choice is None else {"tool_choice": choice})
            body |= {"input": later, "include": [LOGPROBS]} if seed % 2 else {"input": first}
            response = post(at_once, body).json
            streamed = events(post(at_once, body | {"stream": True}))[-1]["response"]
            assert without_ids(streamed["output"]) == without_ids(response["output"])
            assert response["status"] == "completed"
            for item in response["output"]:
                assert item["type"] == "function_call" or choice is None
                if choice is None:
                    kinds.add(item["type"])
                if item["type"] == "function_call":
                    jsonschema.validate(json.loads(item["arguments"]), ADD)
                else:
                    (part,) = item["content"]
                    jsonschema.validate(json.loads(part["text"]), REPLY)
                    written = "".join(one["token"] for one in part["logprobs"])
                    assert written == (part["text"] if seed % 2 else "")
            assert len(response["output"]) == 1 or choice is not named
    assert kinds == {"function_call", "message"}


def test_what_the_model_sees(server: Running) -> None:
    items = [
        {"role": "developer", "content": "Be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in ("One", "1")]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Two", "annotations": []}], "id": "msg_1"},
        {"type": "function_call", "call_id": "abc123def", "name": "add", "arguments": '{"a": 77}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "abc123def", "output": "78"},
        {"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "79"}]},
        {"role": "assistant", "content": "Three"},
        {"role": "assistant", "content": "Four"},
    ]
    assert shown(server, input=items) == (
        "system: Be brief; user: One\n1; assistant: Two<tool_call>add 77; tool: 78; tool: 79; assistant: Three; "
        "assistant: Four; assistant: "
    )
    assert shown(server, instructions="Be") == "system: Be; user: Hello; assistant: "
    assert shown(server, tools=TOOLS) == "add stop user: Hello; assistant: "
    assert shown(server, tools=TOOLS, tool_choice="none") == "user: Hello; assistant: "
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "stop"}]}
    assert shown(server, tools=TOOLS, tool_choice=allowed) == "stop user: Hello; assistant: "
    kwargs = {"chat_template_kwargs": {"enable_thinking": True}}
    assert shown(server, **kwargs).endswith("assistant: <think>\n")


def test_reasoning_goes_into_the_message_of_its_answer() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]}
    with running(kind="thinks") as server:
        items = [{"role": "user", "content": "Hi"}, thought, {"role": "assistant", "content": "Yes"}]
        assert shown(server, input=items) == "So.Hi"
        assert shown(server, input=items, reasoning={"effort": "none"}) == "So.Hino thinking"


def test_a_response_follows_another(server: Running, client: openai.OpenAI) -> None:
    first = client.responses.create(**asked(tools=TOOLS, instructions="Be brief"))
    (call, _) = (item for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    second = client.responses.create(**asked("Yes.", previous_response_id=first.id, input=[result]))
    assert second.previous_response_id == first.id
    seen = shown(server, previous_response_id=second.id, input="And?")
    assert seen == (
        "user: Hello; assistant: I add.<tool_call>add 1<tool_call>add 1; tool: 2; assistant: Yes.; user: And?; "
        "assistant: "
    )


def test_what_is_kept(server: Running, client: openai.OpenAI) -> None:
    for stream in (False, True):
        made = client.responses.create(**asked("Yes.", input=[{"role": "user", "content": "Hi"}]), stream=stream)
        response = made if not stream else list(made)[-1].response  # type: ignore[attr-defined]
        assert client.responses.retrieve(response.id) == response
    follower = client.responses.create(**asked("So.", input="Why?", previous_response_id=response.id))
    page = client.responses.input_items.list(follower.id)
    texts = [item.content[0].text for item in page if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["Why?", "Yes.", "Hi"]
    ids = [item.id for item in client.responses.input_items.list(follower.id, order="asc", limit=1)]  # all pages
    assert ids == [item.id for item in page][::-1] and len(ids) == 3
    tail = get(server, f"{follower.id}/input_items?order=asc&after={ids[0]}&limit=1").json
    assert [one["id"] for one in tail["data"]] == [tail["first_id"]] == [ids[1]] and tail["has_more"]

    assert get(server, response.id, "other").status == 404  # another key is another tenant
    assert client.responses.delete(response.id) is None  # type: ignore[func-returns-value]
    assert get(server, response.id).error["code"] == "not_found"
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**asked(previous_response_id=response.id))
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"
    apart = client.responses.create(**asked("Yes.", store=False))
    assert apart.model_extra == {"store": False} and get(server, apart.id).status == 404


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true", "stream"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=x", "after"),
        ("/input_items?before=x", "before"),
    ],
)
def test_queries_that_cannot_be(server: Running, path: str, param: str) -> None:
    kept = post(server, {}).json["id"]
    answer = get(server, f"{kept}{path}")
    assert (answer.status, answer.error["param"]) == (400, param)


def test_the_store_keeps_what_was_used_last() -> None:
    store, one = ResponseStore(2, 100), StoredResponse(b'{"output":[{"id":2}]}', b'[{"id":1}]')
    for id in "ab":
        store.put("", id, one)
    assert store.get("", "a") is one and store.conversation("", "a") == [{"id": 1}, {"id": 2}]
    store.put("", "c", one)
    assert [store.get("", id) for id in "abc"] == [one, None, one]
    store.put("", "d", StoredResponse(b"x" * 60, b"x" * 39))
    assert [store.get("", id) is None for id in "acd"] == [True, True, False] and store.num_bytes == 99
    store.put("", "e", StoredResponse(b"x" * 60, b"x" * 41))
    assert store.get("", "d") is store.get("", "e") is None and store.num_bytes == 0


def test_a_server_that_keeps_nothing() -> None:
    with running(responses_store=0) as server:
        made = post(server, {}).json
        assert made["store"] is False and get(server, made["id"]).status == 404
        answer = post(server, {"store": True})
        assert answer.status == 400 and "store is not implemented: this server keeps no" in answer.error["message"]
        answer = post(server, {"tools": TOOLS})
        assert answer.status == 400 and "tools: the model's chat template shows no tools" in answer.error["message"]
        forced = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 400}
        (item,) = post(server, forced).json["output"]
        assert (item["type"], item["name"]) == ("function_call", "add")
    for wrong in ({"responses_store": -1}, {"responses_memory": 0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            ServerConfig(**wrong)


def test_a_stream_that_fails() -> None:
    with running(kind="NaN") as server:
        late = {"temperature": 1, "seed": 24, "ignore_eos": True}  # draws the token of NaN after hundreds of others
        *_, last = events(post(server, {"max_output_tokens": 4000, "stream": True, **late}))
        assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
        assert last["response"]["error"] == {"code": "server_error", "message": "the model's logits are not numbers"}
        assert get(server, last["response"]["id"]).status == 404


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


def parts(*given: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(given)}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": None}, "input", "expected `str | array`"),
        ({"input": []}, "input", "input is empty"),
        (items(3), "input[0]", "expected `object`"),
        (items({"type": "web_search_call"}), "input[0].type", "not implemented: 'web_search_call'; there are message"),
        (items({"type": "item_reference", "id": "x"}), "input[0].type", "'item_reference'"),
        (items({"content": "x"}), "input[0].role", "missing"),
        (items({"role": "tool", "content": "x"}), "input[0].role", "invalid enum value 'tool'"),
        (items({"role": "user"}), "input[0].content", "missing"),
        (items({"role": "user", "content": "x", "id": 3}), "input[0].id", "expected `str | null`"),
        (parts({"type": "input_image", "image_url": "http://127.0.0.1/"}), "input[0].content[0].type", "'input_image'"),
        (parts({"type": "input_file"}), "input[0].content[0].type", "'input_file'; there are input_text, output_text"),
        (parts({"type": "input_text"}), "input[0].content[0].text", "missing"),
        (items({"type": "function_call", "name": "f", "arguments": "{}"}), "input[0].call_id", "missing"),
        (
            items({"type": "function_call", "call_id": "x", "name": "f", "arguments": [1]}),
            "input[0].arguments",
            "expected `str | null`",
        ),
        (items({"type": "function_call_output", "call_id": "x"}), "input[0].output", "missing"),
        (
            items({"type": "function_call_output", "call_id": "x", "output": [{"type": "input_image"}]}),
            "input[0].output[0].type",
            "'input_image'",
        ),
        (items({"type": "reasoning", "summary": [{"type": "x"}]}), "input[0].summary[0].type", "there are reasoning"),
        ({"instructions": 3}, "instructions", "expected `str | null`"),
        ({"max_output_tokens": "8"}, "max_output_tokens", "expected `int | null`"),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens "),
        ({"temperature": "x"}, "temperature", "expected `float | null`"),
        ({"temperature": -1}, "temperature", "temperature "),
        ({"top_p": 2}, "top_p", "top_p "),
        ({"stream": 1}, "stream", "expected `bool | null`"),
        ({"store": "x"}, "store", "expected `bool | null`"),
        ({"metadata": {"a": 1}}, "metadata[...]", "expected `str`"),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "there is no response 'resp_x' to continue"),
        ({"include": ["reasoning"]}, "include", "'reasoning'; there is message.output"),
        ({"include": LOGPROBS}, "include", "expected `array | null`"),
        ({"include": [3]}, "include[0]", "expected `str`"),
        (
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
            "tool_choice",
            "of one of tools: none",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "tools[0].name must have 1 to 64"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name", "missing"),
        ({"tools": [TOOLS[0]] * 2}, "tools[1].name", "two tools of this name"),
        ({"tool_choice": "required"}, "tool_choice", "of one of tools: none"),
        ({"tool_choice": "any", "tools": TOOLS}, "tool_choice", "of one of tools: add, stop"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice", "add, stop"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}, "tools": TOOLS}, "tool_choice", "must be"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add"}]}, "tools": TOOLS},
            "tool_choice.tools[0].type",
            "missing",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}, "tools": TOOLS},
            "tool_choice.mode",
            "tool_choice.mode: invalid enum",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}, "tools": TOOLS},
            "tool_choice.tools",
            "tool_choice.tools must be of tools: add, stop",
        ),
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls", "expected `bool | null`"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid enum"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "text.format has no schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
            "text.format",
            "text.format cannot be compiled",
        ),
        *(
            ({"text": {"format": {"type": kind, name: value}}}, f"text.format.{name}", "only for the type json_schema")
            for kind in ("text", "json_object")
            for name, value in (("schema", {}), ("name", "x"), ("description", "x"), ("strict", True))
        ),
        ({"stream_options": {}}, "stream_options", "stream_options are for streams"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "not implemented: no event is padded",
        ),
        ({"max_output_tokens": 2**31}, "max_output_tokens", "max_output_tokens must be between 0 and 2147483647"),
        (
            {"reasoning": {"effort": "none"}, "chat_template_kwargs": {"thinking": True}},
            "reasoning.effort",
            "reasoning.effort and chat_template_kwargs set different values of thinking",
        ),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "reasoning.effort: invalid enum"),
        ({"reasoning": {"summary": "none"}}, "reasoning.summary", "invalid enum"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "not implemented: there is one mode"),
        ({"background": True}, "background", "not implemented"),
        ({"truncation": "middle"}, "truncation", "invalid enum"),
        ({"truncation": "auto", "input": "x " * 5000}, "input", "maximum context length"),
        ({"conversation": "conv_x"}, "conversation", "not implemented"),
        ({"prompt": {"id": "x"}}, "prompt", "not implemented"),
        ({"top_logprobs": 2}, "top_logprobs", 'top_logprobs needs include: ["message.output_text.logprobs"]'),
        ({"top_logprobs": -1}, "top_logprobs", "top_logprobs needs include"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs", "top_logprobs must be between 0 and 20"),
        ({"top_logprobs": -1, "include": [LOGPROBS]}, "top_logprobs", "top_logprobs must be between 0 and 20"),
        ({"top_logprobs": "2", "include": [LOGPROBS]}, "top_logprobs", "expected `int | null`"),
        ({"top_logprobs": True, "include": [LOGPROBS]}, "top_logprobs", "expected `int | null`"),
        ({"logprobs": True}, "logprobs", "logprobs is not implemented: it is a key of chat completions"),
        ({"messages": HELLO}, "messages", "messages is not implemented"),
        ({"max_tokens": 3}, "max_tokens", "max_tokens is not implemented"),
        ({"model": "other"}, "model", "there is no model 'other'"),
        ({"input": "x " * 5000}, "input", "maximum context length"),
    ],
)
def test_what_cannot_be(server: Running, body: dict[str, Any], param: str, words: str) -> None:
    answer = post(server, body)
    assert (answer.status, answer.error["param"]) == (404 if "model" in body else 400, param), answer.body
    assert words in answer.error["message"], answer.body


def test_what_changes_nothing(server: Running) -> None:
    harmless = {
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "metadata": {},
        "prompt_cache_key": "x",
        "reasoning": {"summary": "auto"},
        "safety_identifier": "x",
        "service_tier": "auto",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "top_logprobs": 0,
        "truncation": "disabled",
        "user": "x",
    }
    assert without_ids(post(server, harmless).json["output"]) == without_ids(post(server, {}).json["output"])
