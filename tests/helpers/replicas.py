"""Commands of `engine` that serve, in processes of their own, and clients that keep such servers busy."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Self

from tests.helpers.serving import CHAT, wait_until

ADDRESS = re.compile(rb"http://127\.0\.0\.1:(\d+)/v1")
CLIENTS = 6


class ServingProcess:
    """A command of `engine` that serves, in a process of its own.

    Args:
        log: file for its output.
        words: the command and its options.
    """

    def __init__(self, log: Path, *words: object) -> None:
        self.log_file = log
        with log.open("wb") as out:
            command = [sys.executable, "-m", "enginewright.cli", *map(str, words)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out)
        wait_until(lambda: self.process.poll() is not None or ADDRESS.search(log.read_bytes()) is not None)
        found = ADDRESS.search(log.read_bytes())
        assert found is not None, self.log
        self.port = int(found[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(60)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a request, which must succeed."""
        return post(self.url + path, body)

    def metric(self, name: str) -> float:
        """The first sample of our metrics whose name and labels begin with a regular expression."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            text = response.read().decode()
        found = re.search(rf"^enginewright_{name}\S* (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def computed_prompt_tokens(self) -> float:
        """Tokens of prompts that were not in the prefix cache."""
        return self.metric("prompt_tokens_total") - self.metric("prefix_cache_hits_total")

    def end(self, how: int = signal.SIGTERM) -> None:
        """Sends a signal, and waits for the end."""
        self.process.send_signal(how)
        self.process.wait(60)


def post(url: str, body: dict[str, Any]) -> Any:
    """Sends a request, which must succeed."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


def ask(port: int, number: int, model: str, max_tokens: int) -> str:
    """Sends a chat, each other one as a stream; gives how it ended."""
    stream = number % 2 == 0
    messages = [{"role": "user", "content": f"{number % 40} " + "word " * 50}]
    body = {"model": model, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, "stream": stream}
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
    except (HTTPException, OSError) as error:
        return f"connection lost: {type(error).__name__}"
    finally:
        connection.close()
    if response.status != 200:
        return f"status {response.status}: {data[:200]!r}"
    if not stream:
        return "whole" if json.loads(data)["choices"][0]["finish_reason"] == "length" else "not whole"
    events = data.decode().split("\n\n")
    if events[-2:] == ["data: [DONE]", ""]:
        reasons = set(re.findall(r'"finish_reason":("\w+"|null)', data.decode()))
        if reasons == {"null"}:
            return "cut, then [DONE]"  # a client sees that there is no reason
        return "stream" if '"length"' in reasons else "not whole"
    last = json.loads(events[-2].removeprefix("data: ")) if len(events) > 1 else {}
    return f"cut: {last['error']['code']}" if events[-1] == "" and "error" in last else "cut without an error"


class Load:
    """Clients that send one request after the other. outcomes: how many have ended how."""

    def __init__(self, port: int, model: str, max_tokens: int = 60) -> None:
        self._port, self._model, self._max_tokens = port, model, max_tokens
        self._ends, self._lock = threading.Event(), threading.Lock()
        self.outcomes: Counter[str] = Counter()
        self._number = 0

    def _run(self) -> None:
        while not self._ends.is_set():
            with self._lock:
                self._number += 1
                number = self._number
            outcome = ask(self._port, number, self._model, self._max_tokens)
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

    def wait_for_more(self, count: int = 4 * CLIENTS) -> None:
        """Waits until more requests have ended; by default until each client has had some answers."""
        before = self.outcomes.total()
        wait_until(lambda: self.outcomes.total() >= before + count, 300)
