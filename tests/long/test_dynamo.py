"""Workers of NVIDIA Dynamo as real processes, with its frontend: no etcd and no NATS, on this machine alone."""

import json
import signal
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.dynamo import ENGINE, MODEL, ROUTERS, Deployment, Process, computed_prompt_tokens, until
from tests.helpers.load import Load
from tests.helpers.serving import CHAT, COMPLETIONS, Running, running, tiny_engine

QUESTION = "What is the capital of France?"
PROMPT = [1000 + number * 7 % 5000 for number in range(300)]
WEATHER = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
MIGRATE = ("--migration-limit", 3)  # times that the frontend sends the rest of a lost answer to another worker


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A frontend, and `workers` of SmolLM2."""
    deployment = Deployment(tmp_path_factory.mktemp("dynamo"))
    with deployment.frontend(), deployment.worker(), deployment.worker():
        deployment.wait_for_answers()
        yield deployment


@pytest.fixture(scope="module")
def alone() -> Iterator[Running]:
    """A server of the same engine, as of `engine run`."""
    limits = {"max_num_seqs": 8, "max_model_len": 2048, "kv_cache_memory": 256 << 20, "threads": 1}
    with running(engine=ENGINE, limits=limits) as server:
        yield server


def test_answers_are_those_of_a_server(deployment: Deployment, alone: Running) -> None:
    options = {"max_tokens": 24, "temperature": 0, "logprobs": 1}
    for prompt in (
        PROMPT,
        PROMPT[:33],
        PROMPT,
    ):  # the last one is in a prefix cache, or is computed by the other worker
        ours = deployment.ask(COMPLETIONS, prompt=prompt, **options)
        expected = alone.post(COMPLETIONS, {"prompt": prompt, **options}).json
        (choice,), (wanted,) = ours["choices"], expected["choices"]
        assert (choice["text"], choice["finish_reason"]) == (wanted["text"], wanted["finish_reason"])
        values, references = (one["logprobs"]["token_logprobs"] for one in (choice, wanted))
        assert np.array_equal(np.float32(values), np.float32(references))
        assert [ours["usage"][key] for key in ("prompt_tokens", "completion_tokens")] == [len(prompt), 24]


def test_chats(deployment: Deployment, alone: Running) -> None:
    """The frontend renders the engine's chat template, and knows its end-of-text tokens."""
    answer = deployment.chat(QUESTION)
    messages = [{"role": "user", "content": QUESTION}]
    expected = alone.chat(messages, max_tokens=None, ignore_eos=False)
    assert answer["choices"][0]["message"]["content"] == expected["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    *events, end = deployment.stream(CHAT, messages=messages)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    assert (text, end) == (answer["choices"][0]["message"]["content"], "[DONE]")
    until(lambda: deployment.total("num_requests_running") == 0)


def test_options_reach_the_engine(deployment: Deployment) -> None:
    stopped = deployment.chat(QUESTION, stop=[" of"], max_tokens=20)["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("The capital", "stop")
    (choice,) = deployment.ask(COMPLETIONS, prompt=PROMPT, guided_regex="[a-c]{5}x", max_tokens=20)["choices"]
    assert len(choice["text"]) == 6 and set(choice["text"][:5]) <= set("abc") and choice["text"][5] == "x"
    sampled = [deployment.chat(QUESTION, temperature=2, seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    first, again, other = (one["choices"][0]["message"]["content"] for one in sampled)
    assert first == again != other
    entries = deployment.chat(QUESTION, logprobs=True, top_logprobs=3, max_tokens=2)["choices"][0]["logprobs"][
        "content"
    ]
    assert [entry["token"] for entry in entries] == ["The", " capital"]
    assert all(
        len(entry["top_logprobs"]) == 3 and entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in entries
    )
    extra = {"prompt_logprobs": 1, "nvext": {"extra_fields": ["engine_data"]}}
    found = deployment.ask(COMPLETIONS, prompt=PROMPT[:3], max_tokens=1, **extra)["nvext"]["engine_data"]
    first, *others = found["prompt_logprobs"]
    assert first is None and [str(token) in one for token, one in zip(PROMPT[1:3], others, strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"guided_regex": "["}, "regex parse error"),
        ({"n": 2}, "n is 2: Dynamo ends an answer with its first choice"),
    ],
)
def test_refusals_name_what_is_wrong(deployment: Deployment, options: dict[str, Any], said: str) -> None:
    connection = HTTPConnection("127.0.0.1", deployment.port, timeout=600)
    body = {"model": MODEL, "prompt": PROMPT[:5], "max_tokens": 5, **options}
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert (response.status, said in json.loads(response.read())["message"]) == (400, True)
    connection.close()


def test_required_tool_calls(deployment: Deployment) -> None:
    """Dynamo makes a JSON schema of the tools, which the engine follows, and parses the calls."""
    tools = [{"type": "function", "function": WEATHER}]
    options = {"tools": tools, "tool_choice": "required", "max_tokens": 100}
    choice = deployment.chat("What is the weather in Paris?", **options)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather" and "city" in json.loads(call["function"]["arguments"])


def test_a_client_that_leaves_ends_its_request(deployment: Deployment) -> None:
    before = deployment.total("generation_tokens_total")
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    connection = HTTPConnection("127.0.0.1", deployment.port, timeout=600)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.readline().startswith(b"data: ") and deployment.total("num_requests_running") == 1
    response.close()
    connection.close()
    until(lambda: deployment.total("num_requests_running") == 0)
    assert deployment.total("generation_tokens_total") - before < 1000


class Answers:
    """Chats of a few prompts, each other one as a stream. texts: all different answers to each prompt."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.texts: defaultdict[int, set[str]] = defaultdict(set)

    def ask(self, number: int) -> str:
        """Sends a chat; gives how it ended."""
        topic, stream = number // 2 % 5, number % 2 == 0
        messages = [{"role": "user", "content": f"Tell me about the number {topic}. " + "Be brief. " * 10}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 12, "ignore_eos": True, "stream": stream}
        connection = HTTPConnection("127.0.0.1", self._deployment.port, timeout=600)
        try:
            connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            return f"status {response.status}: {data}"
        if not stream:
            choices = [json.loads(data)["choices"][0]]
            pieces = [choices[0]["message"]["content"]]
        else:
            events = [line[6:] for line in data.split("\n") if line.startswith("data: ")]
            if events[-1] != "[DONE]" or '"error"' in events[-2]:
                return f"cut: {events[-2:]}"
            choices = [json.loads(event)["choices"][0] for event in events[:-1]]
            pieces = [choice["delta"].get("content") or "" for choice in choices]
        if choices[-1]["finish_reason"] != "length":
            return f"not whole: {choices[-1]}"
        self.texts[topic].add("".join(pieces))
        return "whole"


def end(worker: Process, number: signal.Signals) -> int:
    """Ends a worker while it computes answers; gives its exit code."""
    until(lambda: worker.counter("num_requests_running") > 0)
    worker.opened.send_signal(number)
    return worker.opened.wait(300)


def test_workers_end_under_load(tmp_path: Path) -> None:
    """A killed worker's answers are continued by the other one with the same tokens; one that drains loses nothing."""
    deployment = Deployment(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(deployment.frontend(*MIGRATE))
        workers = [stack.enter_context(deployment.worker()) for _ in range(2)]
        deployment.wait_for_answers()
        answers = Answers(deployment)
        load = Load(answers.ask)
        with load.running():
            load.wait_for_more()
            for number, exit_code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
                assert end(workers.pop(0), number) == exit_code
                load.wait_for_more()
                workers.append(stack.enter_context(deployment.worker()))
                until(lambda: workers[-1].counter("generation_tokens_total") > 0)
        assert set(load.outcomes) == {"whole"}, load.outcomes
        assert all(len(texts) == 1 for texts in answers.texts.values()), answers.texts


def test_the_kv_router_finds_what_workers_have_cached(tmp_path: Path) -> None:
    """Counts do not depend on the model, so it is a tiny one; benchmarks/dynamo_router.py has 200 conversations.

    Round robin computes at most twice what must be computed, since a worker often has all turns but the last.
    """
    folders = {mode: tmp_path / mode for mode in ROUTERS}
    for folder in folders.values():
        folder.mkdir()
    counts = {mode: computed_prompt_tokens(folder, mode, tiny_engine(), 20) for mode, folder in folders.items()}
    assert min(counts["kv"]) > 0.2 * sum(counts["kv"]), counts
    assert sum(counts["kv"]) <= 0.65 * sum(counts["round-robin"]), counts


def test_prefill_and_decode_apart(tmp_path: Path, alone: Running) -> None:
    """The decoding worker fetches the prompt's blocks, and its answer is that of one server."""
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    deployment, roles = Deployment(tmp_path), ("prefill", "decode")
    with ExitStack() as stack:
        stack.enter_context(deployment.frontend())
        options = ("--kv-secret-file", secret, "--disaggregation-mode")
        prefill, decode = [stack.enter_context(deployment.worker(*options, role)) for role in roles]

        def is_apart() -> bool:
            deployment.wait_for_answers()
            return prefill.counter("prompt_tokens_total") > 0

        until(is_apart)
        for prompt in (PROMPT, PROMPT[:20]):  # the second one has no full block, so that nothing moves
            body = {"prompt": prompt, "max_tokens": 16, "temperature": 0}
            (ours,) = deployment.ask(COMPLETIONS, **body)["choices"]
            assert ours["text"] == alone.post(COMPLETIONS, body).json["choices"][0]["text"]
        assert prefill.counter("kv_transfer_sent_bytes_total") == decode.counter("kv_transfer_received_bytes_total") > 0
        assert decode.counter("kv_transfer_failures_total") == 0
