"""Prompt tokens that replicas compute with the proxy's routing, compared with round robin.

Conversations of several turns go to two processes of `engine run`, each turn with all that was said before. All
conversations have a turn, in random order, before any has the next. Round robin sends each request to the next replica,
and `engine route` to the one that it chooses. In a third case each conversation stays with one replica, whatever else
runs there: no router can compute less. The replicas' own counters say how many prompt tokens were not in their prefix
caches. Replicas are started again for each case. What is saved depends on the size of the KV caches: with round robin,
each replica has to keep all conversations, and with `engine route` its own.

    python benchmarks/route.py ENGINE --conversations 200 --turns 10
"""

import argparse
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

NUM_REPLICAS = 2
ADDRESS = re.compile(r"(?:serving .*|routing) at http://127\.0\.0\.1:(\d+)/v1")
CASES = ("round robin", "engine route", "fixed replica")
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


class Conversation:
    """The conversation so far.

    Args:
        number: seeds the questions, and chooses the replica in the case "fixed replica".
        arguments: those of the command.
    """

    def __init__(self, number: int, arguments: argparse.Namespace) -> None:
        self.number, self._random, self._arguments = number, random.Random(number), arguments
        self._messages: list[dict[str, str]] = []

    def turn(self, port: int) -> int:
        """Asks a question, and keeps the answer; the number of prompt tokens that were computed."""
        words = self._random.choices(WORDS, k=self._arguments.words)
        self._messages.append({"role": "user", "content": " ".join(words)})
        options = {"max_tokens": self._arguments.max_tokens, "ignore_eos": True, "temperature": 0}
        answer = json.loads(ask(port, "POST", "/v1/chat/completions", {"messages": self._messages, **options}))
        self._messages.append(answer["choices"][0]["message"])
        usage: dict[str, Any] = answer["usage"]
        return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def measure(case: str, arguments: argparse.Namespace) -> int:
    """Prompt tokens that were computed."""
    with ExitStack() as stack:
        limits = ("--kv-cache-memory", arguments.kv_cache_memory, "--threads", arguments.threads)
        ports = [stack.enter_context(started("run", arguments.engine, *limits)) for _ in range(NUM_REPLICAS)]
        proxy = stack.enter_context(started("route", *(f"http://127.0.0.1:{port}" for port in ports)))
        conversations = [Conversation(number, arguments) for number in range(arguments.conversations)]
        order, by_turn = random.Random(0), list[int]()

        def target(place: int, one: Conversation) -> int:
            if case == "engine route":
                return proxy
            return ports[(place if case == "round robin" else one.number) % NUM_REPLICAS]

        with ThreadPoolExecutor(arguments.clients) as pool:
            for _ in range(arguments.turns):
                order.shuffle(conversations)  # or round robin would send each to the same replica again
                jobs = [pool.submit(one.turn, target(place, one)) for place, one in enumerate(conversations)]
                by_turn.append(sum(job.result() for job in jobs))
        counts = [prompt_tokens(port) for port in ports]
    total, cached = (sum(column) for column in zip(*counts, strict=True))
    shares = ", ".join(str(tokens) for tokens, _ in counts)
    print(f"{case:<13} {total - cached:>9} of {total} prompt tokens computed (of the replicas: {shares})", flush=True)
    print(f"{'':<13} by turn: {', '.join(map(str, by_turn))}", flush=True)
    return total - cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=20, help="of each question")
    parser.add_argument("--max-tokens", type=int, default=40, help="of each answer")
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--kv-cache-memory", default="1g", help="of each replica")
    parser.add_argument("--threads", type=int, default=1, help="of each replica")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    arguments = parser.parse_args()
    computed = {case: measure(case, arguments) for case in arguments.cases}
    for case in CASES[1:]:
        if {case, CASES[0]} <= computed.keys():
            share = computed[case] / computed[CASES[0]]
            print(f"{case} computes {share:.2f} of the prompt tokens that round robin computes")


if __name__ == "__main__":
    main()
