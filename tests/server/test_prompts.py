"""Prompts in a server's answers: echo, log-probabilities, growing usage, and parts that clients put into messages."""

import math
from typing import Any

import numpy as np
import pytest

from enginewright.runtime.api.llm import LLM
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.devices import open_engine, open_executor
from enginewright.runtime.sampling.parameters import SamplingParams
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running, running, tiny_engine

PROMPT = [5, 77, 300, 2, 9, 11, 250, 43, 8, 8, 101]
SERVER = {"kind": "thinks"}


def reference(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log-probabilities [tokens, vocabulary] of what follows each position, in float64, from the engine's logits."""
    with open_engine(tiny_engine(), "cpu") as engine:
        (logits,) = score(open_executor(engine, RuntimeConfig(kv_cache_memory=64 << 20)), [ids])
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    return exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize("length", [1, 2, 11, 40, 200])
def test_log_probabilities_of_a_prompt(llm: LLM, length: int) -> None:
    """Prompts of one or several steps are scored alike, also among other requests, and with several completions."""
    ids = (PROMPT * 20)[:length]
    params = [
        SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, n=2, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    ]
    output, other = llm.generate([ids, [9, 9, 4]], params)
    assert other.prompt_logprobs is None and output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == length and output.prompt_logprobs[0] is None
    expected = reference(ids)
    for position in range(1, length):
        named, row = output.prompt_logprobs[position], expected[position - 1]
        assert named is not None and ids[position] in named
        likeliest = [token for token, entry in named.items() if entry.rank is not None]
        assert row[likeliest[0]] == row.max() and len(likeliest) == 2
        assert all(math.isclose(entry.logprob, row[token], abs_tol=1e-5) for token, entry in named.items())


def test_an_answer_does_not_depend_on_its_prompts_log_probabilities(llm: LLM) -> None:
    ids = PROMPT * 9
    common = {"temperature": 1.0, "seed": 3, "max_tokens": 20, "ignore_eos": True, "n": 3}
    plain, scored = (llm.generate(ids, SamplingParams(**common, prompt_logprobs=k))[0] for k in (None, 1))
    assert [one.token_ids for one in plain.outputs] == [one.token_ids for one in scored.outputs]


def test_no_token_is_wanted(llm: LLM) -> None:
    output = llm.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=0, n=2))[0]
    assert [(one.text, one.token_ids, one.finish_reason) for one in output.outputs] == [("", [], "length")] * 2
    assert output.prompt_logprobs is not None and all(output.prompt_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("n", [1, 2])
def test_echo(server: Running, stream: bool, max_tokens: int, n: int) -> None:
    """Echo gives what lm-eval reads: tokens and log-probabilities of the prompt, then of the completion."""
    text = "The capital of France"
    ids = server.llm.engine.tokenizer.encode(text)
    plain = server.complete(text, max_tokens=max(max_tokens, 1), logprobs=1)["choices"][0]
    answer = server.complete(text, max_tokens=max_tokens, logprobs=1, echo=True, n=n, stream=stream)
    for index in range(n):
        if stream:
            choices = [c for event in answer[:-1] for c in event["choices"] if c["index"] == index]
        else:
            choices = [answer["choices"][index]]
        written = plain["text"] if max_tokens else ""
        assert "".join(choice["text"] for choice in choices) == text + written
        parts = [choice["logprobs"] for choice in choices]
        logprobs = {key: [entry for part in parts for entry in part[key]] for key in parts[0]}
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        assert "".join(logprobs["tokens"][1 : len(ids)]) == text
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        expected = reference(ids)
        for position in range(1, len(ids)):
            row = expected[position - 1]
            assert math.isclose(logprobs["token_logprobs"][position], row[ids[position]], abs_tol=1e-5)
            top = logprobs["top_logprobs"][position]
            assert math.isclose(max(top.values()), row.max(), abs_tol=1e-5)
            assert (max(top, key=top.__getitem__) == logprobs["tokens"][position]) == (row.argmax() == ids[position])
        lengths = np.cumsum([0, *map(len, logprobs["tokens"][1:])])  # the first one is special, and not of the text
        assert logprobs["text_offset"][: len(ids)] == [0, *lengths.tolist()][: len(ids)]
        own = [len(text) + offset for offset in plain["logprobs"]["text_offset"]] if max_tokens else []
        assert logprobs["text_offset"][len(ids) :] == own
        if max_tokens:
            assert logprobs["token_logprobs"][len(ids) :] == plain["logprobs"]["token_logprobs"]
        assert choices[-1]["finish_reason"] == "length"


def test_echo_of_token_ids(server: Running) -> None:
    (choice,) = server.complete(PROMPT, max_tokens=0, echo=True)["choices"]
    tokenizer = server.llm.engine.tokenizer
    assert choice["text"] == tokenizer.decode(PROMPT) and choice["logprobs"] is None


def test_prompt_logprobs_in_vllms_form(server: Running) -> None:
    expected = reference(PROMPT)
    (choice,) = server.complete(PROMPT, max_tokens=1, prompt_logprobs=1)["choices"]
    assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(PROMPT)
    for position, named in enumerate(choice["prompt_logprobs"][1:], start=1):
        token, (likeliest,) = PROMPT[position], [one for one in named.values() if one["rank"] == 1]
        assert math.isclose(named[str(token)]["logprob"], expected[position - 1][token], abs_tol=1e-5)
        assert math.isclose(likeliest["logprob"], expected[position - 1].max(), abs_tol=1e-5)
        tokenizer = server.llm.engine.tokenizer
        assert named[str(token)]["decoded_token"] == tokenizer.decode([token], skip_special_tokens=False)
    whole = server.chat(HELLO, prompt_logprobs=0)
    assert whole["prompt_logprobs"][0] is None and all(whole["prompt_logprobs"][1:])


def test_nan_in_a_prompt_fails_its_answer_alone() -> None:
    with running(kind="NaN") as server:
        answer = server.post(COMPLETIONS, {"prompt": [5, 300, 6], "prompt_logprobs": 1, "max_tokens": 2})
        assert answer.status == 500 and answer.error["code"] == "nan_logits"
        assert server.complete([5, 6], prompt_logprobs=1)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_so_far(server: Running, path: str) -> None:
    """guidellm asks for it in each event."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    ask = server.chat if path == CHAT else lambda **given: server.complete("x", **given)
    events = ask(stream=True, max_tokens=8, n=2, stream_options=options)[:-1]
    *chunks, last = events
    for index in range(2):
        mine = [event["usage"] for event in chunks if event["choices"][0]["index"] == index]
        counts = [usage["completion_tokens"] for usage in mine]
        assert counts == sorted(counts) and counts[-1] == 8
        assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in mine)
        assert {usage["prompt_tokens"] for usage in mine} == {last["usage"]["prompt_tokens"]}
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 16
    plain = ask(stream=True, max_tokens=2)
    assert all("usage" not in event for event in plain[:-1])


def test_variables_of_the_chat_template(server: Running) -> None:
    """Other tokens come to the model; what they are is seen by what an echo of the same text takes."""

    def prompt_tokens(**options: Any) -> int:
        return int(server.chat(**options)["usage"]["prompt_tokens"])

    def tokens_of(text: str) -> int:
        return len(server.llm.engine.tokenizer.encode(text, add_special_tokens=False))

    assert prompt_tokens() == tokens_of("Hello")
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert prompt_tokens(**off) == tokens_of("Hellono thinking")
    assert prompt_tokens(**off, add_generation_prompt=False) == tokens_of("Hello")


def test_messages_as_clients_keep_them(server: Running) -> None:
    """litellm's and openai's own replies, sent back as history: their keys are no reason for a 400."""
    reply = {
        "role": "assistant",
        "content": "Hi",
        "id": "msg_1",
        "refusal": None,
        "annotations": [{"type": "url_citation"}],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": [],
        "cache_control": {"type": "ephemeral"},
        "something_new": None,
    }
    part = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}, "annotations": []}
    history = [{"role": "user", "content": [part]}, reply, *HELLO]
    plain = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
    with_keys, without = server.chat(history), server.chat(plain)
    for answer in (with_keys, without):
        answer["usage"].pop("phases")  # which are times
    assert with_keys["choices"] == without["choices"] and with_keys["usage"] == without["usage"]
    thought = [*HELLO, {"role": "assistant", "content": "Hi", "reasoning_content": "long thought"}]
    assert server.chat(thought)["usage"]["prompt_tokens"] > server.chat(plain[:2])["usage"]["prompt_tokens"]


def test_memory_for_log_probabilities() -> None:
    with running(max_logprobs_memory=8 << 20) as server:
        body = {"prompt": "x", "max_tokens": 1000, "logprobs": 20, "n": 8}
        answer = server.post(COMPLETIONS, body)
        assert answer.status == 400 and answer.error["param"] == "logprobs" and "8.0 MiB" in answer.error["message"]
        answer = server.post(COMPLETIONS, {"prompt": [5] * 2000, "prompt_logprobs": 20})
        assert answer.status == 400 and answer.error["param"] == "prompt_logprobs"
        server.service.admission.logprob_bytes += 8 << 20  # others are being answered
        answer = server.post(COMPLETIONS, {**body, "n": 1, "max_tokens": 5})
        assert answer.status == 429 and "retry-after" in answer.headers
        assert server.complete("x", max_tokens=3)["usage"]["completion_tokens"] == 3
        server.service.admission.logprob_bytes -= 8 << 20
        assert server.complete("x", max_tokens=5, logprobs=20)["usage"]["completion_tokens"] == 5
