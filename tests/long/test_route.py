"""The proxy before processes of `engine run`: replicas are killed under load and replaced, also one that prefills."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.passes.quant import quant_config
from tests.helpers.load import CLIENTS, Load
from tests.helpers.serving import CHAT, COMPLETIONS, free_port, tiny_engine, wait_until

READY = re.compile(r"(?:serving \S+|routing) at http://127\.0\.0\.1:(\d+)/v1")


@contextmanager
def engine(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command of `engine` that serves, and its port."""
    command = [sys.executable, "-m", "enginewright.cli", *map(str, arguments), "--log-level", "error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as opened:
        try:
            assert opened.stderr is not None
            found = READY.match(line := opened.stderr.readline())
            assert found, line
            yield opened, int(found[1])
        finally:
            opened.kill()


def replica(port: int) -> list[object]:
    return ["run", tiny_engine(), "--port", port, "--threads", 1, "--kv-cache-memory", "64m", "--max-num-seqs", 8]


def ask(port: int, number: int) -> str:
    """Sends a chat, each other one as a stream; gives how it ended."""
    stream = number % 2 == 0
    messages = [{"role": "user", "content": f"{number % 40} " + "word " * 50}]
    body = {"messages": messages, "max_tokens": 60, "ignore_eos": True, "stream": stream}
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    finally:
        connection.close()
    if response.status != 200:
        return f"status {response.status}: {data!r}"
    if not stream:
        return "whole" if json.loads(data)["choices"][0]["finish_reason"] == "length" else "not whole"
    events = data.decode().split("\n\n")
    if events[-2:] == ["data: [DONE]", ""]:
        return "stream"
    last = json.loads(events[-2].removeprefix("data: "))
    return f"cut: {last['error']['code']}" if events[-1] == "" and "error" in last else f"broken: {events[-2:]}"


def takes_requests(port: int, count: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", "/health")
        replicas: int = json.loads(connection.getresponse().read()).get("replicas", 0)
        return replicas == count
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_replicas_end_under_load(number: signal.Signals) -> None:
    """A killed one costs begun streams, which end with an error event; one that drains costs nothing."""
    ports = [free_port(), free_port()]
    with ExitStack() as stack:
        opened = [stack.enter_context(engine(*replica(port)))[0] for port in ports]
        _, port = stack.enter_context(engine("route", *(f"http://127.0.0.1:{one}" for one in ports), "--port", 0))
        load = Load(partial(ask, port))
        with load.running():
            for index, one in enumerate(ports):
                load.wait_for_more()
                opened[index].send_signal(number)
                opened[index].wait(60)
                load.wait_for_more()
                opened[index], _ = stack.enter_context(engine(*replica(one)))
                wait_until(lambda: takes_requests(port, 2))
            load.wait_for_more()
    cut = load.outcomes.pop("cut: replica_lost", 0)
    assert set(load.outcomes) == {"whole", "stream"} and cut <= 2 * CLIENTS, load.outcomes
    assert number == signal.SIGKILL or cut == 0


def fetch(port: int, method: str, path: str, body: object = None) -> str:
    """The body of an answer, whose status must be 200."""
    connection = HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, data
    return data


def test_a_replica_that_computes_prompts_is_killed_under_load(smollm2_gguf: Path, tmp_path: Path) -> None:
    """All requests are answered, with the same bits, whether their prompts have moved or not."""
    file, secret = tmp_path / "smollm2.engine", tmp_path / "secret"
    config = BuildConfig(quant=quant_config("int8-wo"), gate=None)
    build_engine(open_checkpoint(str(smollm2_gguf)), config, file)
    secret.write_text("s" * 32)
    limits = ("--port", 0, "--threads", 1, "--kv-cache-memory", "256m", "--kv-secret-file", secret)
    prompts = [f"{number}. " + "The river runs under the old stone bridge, and " * 60 for number in range(12)]

    def complete(port: int, prompt: str, salt: str = "") -> str:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
        text: str = json.loads(fetch(port, "POST", COMPLETIONS, body))["choices"][0]["text"]
        return text

    with ExitStack() as stack:
        prefill, prefill_port = stack.enter_context(engine("run", file, "--kv-role", "prefill", *limits))
        _, decode_port = stack.enter_context(engine("run", file, "--kv-role", "decode", *limits))
        urls = [f"http://127.0.0.1:{one}" for one in (decode_port, prefill_port)]
        _, port = stack.enter_context(engine("route", urls[0], "--prefill", urls[1], "--port", 0))
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(complete, port, prompt) for prompt in prompts]
            answers[0].result()
            prefill.kill()
            prefill.wait(60)
            found = [one.result() for one in answers]
        moved = re.search(
            r"^enginewright_kv_transfer_received_bytes_total\S* (\S+)$", fetch(decode_port, "GET", "/metrics"), re.M
        )
        assert moved is not None and float(moved[1]) > 0
        assert found == [complete(decode_port, prompt, "another") for prompt in prompts]
