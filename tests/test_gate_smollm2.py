"""The gate on a real model, on a part of its text: a sound build passes, one wrong layer is refused by name."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.gate import gate as gate_module
from enginewright.errors import QualityGateError
from enginewright.passes.quant import Int4Rtn, QuantConfig

FAULTY = "model.layers.17.mlp.down_proj"


@pytest.fixture(autouse=True)
def _less_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "TOKENS", 160)
    monkeypatch.setattr(gate_module, "LAYER_TOKENS", 32)


def test_bf16_passes(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = build_engine(open_checkpoint(str(smollm2_gguf)), BuildConfig(), tmp_path / "x.engine")
    measured = report.quality.measured
    assert measured is not None and not measured.failed
    assert measured.whole.kl is not None and 0 < measured.whole.kl < 0.001
    # Of so few tokens: 392. A model that cannot read is nearer to the vocabulary of 49152.
    assert measured.whole.source_perplexity is not None and measured.whole.source_perplexity < 1000, "it can read"


def test_one_layer_of_doubled_scales_is_named_first(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = Int4Rtn.quantize

    def doubled(self: QuantConfig, rows: torch.Tensor, name: str) -> Sequence[torch.Tensor]:
        codes, scale = sound(self, rows, name)  # type: ignore[arg-type]
        return codes, scale * 2 if name == f"{FAULTY}.weight" else scale

    monkeypatch.setattr(Int4Rtn, "quantize", doubled)
    with pytest.raises(QualityGateError) as refused:
        build_engine(open_checkpoint(str(smollm2_gguf)), BuildConfig(quant=Int4Rtn()), tmp_path / "x.engine")
    said = str(refused.value)
    assert "layer is " in said and list(tmp_path.iterdir()) == []
    table = said[said.index("off most") :].splitlines()
    assert table[1].split()[0] == FAULTY
