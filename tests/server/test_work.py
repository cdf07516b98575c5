"""Over HTTP: how urgent requests are, when they end by their timeout, and answers that are chosen among several."""

import json
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from enginewright import BeamSearchParams
from enginewright.errors import UsageError
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.request import Request
from enginewright.runtime.grammar.grammar_processes import NUM_SPARE
from enginewright.runtime.server import generation
from tests.helpers.serving import CHAT, COMPLETIONS, HELLO, Running, head_of, running, wait_until

PROMPT = "The capital of France is"
Requests = dict[str, tuple[dict[str, Any], dict[str, str]]]  # bodies and headers by name
LONG: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "n": 20}
SERVER = {"limits": {"max_num_seqs": 1}}


def order(server: Running, requests: Requests, key: str = "") -> list[str]:
    """Names of requests that wait together for one place, in the order in which the server is done with them.

    Args:
        key: of the one that has the place at first.
    """
    metrics, lengths = server.service.metrics, list[int]()
    request_done = metrics.request_done

    def note(request: Request, counts: Sequence[int]) -> None:
        lengths.append(request.num_prompt_tokens)
        request_done(request, counts)

    def ask(length: int, body: dict[str, Any], headers: dict[str, str]) -> None:
        assert server.post(COMPLETIONS, {"prompt": [5] * length, "max_tokens": 9, **body}, headers).status == 200

    threads = [
        threading.Thread(target=ask, args=(length, *request))
        for length, request in enumerate(requests.values(), start=1)
    ]
    metrics.request_done = note  # type: ignore[method-assign]
    with server.held_steps(once=lambda llm: llm.stats().num_running == 1), server.connect() as connection:
        data = json.dumps(LONG | {"priority": -1}).encode()
        head = ("Content-Type: application/json", f"X-Api-Key: {key}", f"Content-Length: {len(data)}")
        connection.sendall(head_of(f"POST {COMPLETIONS}", *head) + data)
        wait_until(lambda: server.llm.stats().num_running == 1)
        for count, thread in enumerate(threads, start=LONG["n"]):
            thread.start()
            wait_until(lambda count=count: server.llm.stats().num_waiting == count)  # type: ignore[misc]
    for thread in threads:
        thread.join(60)
    wait_until(lambda: len(lengths) == len(requests))  # the server is done with one after its answer is sent
    metrics.request_done = request_done  # type: ignore[method-assign]
    return [list(requests)[length - 1] for length in lengths]


def test_the_most_urgent_is_answered_first(server: Running) -> None:
    """The header, which a proxy may set, comes before the body."""
    requests: Requests = {
        "best-effort": ({}, {"X-Priority": "best-effort"}),
        "batch": ({"priority": 10}, {}),
        "forced down": ({"priority": -5}, {"x-priority": " Batch "}),
        "interactive": ({"priority": 0}, {}),
        "urgent": ({}, {"X-Priority": "-3"}),
    }
    assert order(server, requests) == ["urgent", "interactive", "batch", "forced down", "best-effort"]


def test_keys_share_alike() -> None:
    """The second key asks later, and waits for one answer of the first, not for all of them."""
    with running(limits={"max_num_seqs": 1}, api_keys=("a", "b", "c")) as server:
        requests = {name: ({}, {"X-Api-Key": name[0]}) for name in ("a1", "a2", "a3", "b1", "b2")}
        assert order(server, requests, key="c") == ["a1", "b1", "a2", "b2", "a3"]


@pytest.mark.parametrize("value", ["", "now", "1.5", "1001", "-1001", "9" * 5000])
def test_a_wrong_priority_in_the_header_is_refused(server: Running, value: str) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x"}, {"X-Priority": value})
    assert answer.status == 400 and answer.error["param"] == "X-Priority" and len(answer.error["message"]) < 250
    assert "interactive, batch, best-effort, or a whole number" in answer.error["message"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_timeout_ends_a_request(server: Running, path: str) -> None:
    body = {**LONG, "timeout": 0.2} | ({"messages": HELLO} if path == CHAT else {})
    if path == CHAT:
        del body["prompt"]
    answer = server.post(path, body)
    assert answer.status == 504 and answer.error["code"] == "timeout"
    assert answer.error["message"] == "the request has not been answered within its timeout of 0.2 s"
    assert answer.headers["x-should-retry"] == "false"
    stream = server.begin_with_timeout(path, body)
    assert stream.events[-1]["error"]["code"] == "timeout" and len(stream.events) > 1
    wait_until(server.is_idle)
    assert server.complete("x", max_tokens=3, timeout=60)["choices"]


def test_a_timeout_ends_a_request_that_waits(server: Running) -> None:
    with server.connect() as connection, ThreadPoolExecutor(1) as pool:
        with server.held_steps(once=lambda llm: llm.stats().num_running == 1):
            server.send(connection, COMPLETIONS, LONG)
            wait_until(lambda: server.llm.stats().num_running == 1)
            num_waiting = server.llm.stats().num_waiting
            late = pool.submit(server.post, COMPLETIONS, {"prompt": "y", "timeout": 0.5})
            wait_until(lambda: server.llm.stats().num_waiting == num_waiting + 2 or late.done())  # and its end
        assert late.result().error["code"] == "timeout"
        assert server.llm.stats().num_running == 1


@contextmanager
def held_grammars(server: Running) -> Iterator[None]:
    """Stops the process that forks the others, after those in reserve are used up, so that no grammar is compiled."""
    assert server.complete("x", guided_regex="ab", ignore_eos=None)["choices"]
    core = server.llm._core
    assert isinstance(core, EngineCore)
    fork_server = core._grammars._processes._fork_server
    assert fork_server is not None
    fork_server.send_signal(signal.SIGSTOP)
    try:
        for number in range(NUM_SPARE):
            assert server.complete("x", guided_regex=f"a{{{number + 3}}}", ignore_eos=None)["choices"]
        yield
    finally:
        fork_server.send_signal(signal.SIGCONT)


def test_a_request_ends_while_its_grammar_waits(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its timeout, by the server's limit, and when its client leaves."""
    body = {"prompt": "x", "guided_regex": "b{9}"}
    with held_grammars(server):
        late = server.post(COMPLETIONS, body | {"timeout": 0.2})
        assert (late.status, late.error["code"]) == (504, "timeout")
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, body)
            wait_until(lambda: server.service.admission.num_answers == 1)
        wait_until(server.is_idle)
        monkeypatch.setattr(generation, "PREPARE_S", 0.2)
        busy = server.post(COMPLETIONS, body)
        assert (busy.status, busy.error["code"], busy.headers["retry-after"]) == (429, "overloaded", "1")
        assert server.complete("x", max_tokens=3)["choices"], "others are answered"
        monkeypatch.undo()
    assert server.complete(**body, ignore_eos=None)["choices"][0]["text"] == "b" * 9


@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_gives_the_likeliest_of_several(server: Running, llm: LLM, logprobs: int | None) -> None:
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 9, "ignore_eos": True}
    (every,) = llm.generate(PROMPT, default_params(llm.engine, n=5, logprobs=0, **sampled))
    ranked = sorted(every.outputs, key=lambda one: -(one.cumulative_logprob or 0))
    answer = server.complete(PROMPT, n=2, best_of=5, logprobs=logprobs, **sampled)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in ranked[:2]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 2 * 9
    (output,) = llm.generate(PROMPT, default_params(llm.engine, n=2, best_of=5, **sampled))
    assert [one.token_ids for one in output.outputs] == [one.token_ids for one in ranked[:2]]
    assert [one.cumulative_logprob for one in output.outputs] == [None, None]


def test_best_of_n_is_n(server: Running) -> None:
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 9, "n": 2}
    assert server.complete(PROMPT, best_of=2, **sampled)["choices"] == server.complete(PROMPT, **sampled)["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_beam_search_over_http(server: Running, llm: LLM, path: str) -> None:
    options = {"use_beam_search": True, "best_of": 4, "n": 2, "max_tokens": 6, "length_penalty": 0.5, "logprobs": True}
    if path == COMPLETIONS:
        options["logprobs"] = 1
    answer = server.chat(**options) if path == CHAT else server.complete(PROMPT, **options)
    prompt = llm.encode(PROMPT)
    if path == COMPLETIONS:
        (found,) = llm.beam_search([prompt], BeamSearchParams(4, 6, ignore_eos=True, length_penalty=0.5))
        sequences = found.sequences[:2]
        texts = [llm.get_tokenizer().decode(one.tokens[len(prompt) :]) for one in sequences]
        assert [choice["text"] for choice in answer["choices"]] == texts
        for choice, sequence in zip(answer["choices"], sequences, strict=True):
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(sequence.cum_logprob)
            assert all(len(named) in (1, 2) for named in choice["logprobs"]["top_logprobs"])
            assert sequence.text.endswith(choice["text"]) and sequence.finish_reason == "length"
    assert len(answer["choices"]) == 2 and answer["usage"]["completion_tokens"] == 12
    wait_until(server.is_idle)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"n": 17}, "n"),
        ({"temperature": 1}, "temperature"),
        ({"stop": "x"}, "stop"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_does_not_go_with_beams_is_refused(server: Running, path: str, options: Any, param: str) -> None:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "x"}
    answer = server.post(path, {"use_beam_search": True, "n": 2, **prompt, **options})
    assert answer.status == 400 and answer.error["param"] == param
    assert param in answer.error["message"] and "use_beam_search" in answer.error["message"]


def test_echoed_logprobs_do_not_go_with_beams(server: Running) -> None:
    asked = {"prompt": "x", "use_beam_search": True, "n": 2, "max_tokens": 2, "echo": True}
    refused = server.post(COMPLETIONS, asked | {"logprobs": 0})
    assert (refused.status, refused.error["param"]) == (400, "echo")
    assert refused.error["message"] == "echo with logprobs cannot be combined with use_beam_search"
    assert all(choice["text"].startswith("x") for choice in server.complete(**asked, ignore_eos=None)["choices"])


def test_candidates_are_not_streamed(server: Running) -> None:
    answer = server.post(COMPLETIONS, {"prompt": "x", "best_of": 2, "stream": True})
    assert answer.error["param"] == "best_of" and "cannot be streamed" in answer.error["message"]
    assert server.post(COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 2, "stream": True}).events[-1] == "[DONE]"


def test_who_leaves_gives_everything_back(server: Running) -> None:
    for options in ({"use_beam_search": True, "n": 8}, {"n": 2, "best_of": 8}):
        with server.connect() as connection:
            server.send(connection, COMPLETIONS, LONG | options)
            wait_until(lambda: server.llm.stats().num_running > 0)
        wait_until(server.is_idle)


def test_numbers_that_are_none_fail_a_search() -> None:
    with running(kind="NaN") as server:
        for options in ({"use_beam_search": True, "n": 3}, {"best_of": 3}):
            answer = server.post(COMPLETIONS, {"prompt": [5, 300, 6], **options})
            assert answer.status == 500 and answer.error["code"] == "nan_logits"


def test_parameters_of_a_search_are_checked(llm: LLM) -> None:
    with pytest.raises(UsageError, match="there is no beam search parameter called beams"):
        BeamSearchParams(beams=3)  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="n must be at most 16"):
        llm.beam_search("x", BeamSearchParams(17, 5))
    with pytest.raises(UsageError, match="temperature must be 0"):
        llm.beam_search("x", BeamSearchParams(2, 5, temperature=0.7))
    with pytest.raises(UsageError, match="it must be a BeamSearchParams"):
        llm.beam_search("x", default_params(llm.engine))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="2 priorities for 1 prompts"):
        llm.generate("x", priority=[1, 2])
