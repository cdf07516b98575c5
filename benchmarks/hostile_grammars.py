"""Gaps of streams, times of honest structured requests and memory of a server that is sent hostile grammars.

    PYTHONPATH=. python benchmarks/hostile_grammars.py [ENGINE] [--scenarios control mixed] [--seconds 15]

ENGINE is a tiny model's, built for the run, unless one is given. Each scenario runs on the same server while two
clients, in processes of their own, stream answers without a grammar. The worst time between two pieces of a stream is
compared with that of the scenario `control`, in which there are no other requests. `honest` is three clients that
request answers by a small new schema, one after another; they also run in `mixed`, together with 90 grammars of
ten hostile kinds. Memory is the proportional set size of the server and all its children.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from protocol.server import Server

from tests.helpers.serving import tiny_engine

LIMITS = ("--kv-cache-memory", "200m", "--max-num-seqs", "32")
NUM_STREAMS = 2
NUM_HONEST = 3
Body = dict[str, Any]
HONEST_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}


def hostile_bodies(seed: int) -> list[Body]:
    """One request of each hostile kind. Those of different seeds share no grammar."""
    rng = random.Random(seed)
    return [
        {"guided_regex": f"{rng.choice('abcdefg')}{{{10**9 - seed}}}"},
        {"guided_regex": f"((a{{{1000 - seed}}}){{1000}}){{1000}}"},
        {"guided_choice": [rng.choice("abcdef") * (100_000 - seed)]},
        {"guided_choice": ["".join(rng.choices("abcdefgh ", k=15_000))]},
        {"guided_regex": f"(a|b)*a(a|b){{{30 + seed}}}"},
        {"guided_regex": f"(.*a.{{{50 + seed}}}.*b.{{70}})"},
        {"guided_json": {"enum": [f"v{number}{seed}" for number in range(5000)]}},
        {"guided_grammar": f'start: s\ns: s s | s s s | "a{seed}" | ""'},
        {"guided_json": {"allOf": [{"type": "string", "pattern": f".*{number}{seed}.*"} for number in range(200)]}},
        {"guided_json": {"allOf": [{"anyOf": [{"required": [f"{a}{b}{seed}"]} for a in range(9)]} for b in range(20)]}},
    ]


@dataclass(frozen=True)
class Scenario:
    """hostile: sent at once. num_honest: clients."""

    hostile: Sequence[Body] = ()
    num_honest: int = 0
    in_turn: bool = False  # hostile requests one after another


SCENARIOS = {
    "control": Scenario(),
    "honest": Scenario(num_honest=NUM_HONEST),
    "one repetition": Scenario([{"guided_regex": "a{1000000000}"}]),
    "eight repetitions": Scenario([{"guided_regex": f"a{{{10**9 + seed}}}"} for seed in range(8)]),
    "eight choices": Scenario([{"guided_choice": [letter * 100_000]} for letter in "abcdefgh"]),
    "eight shorter choices": Scenario([{"guided_choice": [letter * 15_000]} for letter in "abcdefgh"]),
    "forty shorter choices": Scenario(
        [{"guided_choice": [chr(97 + number % 26) * (15_000 - number)]} for number in range(40)], in_turn=True
    ),
    "mixed": Scenario([body for seed in range(9) for body in hostile_bodies(seed)], num_honest=NUM_HONEST),
}


def post(port: int, body: Body) -> int:
    """The status of the response to a completion of these keys; 0: there was none."""
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        text = json.dumps({"prompt": "x", "temperature": 1, **body})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


def stream(port: int, seconds: float) -> None:
    """Print the times between pieces of streams, one stream after another, as JSON. Run in a process of its own."""
    end, gaps = time.monotonic() + seconds, list[float]()
    body = {"prompt": "Free", "max_tokens": 3000, "temperature": 1, "ignore_eos": True, "stream": True}
    while time.monotonic() < end:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response, last = connection.getresponse(), 0.0
        while response.read1() and time.monotonic() < end:
            now = time.monotonic()
            gaps += [now - last] if last else []
            last = now
        connection.close()
    print(json.dumps(gaps))


def memory_mib(pid: int) -> float:
    """Proportional set size of a process and all its children."""
    total_kib, rest = 0, [pid]
    while rest:
        one = rest.pop()
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
            total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
            for thread in os.listdir(f"/proc/{one}/task"):
                rest += map(int, Path(f"/proc/{one}/task/{thread}/children").read_text().split())
        except OSError:  # it has ended
            continue
    return total_kib / 1024


def timed(durations: list[float], statuses: Counter[int], act: Callable[[], int]) -> None:
    began = time.monotonic()
    statuses[act()] += 1
    durations.append(time.monotonic() - began)


def measure(port: int, pid: int, scenario: Scenario, seconds: float) -> tuple[float, str]:
    """The worst gap of a stream in seconds, and a line of figures."""
    command = [sys.executable, __file__, "--stream", str(port), "--seconds", str(seconds)]
    streams = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_STREAMS)]
    time.sleep(1.0)  # until they run
    end = time.monotonic() + seconds - 2
    attacks, answers, honest, honest_answers = list[float](), Counter[int](), list[float](), Counter[int]()

    def attack(bodies: Sequence[Body]) -> None:
        for body in bodies:
            timed(attacks, answers, lambda body=body: post(port, {"max_tokens": 60, **body}))  # type: ignore[misc]

    def ask() -> None:
        number = 0
        while time.monotonic() < end:
            number += 1
            schema = {**HONEST_SCHEMA, "title": f"{number} of {threading.get_ident()}"}  # so that it is new
            timed(honest, honest_answers, lambda schema=schema: post(port, {"max_tokens": 30, "guided_json": schema}))  # type: ignore[misc]
            time.sleep(0.05)

    groups = [scenario.hostile] if scenario.in_turn else [[body] for body in scenario.hostile]
    clients = [threading.Thread(target=attack, args=(group,)) for group in groups]
    clients += [threading.Thread(target=ask) for _ in range(scenario.num_honest)]
    for client in clients:
        client.start()
    peak = memory_mib(pid)
    while any(client.is_alive() for client in clients):
        peak = max(peak, memory_mib(pid))
        time.sleep(0.3)
    gaps = [gap for one in streams for gap in json.loads(one.communicate()[0])]
    line = f"gaps: median {1e3 * statistics.median(gaps):.1f} ms, worst {1e3 * max(gaps):.0f}"
    line += f"; peak {peak:.0f} MiB"
    if attacks:
        line += f"; hostile: {dict(answers)}, worst {max(attacks):.1f} s"
    if honest:
        cuts = statistics.quantiles(honest, n=20)
        line += f"; honest: {dict(honest_answers)}, median {cuts[9]:.2f} s, p95 {cuts[18]:.2f}, worst {max(honest):.2f}"
    return max(gaps), line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=15, help="of each scenario's streams, at least")
    parser.add_argument("--stream", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stream is not None:
        stream(arguments.stream, arguments.seconds)
        return
    worst = dict[str, float]()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(arguments.engine or tiny_engine(), LIMITS, Path(folder) / "log")
        try:
            port, pid = urlsplit(server.url).port or 0, server.process.pid
            post(port, {"max_tokens": 4, "guided_regex": "ab"})  # the first grammar starts a process
            for name in arguments.scenarios:
                seconds = max(arguments.seconds, 30) if name == "mixed" else arguments.seconds
                worst[name], line = measure(port, pid, SCENARIOS[name], seconds)
                ratio = f"{worst[name] / worst['control']:4.1f} x control" if "control" in worst else ""
                print(f"{name:22} {ratio:14} {line}", flush=True)
        finally:
            server.close()


if __name__ == "__main__":
    main()
