"""The whole gate on a real model: every method passes the limits that it has by default, with room to spare."""

from pathlib import Path

import pytest

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.gate.config import GateConfig
from enginewright.passes.quant import METHODS, QuantConfig

ROOM = 0.8  # of what a limit allows at most


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "int8"])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_sound_build_passes(
    method: type[QuantConfig], kv_cache_dtype: str, smollm2_folder: Path, tmp_path: Path
) -> None:
    config = BuildConfig(quant=method(), kv_cache_dtype=kv_cache_dtype)
    report = build_engine(open_checkpoint(str(smollm2_folder)), config, tmp_path / "x.engine")
    assert report.quality.measured is not None
    for check in report.quality.measured.checks:
        assert check.value is not None and check.limit is not None
        if check.least:
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
