"""Rotations: the matrices themselves, graphs that compute the same, and models whose outliers they spread."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.builder.models import build_graph
from enginewright.errors import UsageError
from enginewright.passes.pass_manager import PassResult, run_passes
from enginewright.passes.pipeline import pipeline
from enginewright.passes.quant import Bf16
from enginewright.passes.quant.rotate import ROUTERS, Rotate, Rotation
from enginewright.passes.streaming import stream
from enginewright.passes.weights import read
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.helpers.tiny import ALL_EXPERTS, MemoryCheckpoint

TEXTS = [np.random.default_rng(length).integers(3, 250, length).tolist() for length in (1, 9, 30)]


@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 35, 40, 576])
def test_a_rotation_is_a_product_of_signs_hadamard_and_hartley_matrices(size: int) -> None:
    power = size & -size
    odd = size // power
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    hartley = np.array([[math.cos(a) + math.sin(a) for a in 2 * np.pi * i * np.arange(odd) / odd] for i in range(odd)])
    product = np.kron(hartley / odd**0.5, hadamard / power**0.5)
    found = Rotation(size).matrix().double().numpy()
    signs = np.sign(found[:, 0] * product[:, 0])
    assert np.allclose(found, signs[:, None] * product, atol=1e-6)
    assert np.allclose(found @ found.T, np.eye(size), atol=1e-5)
    if size > 8:
        assert 0.3 * size < (signs > 0).sum() < 0.7 * size
        assert abs(found).max() < 1.5 / size**0.5  # no channel stays an outlier


def fused(checkpoint: MemoryCheckpoint) -> ir.Model:
    """A graph as the pass finds it."""
    model, passes = build_graph(checkpoint), pipeline(Bf16(), rotate=True)
    run_passes(model, passes[: [one.name for one in passes].index("rotate")])
    return model


def compare(family: str, **changes: Any) -> tuple[PassResult, float]:
    """Rotates a tiny model; returns the pass's result, and the largest difference of logits in FLOAT."""
    before = fused(MemoryCheckpoint.tiny(family, **{**ALL_EXPERTS.get(family, {}), **changes}))
    after = before.clone()
    result = run_passes(after, [Rotate()])["rotate"]
    logits = []
    for model in (before, after):
        streamed = stream(model, TEXTS)
        logits.append(torch.cat([streamed.logits(index, 0, len(text)) for index, text in enumerate(TEXTS)]))
    return result, float((logits[0] - logits[1]).abs().max())


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("granitemoehybrid", {"tie_word_embeddings": False}),
        ("qwen3_next", {}),
    ],
)
def test_a_rotated_model_computes_the_same(family: str, changes: dict[str, Any]) -> None:
    """tests/long has all families."""
    result, error = compare(family, **changes)
    assert result.rewrites and not result.refusals
    assert error < (0.05 if ROUTERS in result.notes else 5e-5)


def test_tables_that_are_shared_stay_as_they_are() -> None:
    """The embedding and the head are one table, so the stream is rotated after one and back before the other."""
    checkpoint = MemoryCheckpoint.tiny("llama", tie_word_embeddings=True)
    before = fused(checkpoint)
    after = before.clone()
    run_passes(after, [Rotate()])
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(read(before.graph.initializers[name]), read(after.graph.initializers[name]))
    _, error = compare("llama", tie_word_embeddings=True)
    assert 1e-4 < error < 0.05  # the matrices are rounded to bfloat16


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt2", "no norm of root mean squares is before its head"),
        ("gemma3_text", "post_feedforward_layernorm is made by RMSNormalization, which is not linear"),
    ],
)
def test_models_of_which_only_values_are_rotated(family: str, why: str) -> None:
    result, error = compare(family)
    assert result.rewrites > 1 and error < 5e-5
    (refusal,) = result.refusals
    assert why in refusal


def test_a_model_that_cannot_be_rotated() -> None:
    with pytest.raises(UsageError, match=r"--rotate does not work with this model: .*layer_scalar is made by Scale"):
        run_passes(fused(MemoryCheckpoint.tiny("gemma4_text")), [Rotate()])


def errors_of(checkpoint: MemoryCheckpoint, folder: Path, method: str) -> list[float]:
    """Errors of the logits without and with a rotation, relative to those in bf16."""
    logits = []
    for quant, rotate in (("bf16", False), (method, False), (method, True)):
        path = folder / f"{quant}-{rotate}.engine"
        build_engine(checkpoint, BuildConfig(quant=quant_config(quant), rotate=rotate, gate=None), path)
        with Engine.open(path) as engine:
            limits = RuntimeConfig(threads=1, max_num_batched_tokens=64, max_model_len=64)
            logits.append(np.concatenate(score(CpuExecutor(engine, limits), TEXTS)))
    return [float(np.linalg.norm(one - logits[0]) / np.linalg.norm(logits[0])) for one in logits[1:]]


@pytest.mark.parametrize(
    ("method", "outlier", "ratio"),
    [("w8a8", r"layernorm\.weight", 0.6), ("int4-rtn", r"(q|k|v|gate|up)_proj\.weight", 0.9)],
)
def test_outliers_are_spread(method: str, outlier: str, ratio: float, tmp_path: Path) -> None:
    """Codes lose less where one channel of activations, or one column of weights, was far larger than the others."""
    checkpoint = MemoryCheckpoint.tiny("llama", tie_word_embeddings=False, hidden_size=96)
    for name, tensor in checkpoint.stored.items():
        if re.search(outlier, name):
            tensor[..., 5] *= 40
    plain, rotated = errors_of(checkpoint, tmp_path, method)
    assert rotated < ratio * plain, (plain, rotated)


def test_a_rotated_engine_is_made_again(tmp_path: Path) -> None:
    """Recipe, bytes, and what it does not go with."""
    path, checkpoint = tmp_path / "rotated.engine", MemoryCheckpoint.tiny("qwen3")
    config = BuildConfig(quant=quant_config("int8-wo"), rotate=True, gate=None)
    build_engine(checkpoint, config, path)
    build_engine(checkpoint, config, again := tmp_path / "again.engine")
    assert path.read_bytes() == again.read_bytes()
    with Engine.open(path) as engine:
        assert engine.manifest.recipe["rotate"] is True
        with pytest.raises(UsageError, match="was built with --rotate"):
            _ = engine.adapter_sites
    build_engine(checkpoint, BuildConfig(quant=quant_config("int8-wo"), gate=None), plain := tmp_path / "plain.engine")
    with Engine.open(plain) as engine:
        assert "rotate" not in engine.manifest.recipe
