"""How many prompt tokens do replicas compute with the proxy's routing, compared with round robin?

Conversations of several turns go to two processes of `engine run`, some at a time, each turn with all that was said
before. Round robin sends each request to the next replica, and `engine route` to the one that it chooses. The replicas'
own counters say how many prompt tokens were not in their prefix caches. Replicas are started again for each case.

    python benchmarks/route.py ENGINE --conversations 200 --turns 10
"""

import argparse
import json
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from typing import Any

NUM_REPLICAS = 2
ADDRESS = re.compile(r"(?:serving .*|routing) at http://127\.0\.0\.1:(\d+)/v1")
WORDS = ("north", "river", "seven", "paper", "music", "stone", "under", "light", "table", "green", "often", "glass")


@contextmanager
def started(*words: object) -> Iterator[int]:
    """A command of `engine` that serves; its port."""
    command = [sys.executable, "-m", "enginewright.cli", *map(str, words), "--port", "0", "--log-level", "error"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = ADDRESS.match(line := process.stderr.readline())
            if found is None:
                raise SystemExit(f"{' '.join(command)}: {line}")
            yield int(found[1])
        finally:
            process.terminate()


def ask(port: int, method: str, path: str, body: Any = None) -> bytes:
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise SystemExit(f"{path}: {response.status} {answer!r}")
    return answer


def prompt_tokens(port: int) -> tuple[int, int]:
    """Prompt tokens of a replica: all, and those found in its prefix cache."""
    text = ask(port, "GET", "/metrics").decode()
    found = dict(re.findall(r"^enginewright_(prompt_tokens|prefix_cache_hits)_total\S* (\S+)", text, re.MULTILINE))
    return int(float(found["prompt_tokens"])), int(float(found["prefix_cache_hits"]))


def converse(number: int, ports: Sequence[int], requests: Iterator[int], arguments: argparse.Namespace) -> None:
    """One conversation; each request goes to the next port."""
    words = random.Random(number)
    messages: list[dict[str, str]] = []
    for _ in range(arguments.turns):
        messages.append({"role": "user", "content": " ".join(words.choices(WORDS, k=arguments.words))})
        body = {"messages": messages, "max_tokens": arguments.max_tokens, "ignore_eos": True, "temperature": 0}
        answer = json.loads(ask(ports[next(requests) % len(ports)], "POST", "/v1/chat/completions", body))
        messages.append(answer["choices"][0]["message"])


class Counter:
    """Numbers of requests, for several threads."""

    def __init__(self) -> None:
        self._numbers, self._lock = count(), threading.Lock()

    def __iter__(self) -> "Counter":
        return self

    def __next__(self) -> int:
        with self._lock:
            return next(self._numbers)


def measure(case: str, arguments: argparse.Namespace) -> int:
    """Prompt tokens that were computed."""
    with ExitStack() as stack:
        limits = ("--kv-cache-memory", arguments.kv_cache_memory, "--threads", arguments.threads)
        ports = [stack.enter_context(started("run", arguments.engine, *limits)) for _ in range(NUM_REPLICAS)]
        targets = ports
        if case == "engine route":
            targets = [stack.enter_context(started("route", *(f"http://127.0.0.1:{port}" for port in ports)))]
        requests = Counter()
        with ThreadPoolExecutor(arguments.clients) as pool:
            jobs = [
                pool.submit(converse, number, targets, requests, arguments) for number in range(arguments.conversations)
            ]
            for job in jobs:
                job.result()
        counts = [prompt_tokens(port) for port in ports]
    total, cached = (sum(column) for column in zip(*counts, strict=True))
    shares = ", ".join(str(tokens) for tokens, _ in counts)
    print(f"{case:<13} {total - cached:>9} of {total} prompt tokens computed (of the replicas: {shares})", flush=True)
    return total - cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=20, help="of each question")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--clients", type=int, default=8, help="conversations at a time")
    parser.add_argument("--kv-cache-memory", default="1g", help="of each replica")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    arguments = parser.parse_args()
    robin, ours = (measure(case, arguments) for case in ("round robin", "engine route"))
    print(f"engine route computes {ours / robin:.2f} of the prompt tokens that round robin computes")


if __name__ == "__main__":
    main()
