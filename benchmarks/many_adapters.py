"""Time of the first token if requests are for one of a thousand adapters, compared with one adapter for all.

    python benchmarks/many_adapters.py [CHECKPOINT] [--adapters 1000] [--open 256] [--rate 8] [--rounds 3]

A server has a folder of adapters, of which --open stay open (`--max-cpu-loras`). Requests arrive at random, --rate each
second, with prompts of their own. Two cases, in turn in each round, after requests that warm the server up: "one", all
requests have the same adapter; "zipf", the n-th adapter in popularity is chosen with a probability in proportion to
1 / n. Prints percentiles of the time to the first token, their ratios within each round, the share of requests whose
adapter cannot always be open, and the server's memory for an open adapter, compared with the size of its file.
"""

import argparse
import http.client
import json
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import torch
from adapters import SMOLLM2, random_adapter
from protocol.server import Server

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.engine import Engine

PROMPT, ANSWER = 64, 8  # tokens
VOCABULARY = (1000, 40000)  # token ids of prompts
CASES = ("one", "zipf")
CLIENTS = 64  # requests at once


def first_token_s(url: str, name: str, prompt: list[int]) -> float:
    """Seconds from sending a request to its first token; the rest of the answer is read.

    Args:
        url: the server's address.
        name: name of the adapter.
        prompt: token ids.
    """
    body = {"model": name, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    took = time.perf_counter() - start
    rest = response.read()
    connection.close()
    if response.status != 200 or b"data: [DONE]" not in rest:
        raise SystemExit(f"{name}: {response.status} {(first + rest)[:300]!r}")
    return took


class Load:
    """Requests at random times, for adapters that are chosen by their popularity.

    Args:
        url: the server's address.
        names: names of all adapters, the most popular one first.
        rate: requests each second.
        seed: seed of times, prompts and choices.
    """

    def __init__(self, url: str, names: list[str], rate: float, seed: int) -> None:
        self._url, self._names, self._rate, self._random = url, names, rate, random.Random(seed)
        self._weights = [1 / (1 + index) for index in range(len(names))]

    def run(self, case: str, seconds: float) -> list[float]:
        """Seconds to the first token of each request; case: one of CASES; seconds: time in which requests are sent."""
        pending = []
        with ThreadPoolExecutor(CLIENTS) as pool:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                name = self._names[0] if case == "one" else self._random.choices(self._names, self._weights)[0]
                prompt = [self._random.randint(*VOCABULARY) for _ in range(PROMPT)]
                pending.append(pool.submit(first_token_s, self._url, name, prompt))
                time.sleep(self._random.expovariate(self._rate))
        return [one.result() for one in pending]


def misses(names: int, kept: int) -> float:
    """Share of requests whose adapter is not among the `kept` most popular ones of `names`."""
    weights = [1 / (1 + index) for index in range(names)]
    return sum(weights[kept:]) / sum(weights)


def resident_bytes(process: int) -> int:
    """Memory of a process that is in use, without pages of files."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) << 10


def write_adapters(engine: Engine, folder: Path, count: int, rank: int) -> list[str]:
    """Prepares adapters of random numbers into a folder, each of its own; returns their names."""
    names = []
    for seed in range(count):
        name = f"adapter-{seed}"
        with tempfile.TemporaryDirectory() as scratch:
            made = random_adapter(engine, Path(scratch) / name, rank, seed)
            made.rename(folder / made.name)
        names.append(name)
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--open", type=int, default=256, help="adapters that stay open, --max-cpu-loras")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rate", type=float, default=8.0, help="requests each second")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of each case")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        path, folder = Path(scratch) / "model.engine", Path(scratch) / "adapters"
        folder.mkdir()
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        start = time.perf_counter()
        with Engine.open(path) as engine:
            names = write_adapters(engine, folder, arguments.adapters, arguments.rank)
        took, size = time.perf_counter() - start, (folder / f"{names[0]}.lora").stat().st_size
        print(f"{len(names)} adapters of rank {arguments.rank}, {size / 1e6:.1f} MB each, prepared in {took:.0f} s")
        options = ["--lora-dir", str(folder), "--max-cpu-loras", str(arguments.open), "--max-num-seqs", "32"]
        server = Server(path, options, Path(scratch) / "log")
        try:
            measure(server, names, arguments, size)
        finally:
            server.close()


def measure(server: Server, names: list[str], arguments: argparse.Namespace, size: int) -> None:
    """Runs all cases and prints the figures; size: bytes of an adapter's file."""
    load = Load(server.url, names, arguments.rate, seed=0)
    load.run("one", arguments.seconds / 4)
    before, opened = resident_bytes(server.process.pid), min(arguments.open, len(names))
    for name in names[:opened]:  # each is opened once, before anything counts
        first_token_s(server.url, name, [1000] * PROMPT)
    grown = (resident_bytes(server.process.pid) - before) / opened
    rounds = [{case: load.run(case, arguments.seconds) for case in CASES} for _ in range(arguments.rounds)]
    for share in (50, 95, 99):
        figures = {case: [centile(one[case], share) for one in rounds] for case in CASES}
        ratios = [zipf / one for one, zipf in zip(figures["one"], figures["zipf"], strict=True)]
        shown = ", ".join(f"{case} {statistics.median(figures[case]) * 1e3:6.1f} ms" for case in CASES)
        spread = f"({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"first token, p{share}: {shown}, zipf / one {statistics.median(ratios):.2f} {spread}")
    print(f"{misses(len(names), opened):.0%} of requests are for adapters that are not among the {opened} most popular")
    print(f"memory of an open adapter: {grown / 1e6:.2f} MB, and a file of {size / 1e6:.2f} MB")


def centile(values: list[float], share: int) -> float:
    """The value that `share` percent of the values do not exceed."""
    return statistics.quantiles(values, n=100, method="inclusive")[share - 1]


if __name__ == "__main__":
    main()
