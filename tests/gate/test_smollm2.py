"""The gate on a real model, on a part of its text: a sound build passes. tests/long has one that is refused."""

from pathlib import Path

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.gate import gate as gate_module


@pytest.fixture(autouse=True)
def _less_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "TOKENS", 160)
    monkeypatch.setattr(gate_module, "LAYER_TOKENS", 32)
    monkeypatch.setattr(gate_module, "BATCHES", 2)  # the source's weights are read again for each


def test_bf16_passes(smollm2_gguf: Path, tmp_path: Path) -> None:
    report = build_engine(open_checkpoint(str(smollm2_gguf)), BuildConfig(), tmp_path / "x.engine")
    measured = report.quality.measured
    assert measured is not None and not measured.failed
    assert measured.whole.kl is not None and 0 < measured.whole.kl < 0.001
    # Of so few tokens: 392. A model that cannot read is nearer to the vocabulary of 49152.
    assert measured.whole.source_perplexity is not None and measured.whole.source_perplexity < 1000, "it can read"
