"""Refusals of a server: always in OpenAI's form, with the name of the wrong parameter, and never with a 5xx."""

import hmac
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginewright.errors import EngineError
from enginewright.runtime.server.protocol import SAMPLING, UNREAD
from enginewright.runtime.text.tokenizer import Tokenizer
from enginewright.runtime.text.worker_process import WorkerProcess
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running, running, wait_until

SERVER = {"limits": {"max_model_len": 300}}


# Keys that are added to a body with a good prompt, the param that the error must name, and its code.
WRONG_OPTIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"temperature": -0.1}, "temperature", None),
    ({"temperature": 1001}, "temperature", None),
    ({"temperature": True}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", None),
    ({"top_k": -2}, "top_k", None),
    ({"min_p": 1.5}, "min_p", None),
    ({"n": 0}, "n", None),
    ({"n": 129}, "n", None),
    ({"n": 10**30}, "n", None),
    ({"n": 1.5}, "n", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"max_tokens": -1}, "max_tokens", None),
    ({"min_tokens": 99, "max_tokens": 9}, "min_tokens", None),
    ({"presence_penalty": 2.1}, "presence_penalty", None),
    ({"frequency_penalty": -2.1}, "frequency_penalty", None),
    ({"repetition_penalty": 0}, "repetition_penalty", None),
    ({"seed": "x"}, "seed", "invalid_type"),
    ({"seed": 2**64}, "seed", None),
    ({"stop": ""}, "stop", None),
    ({"stop": ["a"] * 65}, "stop", None),
    ({"stop": ["a" * 500_000] * 14}, "stop", None),
    ({"stop": [1]}, "stop[0]", "invalid_type"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", None),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
        "response_format.schema",
        None,
    ),
    ({"stop_token_ids": [307]}, "stop_token_ids", None),
    ({"stop_token_ids": [-1]}, "stop_token_ids", None),
    ({"stop_token_ids": [[]]}, "stop_token_ids[0]", "invalid_type"),
    ({"allowed_token_ids": [5, 307]}, "allowed_token_ids", None),
    ({"allowed_token_ids": []}, "allowed_token_ids", None),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", None),
    ({"allowed_token_ids": ["a"]}, "allowed_token_ids[0]", "invalid_type"),
    ({"logit_bias": {"307": 1}}, "logit_bias", None),
    ({"logit_bias": {"5": 101}}, "logit_bias", None),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_type"),
    ({"logit_bias": [5]}, "logit_bias", "invalid_type"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options", None),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported_parameter",
    ),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", None),
    ({"best_of": 129}, "best_of", None),
    ({"best_of": 2, "n": 3}, "best_of", None),
    ({"best_of": True}, "best_of", "invalid_type"),
    ({"use_beam_search": 1}, "use_beam_search", "invalid_type"),
    ({"length_penalty": 2}, "length_penalty", None),
    ({"early_stopping": True}, "early_stopping", None),
    ({"early_stopping": "maybe"}, "early_stopping", "invalid_type"),
    ({"priority": 1001}, "priority", None),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"timeout": 0}, "timeout", "invalid_value"),
    ({"timeout": -1.5}, "timeout", "invalid_value"),
    ({"timeout": 86_401}, "timeout", "invalid_value"),
    ({"timeout": 1e300}, "timeout", "invalid_value"),
    ({"timeout": "5s"}, "timeout", "invalid_type"),
    ({"allowed_token_ids": [5] * 308}, "allowed_token_ids", None),
    ({"logit_bias": {str(n): 0 for n in range(1025)}}, "logit_bias", None),
    ({"stop_token_ids": [5] * 65}, "stop_token_ids", None),
    ({"logit_bias": [1e308, 1e-400]}, "logit_bias", "invalid_type"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", None),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter"),
    ({"cache_salt": 5}, "cache_salt", "invalid_type"),
]

WRONG_CHATS: list[tuple[Any, str]] = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [None]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [*HELLO, {"role": "king", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs"),
    ({"messages": HELLO, "max_completion_tokens": -1}, "max_completion_tokens"),
    ({"messages": HELLO, "max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"messages": HELLO, "max_completion_tokens": 5, "max_tokens": 4}, "max_tokens"),
    ({"messages": HELLO, "echo": True}, "echo"),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"messages": [{"role": "user", "content": "x", "tools": [{}]}]}, "messages[0].tools"),
    ({"messages": [{"role": "user", "content": "x" * 9999}]}, "messages"),
]

WRONG_PROMPTS: list[tuple[Any, str | None]] = [
    (None, "prompt"),
    (5, "prompt"),
    ([], "prompt"),
    ([[]], "prompt"),
    ([5, "x"], "prompt"),
    ([[5], "x"], "prompt"),
    ([[5], 5], "prompt"),
    ([True], "prompt[0]"),
    ([[5.5]], "prompt[0][0]"),
    ([-1], "prompt"),
    ([307], "prompt"),
    ([2**70], "prompt"),
    ([5] * 300, "prompt"),
    (["x", "y" * 9999], "prompt"),
]


def refused(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["type"] == "invalid_request_error"
    return answer.error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("options", "param", "code"), WRONG_OPTIONS, ids=lambda value: str(value)[:40])
def test_wrong_options(server: Running, path: str, options: Any, param: str, code: str | None) -> None:
    good = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    for stream in (False, True):
        error = refused(
            server, path, {"stream": stream, **good, **options} if "stream" not in options else good | options
        )
        assert (error["param"], error["code"]) == (param, code), error
        assert param.partition("[")[0] in error["message"]


@pytest.mark.parametrize(("body", "param"), WRONG_CHATS, ids=lambda value: str(value)[:60])
def test_wrong_chats(server: Running, body: Any, param: str) -> None:
    limit = {} if "max_completion_tokens" in body else {"max_tokens": 2}
    assert refused(server, CHAT, limit | body)["param"] == param


@pytest.mark.parametrize(("prompt", "param"), WRONG_PROMPTS, ids=lambda value: str(value)[:30])
def test_wrong_prompts(server: Running, prompt: Any, param: str) -> None:
    assert refused(server, COMPLETIONS, {"prompt": prompt})["param"] == param


def test_a_prompt_that_is_too_long_says_so(server: Running) -> None:
    for prompt in ([5] * 300, "word " * 20000, "x" * 1000):
        error = refused(server, COMPLETIONS, {"prompt": prompt})
        assert error["code"] == "context_length_exceeded" and "maximum context length is 300 tokens" in error["message"]
    assert server.complete([5] * 299)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"prompt"',
        b'{"prompt": "x"',
        b'{"prompt": "x"} {}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud800\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 90_000 + b"}",
        b'{"x": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        b'{"\xff": 1}',
        "{'prompt': 'x'}".encode("utf-16"),
    ],
    ids=lambda body: repr(body[:30]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_json(server: Running, path: str, body: bytes) -> None:
    refused(server, path, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=8,
)
NAMES = sorted({*SAMPLING, *UNREAD, "logprobs", "top_logprobs", "stream_options", "cache_salt", "model", "stream"})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": st.text(max_size=30) | JSON},
        optional={"name": JSON, "tool_calls": JSON},
    ),
    max_size=3,
)
PROMPTS = st.text(max_size=50) | st.lists(st.integers(-1, 310), max_size=20) | st.lists(st.text(max_size=9), max_size=3)
OPTIONS = st.dictionaries(
    st.sampled_from(NAMES) | st.text(max_size=10), st.integers(-3, 30) | st.floats(-1, 3) | JSON, max_size=3
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([CHAT, COMPLETIONS]), MESSAGES | JSON, PROMPTS | JSON, OPTIONS)
def test_no_body_is_a_fault_of_the_server(server: Running, path: str, messages: Any, prompt: Any, options: Any) -> None:
    body = {"messages": messages} if path == CHAT else {"prompt": prompt}
    answer = server.post(path, {"max_tokens": 2, **body, **options})
    assert answer.status in (200, 400, 404), answer.body
    if answer.status != 200:
        assert answer.error


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_bytes_are_a_fault_of_the_server(server: Running, body: bytes) -> None:
    assert server.post(COMPLETIONS, body).status == 400


def test_a_template_that_fails_is_no_fault_of_the_server() -> None:
    with running(kind="fails at one message") as server:
        error = refused(server, CHAT, {"messages": HELLO})
        assert error["param"] == "messages" and "jinja" not in error["message"].lower()
        assert server.chat(HELLO * 2)


def test_a_worker_that_is_killed_is_a_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    """The chat template's worker may be killed for reasons that say nothing about the request."""
    with running() as server:
        tokenizer = server.llm.engine.tokenizer
        tokenizer._template._worker = WorkerProcess("tests.helpers.killed_worker")
        for route, body in (
            (CHAT, {"messages": HELLO}),
            ("/v1/messages", {"messages": HELLO, "max_tokens": 5, "model": server.service.models[0]}),
            ("/v1/responses", {"input": "x"}),
            ("/tokenize", {"messages": HELLO}),
        ):
            answer = server.post(route, body)
            assert answer.status == 500, (route, answer.body)
        del tokenizer._template
        assert server.chat(HELLO)
    assert "was ended by signal 9" in caplog.text


def test_models_that_are_not_there(server: Running) -> None:
    for path, body in ((CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": "x"})):
        assert refused(server, path, {**body, "model": "gpt-4"}, 404)["code"] == "model_not_found"


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given key is compared with every key completely; `==` and a search that ends early would leak by their time."""
    keys = ("one", "two", "three")
    digests = [sha256(key.encode()).hexdigest() for key in keys]
    compared: list[tuple[str, str]] = []
    compare: Callable[[str, str], bool] = hmac.compare_digest
    with running(api_keys=keys) as server:
        monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))  # type: ignore[func-returns-value]
        for given, status in (*((key, 200) for key in keys), ("two ", 200), ("none", 401), ("", 401)):
            compared.clear()
            answer = server.ask("GET", "/v1/models", headers={"Authorization": f"Bearer {given}"})
            assert answer.status == status
            digest = sha256(given.strip().encode()).hexdigest()
            assert [set(pair) for pair in compared] == [{digest, one} for one in digests]


SECRET = "/home/me/secret.engine at 0x7f00deadbeef"


@pytest.mark.parametrize("error", [RuntimeError(SECRET), EngineError(SECRET, SECRET, SECRET)], ids=["bug", "engine"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("where", ["admission", "prepare", "start", "step", "text"])
def test_no_client_reads_what_an_exception_says(error: Exception, stream: bool, where: str) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise error

    with running() as server:
        llm: Any = server.llm
        if where == "admission":
            server.service.admission.enter = fail  # type: ignore[method-assign]
        elif where == "step":
            llm._core.executor.run = fail
        elif where == "text":
            server.service.metrics.first_token.observe = fail  # type: ignore[method-assign]
        else:
            setattr(llm, where, fail)
        answer = server.post(COMPLETIONS, {"prompt": "x", "stream": stream})
    assert answer.status == 500 and answer.error["code"] in ("internal_error", "engine_dead")
    assert answer.error["type"] == "server_error" and answer.error["param"] is None
    everything = repr((answer.headers, answer.body))
    assert not any(piece in everything for piece in ("secret", "0x7f", "RuntimeError", "EngineError"))


def test_no_client_reads_what_an_exception_says_in_the_middle_of_a_stream() -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError(SECRET)

    with running() as server:
        server.service.metrics.between_tokens.observe = fail  # type: ignore[method-assign]
        answer = server.post(COMPLETIONS, {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 2000})
        *pieces, last = answer.events
        assert pieces and last["error"]["code"] == "internal_error" and b"secret" not in answer.body


def test_a_crowd_is_turned_away_before_its_prompts_are_tokenized() -> None:
    """Neither prompts nor chats of a crowd are tokenized, because the tokenizer itself has to be protected from it."""
    with (
        running(max_num_waiting=1, limits={"max_num_seqs": 1}) as server,
        ThreadPoolExecutor(1) as pool,
        server.connect() as first,
    ):
        encoded: list[Any] = []
        prepare = server.llm.prepare
        server.llm.prepare = lambda prompt, *rest, **named: (  # type: ignore[method-assign]
            encoded.append(prompt) or prepare(prompt, *rest, **named)  # type: ignore[func-returns-value]
        )
        server.send(first, COMPLETIONS, {"prompt": "a", "ignore_eos": True, "max_tokens": 4000})
        wait_until(lambda: server.service.admission.num_answers == 0 and server.llm.stats().num_running == 1)
        two = pool.submit(server.post, COMPLETIONS, {"prompt": ["b", "c"], "max_tokens": 1})
        wait_until(lambda: encoded == ["a", "b", "c"])  # as many as may wait
        for path, body in ((COMPLETIONS, {"prompt": "d"}), (CHAT, {"messages": HELLO})):
            for stream in (False, True):
                assert server.post(path, {**body, "stream": stream}).status == 429
        assert encoded == ["a", "b", "c"]
        first.close()
        assert two.result().status == 200


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode = Tokenizer.encode

    def recorded(self: Tokenizer, text: str, **options: Any) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    assert server.complete("fits") and encoded == [4]
    long = "x" * 200_000
    for path, body in ((COMPLETIONS, {"prompt": long}), (CHAT, {"messages": [{"role": "user", "content": long}]})):
        error = refused(server, path, body)
        assert encoded == [4], "it was tokenized"
        assert error["code"] == "context_length_exceeded"
