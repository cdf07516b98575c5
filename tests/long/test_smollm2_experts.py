"""Real activations through experts: SmolLM2 whose MLPs are cut into eight experts, all of which every token goes to."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.gate.config import GateConfig
from enginewright.passes.quant import METHODS, Bf16, Int4Gptq, Int8Wo, QuantConfig
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.helpers.graphs import random_tokens, relative_error
from tests.helpers.tiny import MemoryCheckpoint

EXPERTS = 8
KEPT = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rms_norm_eps",
    "max_position_embeddings", "hidden_act",
)  # fmt: skip


def cut(folder: Path) -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
    """The model as it is, and as Mixtral: routers are zeros, so that each expert has an eighth of a token, and what
    comes of experts is eight times as large.
    """
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    kept = {key: config[key] for key in KEPT} | {"rope_theta": rope["rope_theta"], "tie_word_embeddings": True}
    dense = {"model_type": "llama", "intermediate_size": config["intermediate_size"], **kept}
    width = config["intermediate_size"] // EXPERTS
    mixture = {"model_type": "mixtral", "intermediate_size": width, **kept}
    mixture |= {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS}
    stored = load_file(folder / "model.safetensors")
    whole = {name: value for name, value in stored.items() if name != "lm_head.weight"}
    parts: dict[str, torch.Tensor] = {}
    for name, value in whole.items():
        layer, _, part = name.partition(".mlp.")
        if not part:
            parts[name] = value
            continue
        block = f"{layer}.block_sparse_moe"
        parts[f"{block}.gate.weight"] = torch.zeros(EXPERTS, config["hidden_size"], dtype=torch.bfloat16)
        for expert in range(EXPERTS):
            own = slice(expert * width, (expert + 1) * width)
            mine = value[:, own] * EXPERTS if part == "down_proj.weight" else value[own]
            new = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part.removesuffix(".weight")]
            parts[f"{block}.experts.{expert}.{new}.weight"] = mine.contiguous()
    return MemoryCheckpoint(dense, whole), MemoryCheckpoint(mixture, parts)


@pytest.fixture(scope="module")
def models(smollm2_folder: Path) -> tuple[MemoryCheckpoint, MemoryCheckpoint]:
    return cut(smollm2_folder)


def logits(checkpoint: MemoryCheckpoint, quant: QuantConfig, path: Path, **config: object) -> NDArray[np.float32]:
    build_engine(checkpoint, BuildConfig(quant=quant, **{"gate": None, **config}), path)  # type: ignore[arg-type]
    text = random_tokens(200, seed=1, vocab_size=40_000).tolist()
    with Engine.open(path) as engine:
        limits = RuntimeConfig(max_num_batched_tokens=64, max_logit_rows=64, max_model_len=256)
        return np.concatenate(score(CpuExecutor(engine, limits), [text]))


# relative_error of logits: bf16 rounds the same numbers in both, and sums of experts have another order; of int8 and 4
# bits a row of down has a scale for each expert.
LIMITS = {"bf16": 2e-5, "int8-wo": 1e-3, "w8a8": 2e-3, "int4-rtn": 0.02}


@pytest.mark.parametrize("name", LIMITS)
def test_a_mixture_of_all_experts_is_the_dense_model(
    name: str, models: tuple[MemoryCheckpoint, MemoryCheckpoint], tmp_path: Path
) -> None:
    dense, mixture = models
    method = {one.info.name: one for one in METHODS}[name]()
    errors = relative_error(
        logits(mixture, method, tmp_path / "mixture.engine"), logits(dense, method, tmp_path / "dense.engine")
    )
    assert errors < LIMITS[name]


@pytest.mark.parametrize("quant", [Bf16(), Int8Wo(), Int4Gptq()], ids=lambda quant: quant.name)
def test_the_gate_passes(quant: QuantConfig, models: tuple[MemoryCheckpoint, MemoryCheckpoint], tmp_path: Path) -> None:
    """Calibration and the gate see each expert's own activations."""
    _, mixture = models
    data = tmp_path / "data.txt"
    data.write_text("The quick brown fox jumps over the lazy dog. What is the capital of France?\n" * 40)
    config = BuildConfig(quant=quant, gate=GateConfig(), calib_data=str(data) if quant.calibrated else None)
    report = build_engine(mixture, config, tmp_path / "mixture.engine")
    assert report.quality.measured is not None and not report.quality.measured.failed
