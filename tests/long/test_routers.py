"""vllm-router and SGLang's smg, unmodified, before two processes of `engine run` with SmolLM2.

`make test-long` installs them (routers.txt) and builds the engine. docs/routers.md says what these tests show.
"""

import json
import signal
import subprocess
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import pytest

from tests.helpers.replicas import CLIENTS, Load, ServingProcess, post
from tests.helpers.serving import CHAT, COMPLETIONS, free_port, wait_until

ROOT = Path(__file__).parents[2]
ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
PROGRAMS = ROOT / ".cache/routers/bin"
MODEL = "SmolLM2-135M-Instruct"
# A key that a router adds and the server does not use would be refused.
REPLICA = ("--port", 0, "--threads", 1, "--kv-cache-memory", "256m", "--max-num-seqs", 8, "--strict-keys")
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
WORDS = ("north", "river", "seven", "paper", "music", "stone", "under", "light", "table", "green", "often", "glass")
CONVERSATIONS, TURNS = 7, 5  # an odd number: round robin would send all turns of a conversation to the same replica


class Router(ABC):
    """A router of another project, in a process of its own.

    Args:
        log: file for its output.
        options: its options.
    """

    def __init__(self, log: Path, *options: str) -> None:
        self.port, self._log = free_port(), log
        ports = ["--host", "127.0.0.1", "--port", str(self.port), "--prometheus-port", str(free_port())]
        command = [*self.command(), *ports, "--health-check-interval-secs", "1", *options]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out)

    def __enter__(self) -> Self:
        wait_until(lambda: self._process.poll() is not None or self._status("GET", "/readiness") == 200)
        assert self._process.poll() is None, self._log.read_text()[-5000:]
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @staticmethod
    @abstractmethod
    def command() -> list[str]:
        """The program, and options that tests always need."""

    @staticmethod
    def prefix_policies(replicas: list[ServingProcess]) -> dict[str, list[str]]:
        """Options of the policies that send a prompt to where its prefix was computed, by their names."""
        return {"cache_aware": ["--policy", "cache_aware"]}

    @abstractmethod
    def add(self, replica: ServingProcess) -> None:
        """Adds a replica."""

    @abstractmethod
    def remove(self, replica: ServingProcess) -> None:
        """Removes a replica; its running requests may end."""

    def wait_for(self, count: int) -> None:
        """Waits until this number of replicas take requests."""
        wait_until(lambda: sum(one["is_healthy"] for one in self.workers()) == count)

    def workers(self) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.url}/workers", timeout=30) as response:
            workers: list[dict[str, Any]] = json.load(response)["workers"]
        return workers

    def _status(self, method: str, path: str, body: Any = None) -> int:
        """Sends a request; gives the status of the answer, or 0 if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                status: int = response.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0
        return status


class VllmRouter(Router):
    """https://github.com/vllm-project/router"""

    @staticmethod
    def command() -> list[str]:
        return [str(PROGRAMS / "vllm-router"), "--worker-startup-check-interval", "1"]

    @staticmethod
    def prefix_policies(replicas: list[ServingProcess]) -> dict[str, list[str]]:
        """In addition to that of all routers, the one that reads KV events."""
        sources = [f"{one.url}=tcp://127.0.0.1:{events_port(one.log_file)}" for one in replicas]
        sources = [word for source in sources for word in ("--kv-event-source", source)]
        facts = ["--kv-event-block-size", "32", "--kv-event-model", MODEL]
        return {**Router.prefix_policies(replicas), "kv_aware": ["--policy", "kv_aware", *sources, *facts]}

    def add(self, replica: ServingProcess) -> None:
        assert self._status("POST", f"/add_worker?url={replica.url}") == 200

    def remove(self, replica: ServingProcess) -> None:
        assert self._status("POST", f"/remove_worker?url={replica.url}") == 200


class Smg(Router):
    """https://github.com/lightseekorg/smg, SGLang's gateway"""

    @staticmethod
    def command() -> list[str]:
        return [str(PROGRAMS / "smg"), "launch", "--load-monitor-interval", "1"]

    def add(self, replica: ServingProcess) -> None:
        assert self._status("POST", "/workers", {"url": replica.url}) == 202

    def remove(self, replica: ServingProcess) -> None:
        (id,) = (one["id"] for one in self.workers() if one["url"] == replica.url)
        assert self._status("DELETE", f"/workers/{id}") == 202


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServingProcess]]:
    """Two replicas, which no test ends."""
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        logs = [folder / "first", folder / "second"]
        yield [
            stack.enter_context(
                ServingProcess(log, "run", ENGINE, *REPLICA, "--kv-events", f"tcp://*:{events_port(log)}")
            )
            for log in logs
        ]


@cache
def events_port(log: Path) -> int:
    """The port of a replica's KV events; log: its log file."""
    return free_port()


@pytest.fixture(params=[VllmRouter, Smg])
def kind(request: pytest.FixtureRequest) -> type[Router]:
    found: type[Router] = request.param
    assert (PROGRAMS / "smg").is_file(), "run `make test-long`, which installs the routers"
    return found


def worker_urls(replicas: list[ServingProcess]) -> list[str]:
    return ["--worker-urls", *(one.url for one in replicas)]


def chat(port_of: ServingProcess | Router, **body: Any) -> Any:
    return post(port_of.url + CHAT, {"model": MODEL, "messages": QUESTION, "temperature": 0, **body})


def in_fp32(choice: Any) -> Any:
    """A choice with the numbers that the engine has computed: the router changes the last digit of a double."""
    return json.loads(json.dumps(choice), parse_float=lambda text: float(np.float32(text)))


def streamed_text(router: Router, **body: Any) -> str:
    """The text of a complete stream, whose last event has the usage."""
    connection, response = begin(router, {"temperature": 0, "stream_options": {"include_usage": True}, **body})
    data = response.read().decode()
    connection.close()
    *events, done = [line.removeprefix("data: ") for line in data.split("\n") if line]
    assert done == "[DONE]" and json.loads(events[-1])["usage"]["completion_tokens"] == body["max_tokens"]
    return "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1])


def begin(router: Router, body: dict[str, Any]) -> tuple[HTTPConnection, Any]:
    """Starts a stream, and waits for its head, which comes with the first token."""
    connection = HTTPConnection("127.0.0.1", router.port, timeout=300)
    data = json.dumps({"model": MODEL, "messages": QUESTION, "stream": True, **body})
    connection.request("POST", CHAT, data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    return connection, response


def test_answers_are_those_of_the_server(kind: type[Router], replicas: list[ServingProcess], tmp_path: Path) -> None:
    with kind(tmp_path / "router", *worker_urls(replicas)) as router:
        for _ in range(2):
            assert chat(router, max_tokens=12)["choices"] == chat(replicas[0], max_tokens=12)["choices"]
        expected = chat(replicas[0], max_tokens=12)["choices"][0]["message"]["content"]
        assert streamed_text(router, max_tokens=12) == expected
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            asked = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 100}
            (answer,) = chat(router, **asked)["choices"]
            (wanted,) = chat(replicas[0], **asked)["choices"]
            calls, same = (one["message"]["tool_calls"] for one in (answer, wanted))
            assert [one["function"] for one in calls] == [one["function"] for one in same]
            assert json.loads(calls[0]["function"]["arguments"])["city"] in ("Paris", "Rome")
        format = {"type": "json_schema", "json_schema": {"name": "city", "schema": {"enum": ["Paris", "Rome"]}}}
        (answer,) = chat(router, response_format=format, max_tokens=20)["choices"]
        assert json.loads(answer["message"]["content"]) in ("Paris", "Rome")
        texts = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        assert post(router.url + COMPLETIONS, texts)["choices"] == replicas[0].post(COMPLETIONS, texts)["choices"]


def test_a_client_that_leaves_is_aborted(kind: type[Router], replicas: list[ServingProcess], tmp_path: Path) -> None:
    """The answer would take minutes, and ends with the client's connection."""
    with kind(tmp_path / "router", *worker_urls(replicas)) as router:
        aborted = aborted_answers(replicas)
        connection, _ = begin(router, {"max_tokens": 8000, "ignore_eos": True})
        assert sum(one.metric("num_requests_running") for one in replicas) == 1
        connection.close()
        wait_until(lambda: aborted_answers(replicas) == aborted + 1)
        assert sum(one.metric("num_requests_running") for one in replicas) == 0


def aborted_answers(replicas: list[ServingProcess]) -> float:
    return sum(one.metric('request_success_total{.*finished_reason="abort"') for one in replicas)


def test_a_replica_is_killed_under_load(kind: type[Router], tmp_path: Path) -> None:
    """The other one goes on, and nobody gets a cut answer that looks like a whole one."""
    with ExitStack() as stack:
        both = [stack.enter_context(ServingProcess(tmp_path / str(at), "run", ENGINE, *REPLICA)) for at in range(2)]
        router = stack.enter_context(kind(tmp_path / "router", *worker_urls(both), "--policy", "round_robin"))
        load = Load(router.port, MODEL, max_tokens=24)
        with load.running():
            load.wait_for_more(CLIENTS)
            assert set(load.outcomes) == {"whole", "stream"}, load.outcomes
            both[0].end(signal.SIGKILL)
            load.wait_for_more(2 * CLIENTS)
            lost = {name: count for name, count in load.outcomes.items() if name not in ("whole", "stream")}
            load.wait_for_more(2 * CLIENTS)
            later = {name: count for name, count in load.outcomes.items() if name not in ("whole", "stream")}
        print(f"{kind.__name__}: of {load.outcomes.total()} requests, a killed replica cost {lost}, later {later}")
        assert "not whole" not in load.outcomes and later == lost
        # Each client loses at most what it had begun there.
        assert sum(lost.values()) <= CLIENTS
        assert both[1].metric("num_requests_running") == 0


def test_replicas_are_replaced_without_a_failed_request(kind: type[Router], tmp_path: Path) -> None:
    """Each new one is added before an old one is removed, which then ends its requests."""
    with ExitStack() as stack:

        def started(name: str) -> ServingProcess:
            return stack.enter_context(ServingProcess(tmp_path / name, "run", ENGINE, *REPLICA))

        old = [started("a"), started("b")]
        router = stack.enter_context(kind(tmp_path / "router", *worker_urls(old), "--policy", "round_robin"))
        load = Load(router.port, MODEL, max_tokens=24)
        with load.running():
            for one in old:
                load.wait_for_more(CLIENTS)
                new = started(f"{one.port} new")
                router.add(new)
                router.wait_for(3)
                router.remove(one)
                router.wait_for(2)
                one.end()  # SIGTERM: running requests end first
                assert one.process.returncode == 0, one.log
            load.wait_for_more(CLIENTS)
        assert set(load.outcomes) == {"whole", "stream"}, load.outcomes


def test_prefixes_are_routed_to_where_they_were_computed(
    kind: type[Router], replicas: list[ServingProcess], tmp_path: Path
) -> None:
    """Conversations of several turns, each in its own words, so that no case finds another's in the caches."""
    computed = {}
    policies = {"round_robin": ["--policy", "round_robin"], **kind.prefix_policies(replicas)}
    for policy, options in policies.items():
        before = sum(one.computed_prompt_tokens() for one in replicas)
        with kind(tmp_path / policy, *worker_urls(replicas), *options) as router:
            conversations: list[tuple[Random, list[dict[str, str]]]] = [
                (Random(f"{kind.__name__} {policy} {number}"), []) for number in range(CONVERSATIONS)
            ]
            with ThreadPoolExecutor(2) as pool:
                for _ in range(TURNS):
                    list(pool.map(lambda one: take_turn(router, *one), conversations))
        computed[policy] = sum(one.computed_prompt_tokens() for one in replicas) - before
    ratios = {policy: computed[policy] / computed["round_robin"] for policy in policies}
    print(f"{kind.__name__}: prompt tokens computed, as a share of round robin's {computed['round_robin']}: {ratios}")
    limits = {"cache_aware": 0.75, "kv_aware": 0.95}  # measured 0.60 and 0.83
    assert all(ratios[policy] < limits[policy] for policy in kind.prefix_policies(replicas))


def take_turn(router: Router, random: Random, messages: list[dict[str, str]]) -> None:
    """Asks a question with all that was said before, and keeps the answer."""
    messages.append({"role": "user", "content": " ".join(random.choices(WORDS, k=40))})
    messages.append(chat(router, messages=messages, max_tokens=8)["choices"][0]["message"])


def test_prefill_and_decode_apart(replicas: list[ServingProcess], tmp_path: Path) -> None:
    """vllm-router sends each request to a server that prefills, and then to one that fetches its KV blocks."""
    (tmp_path / "secret").write_text("s" * 32)
    with ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(
                ServingProcess(
                    *(tmp_path / role, "run", ENGINE, *REPLICA, "--kv-role", role),
                    *("--kv-secret-file", tmp_path / "secret"),
                )
            )
            for role in ("prefill", "decode")
        )
        apart = ("--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url)
        router = stack.enter_context(VllmRouter(tmp_path / "router", *apart, "--policy", "round_robin"))
        messages = [{"role": "user", "content": " ".join(Random(0).choices(WORDS, k=80))}]
        asked = {"messages": messages, "max_tokens": 12, "logprobs": True}
        (alone,) = replicas[0].post(CHAT, {"model": MODEL, "temperature": 0, **asked})["choices"]
        (found,) = chat(router, **asked)["choices"]
        assert in_fp32(found) == in_fp32(alone)
        received = decode.metric("kv_transfer_received_bytes_total")
        assert received > 0 and prefill.metric("kv_transfer_sent_bytes_total") == received
        # Of a longer prompt only what is new is fetched.
        messages += [alone["message"], {"role": "user", "content": "And?"}]
        expected = replicas[0].post(CHAT, {"model": MODEL, "temperature": 0, "messages": messages, "max_tokens": 12})
        text = streamed_text(router, messages=messages, max_tokens=12)
        assert text == expected["choices"][0]["message"]["content"]
        assert decode.metric("kv_transfer_failures_total") == 0 and prefill.metric("generation_tokens_total") == 2
