"""Answers over HTTP: the library's own, in OpenAI's form, whole and as streams."""

from datetime import datetime
from typing import Any

import anthropic
import openai
import pytest

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.outputs import CompletionOutput
from enginewright.runtime.core.params import default_params
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, LENGTH, Running
from tests.helpers.token_bytes import byte_level_bytes, offsets_of

PROMPT = "The capital of France is"
SERVER = {"served_model_names": ("tiny", "org/tiny")}


def expected(llm: LLM, prompt: Any, **given: Any) -> list[CompletionOutput]:
    return llm.generate(prompt, default_params(llm.engine, ignore_eos=True, **given))[0].outputs


def joined(events: list[Any], kind: str, index: int = 0) -> str:
    """The text of one choice of a stream."""
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["text"] if kind == COMPLETIONS else choice["delta"].get("content", "") for choice in choices)


def test_a_completion_is_the_librarys(server: Running, llm: LLM) -> None:
    answer = server.complete(PROMPT, max_tokens=20, model="tiny")
    (output,) = expected(llm, PROMPT, max_tokens=20)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, output.text, "length")
    assert choice["logprobs"] is None and choice["stop_reason"] is None
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert answer["id"].startswith("cmpl-") and answer["system_fingerprint"].startswith("fp_")
    ids = llm.encode(PROMPT)
    usage = {"prompt_tokens": len(ids), "completion_tokens": 20, "total_tokens": len(ids) + 20}
    assert {name: answer["usage"][name] for name in usage} == usage


def test_a_chat_is_the_librarys(server: Running, llm: LLM) -> None:
    messages = [{"role": "developer", "content": "Be brief."}, *HELLO]
    answer = server.chat(messages, max_completion_tokens=20, max_tokens=20)
    as_seen = [{"role": "system", "content": "Be brief."}, *HELLO]
    (output,) = expected(llm, llm.encode(as_seen), max_tokens=20)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": output.text}
    assert answer["object"] == "chat.completion" and answer["usage"]["completion_tokens"] == 20
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    cut = server.chat([{"role": "system", "content": parts}, *HELLO])
    same = server.chat([{"role": "system", "content": "Be\nbrief."}, *HELLO])
    assert cut["choices"] == same["choices"] != answer["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_what_the_whole_says(server: Running, path: str) -> None:
    options = {"n": 3, "temperature": 0.9, "seed": 5, "max_tokens": 30, "stop": ["e"], "logprobs": path == CHAT or 2}
    ask = server.chat if path == CHAT else lambda **given: server.complete(PROMPT, **given)
    whole = ask(**options)
    events = ask(**options, stream=True, stream_options={"include_usage": True})
    assert len({event["id"] for event in events[:-1]}) == 1
    assert all(
        event["object"] == ("chat.completion.chunk" if path == CHAT else "text_completion") for event in events[:-1]
    )
    for choice in whole["choices"]:
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert joined(events, path, choice["index"]) == text
        mine = [one for event in events[:-1] for one in event["choices"] if one["index"] == choice["index"]]
        ends = [one["finish_reason"] for one in mine if one["finish_reason"] is not None]
        assert ends == [choice["finish_reason"]] == [mine[-1]["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        together: dict[str, Any] = {}
        for logprobs in (one["logprobs"] for one in mine if one["logprobs"]):
            for name, values in logprobs.items():
                together[name] = together.get(name, []) + values if values is not None else None
        assert together == choice["logprobs"]
    assert len({choice["index"] for choice in whole["choices"]}) == 3
    assert any(choice["stop_reason"] == "e" for choice in whole["choices"])
    assert [event["usage"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["choices"] == []
    spared = ("prompt_tokens_details", "phases")  # the second time, the prompt is in the cache
    assert {k: v for k, v in events[-2]["usage"].items() if k not in spared} == {
        k: v for k, v in whole["usage"].items() if k not in spared
    }
    if path == CHAT:
        openings = [event["choices"][0] for event in events[:-2] if "role" in event["choices"][0]["delta"]]
        assert [one["index"] for one in openings] == [0, 1, 2]


def test_a_stream_has_usage_only_if_asked(server: Running) -> None:
    for event in server.complete(PROMPT, stream=True)[:-1]:
        assert "usage" not in event and event["choices"]


def test_prompts_in_all_forms(server: Running, llm: LLM) -> None:
    texts = [PROMPT, "Hello, who"]
    ids = [llm.encode(text) for text in texts]
    alone = [server.complete(text)["choices"][0]["text"] for text in texts]
    assert alone[0] != alone[1]
    assert [choice["text"] for choice in server.complete(texts)["choices"]] == alone
    assert [choice["text"] for choice in server.complete(ids)["choices"]] == alone
    assert server.complete(ids[0])["choices"][0]["text"] == alone[0]
    answer = server.complete(texts, n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, alone[0]),
        (1, alone[0]),
        (2, alone[1]),
        (3, alone[1]),
    ]
    assert answer["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])
    assert answer["usage"]["completion_tokens"] == 4 * 16, "a completion that names no max_tokens has 16"
    events = server.complete(texts, n=2, stream=True)
    assert [joined(events, COMPLETIONS, index) for index in range(4)] == [alone[0], alone[0], alone[1], alone[1]]


def test_sampling_options_arrive(server: Running, llm: LLM) -> None:
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "seed": 11,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "min_tokens": 3,
        "max_tokens": 25,
        "stop_token_ids": [40, 50],
        "skip_special_tokens": False,
    }
    (output,) = expected(llm, PROMPT, **options, logit_bias={70: 5.0, 71: -5.0})
    choice = server.complete(PROMPT, **options, logit_bias={"70": 5, "71": -5})["choices"][0]
    assert choice["text"] == output.text
    allowed = list(range(60, 90))
    (output,) = expected(llm, PROMPT, **options, allowed_token_ids=allowed)
    limited = server.complete(PROMPT, **options, allowed_token_ids=allowed)["choices"][0]
    assert limited["text"] == output.text and set(output.token_ids) <= set(allowed)
    for name in ("seed", "repetition_penalty", "top_k", "temperature"):
        other = {**options, name: {"seed": 12, "repetition_penalty": 1.0, "top_k": 2, "temperature": 2.0}[name]}
        assert server.complete(PROMPT, **other)["choices"][0]["text"] != choice["text"]


def test_stops(server: Running, llm: LLM) -> None:
    (whole,) = expected(llm, PROMPT, max_tokens=40)
    stop = whole.text[5:8]
    cut = server.complete(PROMPT, max_tokens=40, stop=stop)["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (whole.text.partition(stop)[0], "stop", stop)
    kept = server.complete(PROMPT, max_tokens=40, stop=[stop], include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == whole.text.partition(stop)[0] + stop
    token = whole.token_ids[7]
    ended = server.complete(PROMPT, max_tokens=40, stop_token_ids=[token])["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    first = whole.token_ids.index(token)
    assert server.complete(PROMPT, max_tokens=40, stop_token_ids=[token])["usage"]["completion_tokens"] == first + 1


def test_logprobs_of_a_chat(server: Running, llm: LLM) -> None:
    messages = [{"role": "user", "content": "東京"}]
    choice = server.chat(messages, logprobs=True, top_logprobs=3, max_tokens=60, temperature=1, seed=1)["choices"][0]
    output = expected(llm, llm.encode(messages), max_tokens=60, temperature=1.0, seed=1, logprobs=3)[0]
    assert output.logprobs is not None
    entries = choice["logprobs"]["content"]
    assert len(entries) == 60
    for entry, token, named in zip(entries, output.token_ids, output.logprobs, strict=True):
        assert entry["logprob"] == pytest.approx(named[token].logprob, abs=1e-6)
        assert [one["logprob"] for one in entry["top_logprobs"]] == sorted(
            (one["logprob"] for one in entry["top_logprobs"]), reverse=True
        )
        for one in (entry, *entry["top_logprobs"]):
            assert bytes(one["bytes"]).decode(errors="replace") == one["token"]
            assert "\ufffd" in one["token"] or one["bytes"] == list(one["token"].encode())
        assert len(entry["top_logprobs"]) == 3
    plain = server.chat(messages, logprobs=True, max_tokens=4)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in plain] == [[]] * 4


def test_logprobs_of_a_completion(server: Running, llm: LLM) -> None:
    choice = server.complete(PROMPT, logprobs=2, max_tokens=9, temperature=1.5, seed=3)["choices"][0]
    output = expected(llm, PROMPT, max_tokens=9, temperature=1.5, seed=3, logprobs=2)[0]
    assert output.logprobs is not None
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == 9
    for place, (token, named) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert logprobs["token_logprobs"][place] == pytest.approx(named[token].logprob, abs=1e-6)
        assert logprobs["top_logprobs"][place][logprobs["tokens"][place]] is not None
    own = [byte_level_bytes(server.llm.engine.tokenizer, token) for token in output.token_ids]
    assert logprobs["text_offset"] == offsets_of(own)
    none = server.complete(PROMPT, logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert [list(named) for named in none["top_logprobs"]] == [[token] for token in none["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_tokens_that_are_parts_of_characters(server: Running, stream: bool, echo: bool) -> None:
    """Offsets count characters of the text, and bytes are their own."""
    text, prompt = "ďábel 😀", "Kdo? Č"
    tokenizer = server.llm.engine.tokenizer
    options: Any = {"structured_outputs": {"choice": [text]}, "ignore_eos": False, "stream": stream, "max_tokens": 40}
    answer = server.complete(prompt, logprobs=0, echo=echo, **options)
    parts = [one for event in answer[:-1] for one in event["choices"]] if stream else answer["choices"]
    whole = (prompt if echo else "") + text
    assert "".join(part["text"] for part in parts) == whole
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    prompt_ids = tokenizer.encode(prompt) if echo else []
    ids = prompt_ids[1:] + tokenizer.encode(text, add_special_tokens=False)
    if echo:  # the first token is special, and not of the text
        assert offsets.pop(0) == 0
    assert offsets[: len(ids)] == offsets_of([byte_level_bytes(tokenizer, token) for token in ids])
    assert offsets[len(ids) :] in ([], [len(whole)])  # of the token that ends it
    chat = server.chat(logprobs=True, top_logprobs=0, **{**options, "stream": False})["choices"][0]
    entries = chat["logprobs"]["content"][: len(tokenizer.encode(text, add_special_tokens=False))]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == text
    assert any("\ufffd" in entry["token"] for entry in entries)


def test_a_chat_without_max_tokens_goes_to_the_models_length(server: Running) -> None:
    prompt = server.chat()["usage"]["prompt_tokens"]
    answer = server.chat(max_tokens=None)
    assert answer["usage"]["total_tokens"] == server.llm.max_model_len > prompt
    assert answer["choices"][0]["finish_reason"] == "length"


def test_prefixes_are_shared_by_salt(server: Running) -> None:
    def cached(**options: Any) -> int:
        answer = server.complete(list(range(3, 203)), max_tokens=1, **options)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 100
    assert cached(cache_salt="yours") == 0
    assert cached() == 0


def test_what_means_nothing_is_taken(server: Running) -> None:
    """Keys that cannot change an answer, and those that we lack with the value that turns them off."""
    off = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "audio": None,
        "modalities": ["text"],
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "logit_bias": None,
        "stop": None,
        "n": None,
        "stream": None,
    }
    assert server.chat(**off)["choices"] == server.chat()["choices"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert server.chat(tools=[tool], tool_choice="none")["choices"] == server.chat()["choices"]
    message = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": [], "annotations": []}
    server.chat([*HELLO, message, *HELLO])


def test_a_json_object_with_a_schema(server: Running) -> None:
    """A schema in a JSON object format is accepted, as by llama.cpp."""
    schema = {"type": "object", "properties": {"a": {"const": 5}}, "required": ["a"], "additionalProperties": False}
    ours = {"type": "json_schema", "json_schema": {"schema": schema}}
    for ask in (server.chat, lambda **options: server.complete(PROMPT, **options)):
        held, same, free = (
            ask(response_format=form, max_tokens=40, ignore_eos=False)["choices"]
            for form in ({"type": "json_object", "schema": schema}, ours, {"type": "json_object"})
        )
        assert held == same != free


def test_models(server: Running) -> None:
    models = server.ask("GET", "/v1/models").json
    assert [model["id"] for model in models["data"]] == ["tiny", "org/tiny"]
    assert models["object"] == "list" and models["data"][0]["max_model_len"] == server.llm.max_model_len
    assert server.ask("GET", "/v1/models/org/tiny").json == models["data"][1]
    assert server.ask("GET", "/v1/models/other").error["code"] == "model_not_found"
    assert server.complete(PROMPT, model="org/tiny")["model"] == "org/tiny"


def test_models_for_anthropics_client(server: Running, client: openai.OpenAI) -> None:
    """Models have the keys of Anthropic's client, and those of OpenAI's, which differ."""
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="x", max_retries=0) as other:
        found = list(other.models.list(limit=1))
        page = other.models.list()
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "org/tiny", False)
    for model in found:
        assert (model.type, model.display_name) == ("model", model.id) and model.max_input_tokens == LENGTH
        assert isinstance(model.created_at, datetime) and model.created_at.timestamp() == server.engines.started
    assert [model.id for model in found] == ["tiny", "org/tiny"] == [model.id for model in client.models.list()]
    assert {model.owned_by for model in client.models.list()} == {"enginewright"}


def test_openais_client_chats(client: openai.OpenAI, server: Running) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=12)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model="tiny",
        messages=HELLO,  # type: ignore[arg-type]
        max_completion_tokens=12,
        stream=True,
        logprobs=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert sum(
        len(chunk.choices[0].logprobs.content or []) for chunk in chunks if chunk.choices and chunk.choices[0].logprobs
    ) == (whole.usage.completion_tokens)


def test_openais_client_completes(client: openai.OpenAI) -> None:
    extra = {"top_k": 5, "ignore_eos": True}
    whole = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, extra_body=extra, logprobs=1)
    stream = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, extra_body=extra, stream=True)
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.tokens or []) == 12
    assert len("".join(chunk.choices[0].text for chunk in stream)) > 0
    assert [model.id for model in client.models.list()] == ["tiny", "org/tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_openais_client_hears_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'x'") as missing:
        client.chat.completions.create(model="x", messages=HELLO)  # type: ignore[arg-type]
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature") as wrong:
        client.completions.create(model="tiny", prompt=PROMPT, temperature=-1)
    assert wrong.value.param == "temperature"
