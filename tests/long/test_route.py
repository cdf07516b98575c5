"""The proxy before two processes of `engine run`: one is killed under load, and each is replaced."""

import json
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection

import pytest

from tests.helpers.serving import CHAT, free_port, tiny_engine, wait_until

CLIENTS = 6
READY = re.compile(r"(?:serving tiny|routing) at http://127\.0\.0\.1:(\d+)/v1")


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


class Load:
    """Clients that send one request after the other. outcomes: how many have ended how."""

    def __init__(self, port: int) -> None:
        self._port, self._ends, self._lock = port, threading.Event(), threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            outcome = ask(self._port, number)
            with self._lock:
                self.outcomes[outcome] += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            running = [pool.submit(self._run) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._ends.set()
        for one in running:
            one.result()

    def wait_for_more(self) -> None:
        """Waits until each client has had some answers."""
        before = self.outcomes.total()
        wait_until(lambda: self.outcomes.total() >= before + 4 * CLIENTS, 300)


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
        load = Load(port)
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
