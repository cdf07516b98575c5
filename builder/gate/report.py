"""Writes the quality report for people and for programs: an HTML page, and JSON beside it."""

from pathlib import Path

import msgspec

from enginewright.builder.gate.config import GateConfig
from enginewright.builder.gate.page import page
from enginewright.errors import UsageError
from enginewright.manifest import About
from enginewright.output_file import write_file
from enginewright.runtime.commands.quality import QualityReport


def check_report_path(path: Path, gate: GateConfig | None) -> list[Path]:
    """The files of a report. Raises UsageError if there is nothing to report, or the path is of no known kind."""
    if gate is None:
        raise UsageError("--report has nothing to tell", "--gate off measures nothing")
    if path.suffix.lower() not in (".html", ".json"):
        raise UsageError(f"--report {path} is of no known kind", "it may end in .html or .json")
    return _files(path)


def write_report(report: QualityReport, about: About, path: Path) -> None:
    """An .html file has a .json file beside it; each is whole or not there.

    Raises:
        EngineError: a file cannot be written.
    """
    content = {
        "name": about.name,
        "model_type": about.model_type,
        "builder_version": about.builder_version,
        "recipe": about.recipe,
        "quality": report,
    }
    for file in _files(path):
        if file.suffix.lower() == ".json":
            data = msgspec.json.format(msgspec.json.encode(content, order="sorted"), indent=1) + b"\n"
        else:
            assert report.measured is not None
            data = page(report, report.measured, about).encode()
        write_file(file, data)


def _files(path: Path) -> list[Path]:
    return [path] if path.suffix.lower() == ".json" else [path, path.with_suffix(".json")]
