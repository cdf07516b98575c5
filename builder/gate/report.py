"""Writes the quality report: an HTML page for people, and JSON for programs."""

from pathlib import Path

import msgspec

from enginewright.builder.gate.config import GateConfig
from enginewright.builder.gate.page import page
from enginewright.errors import UsageError
from enginewright.manifest import About
from enginewright.output_file import write_file
from enginewright.runtime.commands.quality import QualityReport


def check_report_path(path: Path, gate: GateConfig | None) -> list[Path]:
    """Lists the files of a report.

    Args:
        path: an .html or .json file.
        gate: options of the gate.

    Raises:
        UsageError: there is nothing to report, or the path has another suffix.
    """
    if gate is None:
        raise UsageError("--report has nothing to write", "--gate off measures nothing")
    if path.suffix.lower() not in (".html", ".json"):
        raise UsageError(f"--report {path} has an unknown format", "it may end in .html or .json")
    return _files(path)


def write_report(report: QualityReport, about: About, path: Path) -> None:
    """Writes a report; an .html file gets a .json file next to it. Each is complete or not there.

    Args:
        report: the quality report.
        about: facts about the engine.
        path: an .html or .json file.

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
