"""Recovery from the source: gradients, what it gains in a real engine, and what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from enginewright.builder.build import BuildConfig, build_engine, quant_config
from enginewright.errors import UsageError
from enginewright.passes.pass_manager import run_passes
from enginewright.passes.pipeline import pipeline
from enginewright.passes.quant import Int8Wo, recover
from enginewright.passes.quant.method import Calibration
from enginewright.passes.quant.recover import Recover, _Student, _Training
from enginewright.passes.streaming import stream
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.engine import Engine
from tests.helpers.graphs import dense_graph
from tests.helpers.tiny import MemoryCheckpoint

TEXTS = [np.random.default_rng(seed).integers(3, 250, 24).tolist() for seed in range(20)]


def built(folder: Path, checkpoint: MemoryCheckpoint, **options: Any) -> Path:
    """An engine of a name of its own."""
    path = folder / f"{len(list(folder.iterdir()))}.engine"
    build_engine(checkpoint, BuildConfig(gate=None, **options), path)
    return path


def distance(path: Path, source: list[torch.Tensor]) -> float:
    """Mean KL divergence of an engine from logits of its source on TEXTS."""
    with Engine.open(path) as engine:
        limits = RuntimeConfig(threads=1, max_num_batched_tokens=64, max_model_len=64)
        logits = score(CpuExecutor(engine, limits), TEXTS)
    kinds = [
        (F.log_softmax(torch.tensor(one), -1), F.log_softmax(two, -1)) for one, two in zip(logits, source, strict=True)
    ]
    return float(
        torch.stack([F.kl_div(*pair, reduction="sum", log_target=True) / len(pair[0]) for pair in kinds]).mean()
    )


def test_engines_come_closer_to_their_source(tmp_path: Path) -> None:
    """Texts are others than those of the training, and the engine computes them; tests/long has calibrated methods."""
    check_gain("int4-rtn", tmp_path)


def check_gain(method: str, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("qwen3")
    streamed = stream(dense_graph("qwen3"), TEXTS)
    source = [streamed.logits(index, 0, len(text)).clone() for index, text in enumerate(TEXTS)]
    quant = quant_config(method)
    plain, recovered = (
        distance(built(tmp_path, checkpoint, quant=quant, recover=steps), source) for steps in (None, 40)
    )
    assert recovered < 0.97 * plain, (plain, recovered)  # random weights have little that could be recovered


def training(model: Any, method: Any, held_out: int = 0) -> _Training:
    texts = TEXTS[:5]
    return _Training(_Student(model, method), stream(model.clone(), texts), texts, held_out, 1)


def fused() -> Any:
    model, passes = dense_graph("qwen3"), pipeline(Int8Wo())
    run_passes(model, passes[: [one.name for one in passes].index("fuse_residual_norm")])
    return model


def test_gradients_are_those_of_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without roundings, which gradients pass unchanged, they are the slopes of the loss."""
    monkeypatch.setattr(Int8Wo, "round_activations", lambda self, x, target=None: x)
    monkeypatch.setattr(Int8Wo, "quantize", lambda self, rows, name: coarse(rows))
    train = training(fused(), Int8Wo())
    leaves = train._student.leaves
    gradients = train._gradients(1)
    random = np.random.default_rng(3)
    for place in (0, 1, 4, -1, -3):
        direction = torch.tensor(random.normal(size=tuple(leaves[place].shape)), dtype=torch.float32)
        slope, losses = float((gradients[place] * direction).sum()), []
        for sign in (1, -1):
            with torch.no_grad():
                leaves[place].add_(direction, alpha=0.01 * sign)
                losses.append(float(train._loss(1)))
                leaves[place].sub_(direction, alpha=0.01 * sign)
        assert abs(slope) > 1e-6 and (losses[0] - losses[1]) / 0.02 == pytest.approx(slope, rel=0.05)


def coarse(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of few bits, so that there is something to recover."""
    scale = rows.abs().amax(1) / 3
    return (rows / scale.unsqueeze(1)).round().to(torch.int8), scale


def test_the_number_of_threads_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, made = MemoryCheckpoint.tiny("llama"), []
    for threads in (1, 2):
        monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", str(threads))
        path = built(tmp_path, checkpoint, quant=quant_config("int4-rtn"), recover=12)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    with Engine.open(path) as engine:
        assert engine.manifest.recipe["recover"] == 12
        assert engine.manifest.recipe["calibration"]["samples"] == 256


def test_the_best_of_the_held_out_texts_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that makes nothing better changes nothing, and stops."""
    monkeypatch.setattr(recover, "RATE", 5.0)
    taken: list[int] = []
    model = fused()
    result = run_passes(model, [Recover(Int8Wo(), Calibration((), 1, None, TEXTS), 99, taken.append)])["recover"]
    (fact,) = result.facts
    before, after = fact.partition("KL ")[2].partition(" on")[0].split(" → ")
    assert before == after and len(taken) == 30 and "in 30 steps" in fact


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("llama", {"quant": quant_config("bf16")}, "bf16 has no scales that could be trained"),
        ("llama", {"quant": quant_config("mxfp4")}, "mxfp4 has no scales that could be trained"),
        ("qwen3_moe", {"quant": quant_config("int4-rtn")}, "experts are not trained"),
        ("granitemoehybrid", {"quant": quant_config("int4-rtn")}, "its recurrent layers have no gradients here"),
    ],
)
def test_what_is_refused(family: str, options: dict[str, Any], why: str, tmp_path: Path) -> None:
    """Before any text is written."""
    with pytest.raises(UsageError, match=why):
        built(tmp_path, MemoryCheckpoint.tiny(family), **options, recover=5)
    assert not list(tmp_path.iterdir())
