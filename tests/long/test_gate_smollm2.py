"""The gate on a real model, on a part of its text: one wrong layer is refused by name."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.errors import QualityGateError
from enginewright.passes.quant import Int4Rtn, QuantConfig
from tests.gate import test_smollm2 as short

FAULTY = "model.layers.17.mlp.down_proj"
_less_text = short._less_text


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
    table = said[said.index("layers with the largest errors") :].splitlines()
    assert table[1].split()[0] == FAULTY
