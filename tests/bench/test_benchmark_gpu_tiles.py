"""`python -m benchmarks.gpu --parts tiles` in emulation."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import gemm, tiles
from benchmarks.gpu.report import Report
from tests.emulator.bench import EmulatedBench
from tests.helpers.gpu_report import reported

SHAPE = gemm.Shape("down", 32, 1024, max_tokens=9)
INT4 = next(format for format in gemm.FORMATS if format.name == "int4")


def test_each_choice_is_made_in_each_other_way_once() -> None:
    found = dict(tiles.variants(INT4.tiles))
    assert len(found) == 1 + sum(len(values) - 1 for values in tiles.CHOICES.values())
    assert found["waves=1"] == replace(INT4.tiles, waves=1) and found[tiles.PRESENT] == INT4.tiles
    # All choices are in the table of present ones, and so nothing is compared with itself.
    assert all(
        getattr(format.tiles, name) in values for format in gemm.FORMATS for name, values in tiles.CHOICES.items()
    )


def test_other_tiles_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "TOKENS", (7,))
    monkeypatch.setattr(tiles, "CHOICES", {"feature_warps": (2, 4), "waves": (2, 9), "large_units": (1, 2)})
    bench = EmulatedBench()

    def measure(report: Report) -> None:
        found = tiles.measure(bench, report, INT4, SHAPE, gemm.Weights(bench, SHAPE))
        tiles.summary(report, INT4, [found, {4096: {"large_units=1": 2.0}, 8: {"waves=9": 4.0}}])

    found = reported(tmp_path, measure)
    assert "error" not in found["tiles/int4/down/7"] and found["tiles/int4/down/7"]["by"] == 1.0
    # waves=9 splits K no further here, where each split has what it needs at least.
    assert found["tiles/int4/few tokens"] == {"waves=9": 2.0, "feature_warps=2": 1.0}
    assert found["tiles/int4/many tokens"] == {"large_units=1": 2.0}
