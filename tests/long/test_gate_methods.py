"""The whole gate on a real model: every method passes the limits that it has by default, with room to spare."""

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.gate.config import GateConfig
from enginewright.dtypes import KV_CACHES
from enginewright.errors import QualityGateError
from enginewright.passes.quant import METHODS, W8A8, Fp8, Int8Sq, QuantConfig

ROOM = 0.8  # of what a limit allows at most
CASES = [(method(), kv_cache_dtype) for method in METHODS for kv_cache_dtype in KV_CACHES]
CASES += [(Fp8(fp8_scales=scales), "bf16") for scales in ("tensor", "block")]


@pytest.mark.parametrize(("quant", "kv_cache_dtype"), CASES, ids=str)
def test_a_sound_build_passes(quant: QuantConfig, kv_cache_dtype: str, smollm2_folder: Path, tmp_path: Path) -> None:
    config = BuildConfig(quant=quant, kv_cache_dtype=kv_cache_dtype)
    report = build_engine(open_checkpoint(str(smollm2_folder)), config, tmp_path / "x.engine")
    assert report.quality.measured is not None
    for check in report.quality.measured.checks:
        assert check.value is not None and check.limit is not None
        if check.is_minimum:
            assert 1 - check.value <= ROOM * (1 - check.limit), check
        else:
            assert check.value <= ROOM * check.limit or check.name == "ppl", check


def test_the_full_gate(smollm2_folder: Path, tmp_path: Path) -> None:
    config = BuildConfig(gate=GateConfig(full=True))
    report = build_engine(open_checkpoint(str(smollm2_folder)), config, tmp_path / "x.engine")
    assert report.quality.measured is not None and report.quality.measured.full is not None
    full = report.quality.measured.full
    assert len(full.needles) == 9 and any(needle.source for needle in full.needles)
    assert sum(writing.valid_json or False for writing in full.writings) >= 4


def with_outliers(source: Path, target: Path) -> Path:
    """Copies a checkpoint to one of the same function, in which a few channels of each norm's output are 64 times as
    large, and the weights that read them as much smaller: powers of two, which lose nothing."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    for name in [name for name in weights if "layernorm" in name]:
        layer = name.removesuffix("input_layernorm.weight").removesuffix("post_attention_layernorm.weight")
        attention = name.endswith("input_layernorm.weight")
        readers = [f"self_attn.{part}_proj" for part in "qkv"] if attention else ["mlp.gate_proj", "mlp.up_proj"]
        for channel in (11, 200, 431):
            weights[name][channel] *= 64
            for reader in readers:
                weights[f"{layer}{reader}.weight"][:, channel] /= 64
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    return target


def test_smoothing_passes_where_rounding_to_nearest_is_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(with_outliers(smollm2_folder, tmp_path / "planted")))
    with pytest.raises(QualityGateError, match="kl is"):
        build_engine(checkpoint, BuildConfig(quant=W8A8(0)), tmp_path / "naive.engine")
    report = build_engine(checkpoint, BuildConfig(quant=Int8Sq(0)), tmp_path / "smooth.engine")
    assert report.quality.measured is not None and not report.quality.measured.failed
    assert not (tmp_path / "naive.engine").exists()
