"""A deployment of NVIDIA Dynamo on this machine: a frontend and workers, which it finds by files in a folder."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.helpers.serving import CHAT, COMPLETIONS, free_port

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ROOT / ".cache/dynamo/python"  # `make test-long` installs them
ENGINE = ROOT / ".cache/SmolLM2-135M-Instruct-int8-wo.engine"
MODEL = "SmolLM2-135M-Instruct"
LIMITS = ("--kv-cache-memory", "256m", "--threads", "1", "--max-num-seqs", "8", "--max-model-len", "2048")
ATTEMPTS, PAUSE_S = 1500, 0.2  # checks of a condition, and seconds between two of them
WORDS = ("north", "river", "seven", "paper", "music", "stone", "under", "light", "table", "green", "often", "glass")
COLORS = re.compile(r"\x1b\[[0-9;]*m")


def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition that takes a request to check."""
    for _ in range(ATTEMPTS):
        if holds():
            return
        time.sleep(PAUSE_S)
    raise AssertionError("it does not come true")


def send(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Sends a request; gives the status and the body of its answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class Process:
    """A process of Python, and its log."""

    def __init__(self, opened: "subprocess.Popen[bytes]", log: Path) -> None:
        self.opened, self._log = opened, log

    @property
    def log(self) -> str:
        return COLORS.sub("", self._log.read_text())

    def port_of(self, line: str) -> int | None:
        """The port at the end of a line of its log; None: there is no such line yet."""
        found = re.search(line + r"127\.0\.0\.1:(\d+)", self.log)
        return None if found is None else int(found[1])

    def counter(self, name: str) -> float:
        """A counter or gauge of a worker's engine."""
        port = self.port_of("system status server bound to: ")
        assert port is not None, self.log
        text = send(port, "GET", "/metrics")[1].decode()
        (found,) = re.findall(rf"^enginewright_{name}{{.*}} (\S+)$", text, re.MULTILINE)
        return float(found)

    @property
    def computed_prompt_tokens(self) -> int:
        """Prompt tokens that a worker's prefix cache did not have."""
        return int(self.counter("prompt_tokens_total") - self.counter("prefix_cache_hits_total"))


class Deployment:
    """A frontend and workers. port: the frontend's. workers: those that have become ready, and whose context lasts.

    Args:
        folder: an empty folder, for discovery, logs, and what Dynamo caches.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self._num_processes = 0
        self.workers: list[Process] = []

    @property
    def _environment(self) -> dict[str, str]:
        """Packages, folders, addresses of this machine alone, and a short wait before a drain."""
        path = os.pathsep.join(map(str, (PACKAGES, ROOT / "src")))
        hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")
        return {
            **os.environ,
            **dict.fromkeys(hosts, "127.0.0.1"),
            "DYN_DISCOVERY_BACKEND": "file",
            "DYN_FILE_KV": str(self._folder / "discovery"),
            "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "1",
            "HF_HUB_OFFLINE": "1",
            "HOME": str(self._folder),
            "PYTHONPATH": path,
        }

    @contextmanager
    def _process(self, *words: object, **environment: str) -> Iterator[Process]:
        assert (PACKAGES / "dynamo").is_dir(), "run `make test-long`, which installs it"
        self._num_processes += 1
        log = self._folder / f"{self._num_processes}-{words[0]}.log"
        command = [sys.executable, "-m", *map(str, words)]
        with log.open("wb") as output:
            opened = subprocess.Popen(command, stdout=output, stderr=output, env=self._environment | environment)
        try:
            yield Process(opened, log)
        finally:
            opened.kill()
            opened.wait()

    @contextmanager
    def frontend(self, *options: object) -> Iterator[None]:
        address = ("--http-host", "127.0.0.1", "--http-port", self.port)
        with self._process("dynamo.frontend", *address, *options) as process:
            until(lambda: process.opened.poll() is not None or self._answers())
            assert process.opened.poll() is None, process.log
            yield

    @contextmanager
    def worker(self, *options: object, engine: Path = ENGINE) -> Iterator[Process]:
        """Runs a worker, and waits until the frontend knows it."""
        words = ("enginewright.dynamo", engine, "--served-model-name", MODEL, *LIMITS, *options)
        with self._process(*words, DYN_SYSTEM_PORT="0") as process:
            until(lambda: process.opened.poll() is not None or self._knows(process))
            assert process.opened.poll() is None, process.log
            self.workers.append(process)
            yield process
        self.workers.remove(process)

    def total(self, name: str) -> float:
        """Sum of a counter or gauge over all workers."""
        return sum(worker.counter(name) for worker in self.workers)

    def _answers(self) -> bool:
        try:
            return send(self.port, "GET", "/health")[0] in (200, 503)
        except OSError:
            return False

    def _knows(self, worker: Process) -> bool:
        port = worker.port_of("actual_addr=")
        instances = json.loads(send(self.port, "GET", "/health")[1]).get("instances", ())
        return any(one["endpoint"] == "generate" and f":{port}/" in one["transport"]["tcp"] for one in instances)

    def wait_for_answers(self) -> None:
        """Waits until the frontend sends requests to a worker."""
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
        until(lambda: send(self.port, "POST", COMPLETIONS, body)[0] == 200)

    def ask(self, path: str, **body: Any) -> Any:
        """Sends a request, which must succeed."""
        status, answer = send(self.port, "POST", path, {"model": MODEL, **body})
        assert status == 200, answer
        return json.loads(answer)

    def chat(self, text: str, **options: Any) -> Any:
        """Requests the answer to a message."""
        return self.ask(CHAT, messages=[{"role": "user", "content": text}], **options)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Requests a stream; gives its events."""
        status, answer = send(self.port, "POST", path, {"model": MODEL, "stream": True, **body})
        assert status == 200, answer
        lines = [line for line in answer.decode().split("\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# A block that must be computed counts as much as this number of blocks that decode. By default they count alike, and
# a worker that runs one request more is avoided even if it has all of a prompt in its cache.
PREFILL_LOAD_SCALE = 16
ROUTERS: dict[str, tuple[object, ...]] = {
    "round-robin": ("--router-mode", "round-robin"),
    "kv": ("--router-mode", "kv", "--router-prefill-load-scale", PREFILL_LOAD_SCALE),
}


def computed_prompt_tokens(
    folder: Path, mode: str, engine: Path, num_conversations: int, *options: object, clients: int = 4
) -> list[int]:
    """Prompt tokens that two workers compute for conversations of ten turns; all have a turn before any has the next.

    Args:
        folder: an empty folder.
        mode: one of ROUTERS.
        options: of the workers.
        clients: requests at a time.
    """
    deployment, order = Deployment(folder), random.Random(0)
    conversations: list[list[dict[str, str]]] = [[] for _ in range(num_conversations)]

    def turn(messages: list[dict[str, str]], question: str) -> None:
        messages.append({"role": "user", "content": question})
        limits = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
        messages.append(deployment.ask(CHAT, messages=messages, **limits)["choices"][0]["message"])

    with ExitStack() as stack:
        stack.enter_context(deployment.frontend(*ROUTERS[mode]))
        for _ in range(2):
            stack.enter_context(deployment.worker("--max-model-len", 4096, *options, engine=engine))
        deployment.wait_for_answers()
        with ThreadPoolExecutor(clients) as pool:
            for _ in range(10):
                order.shuffle(conversations)  # or round robin would send each to the same worker again
                list(pool.map(turn, conversations, [" ".join(order.choices(WORDS, k=20)) for _ in conversations]))
        return [worker.computed_prompt_tokens for worker in deployment.workers]
