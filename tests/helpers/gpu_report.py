"""The report of one part of the GPU benchmark."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.report import Report, read_report


def reported(tmp_path: Path, measure: Callable[[Report], None]) -> dict[str, dict[str, float]]:
    measure(Report(tmp_path / "report"))
    return {figure.pop("name"): figure for figure in read_report(tmp_path / "report")}
