"""Some tests of each kernel under compute-sanitizer: addresses outside of memory, and races in shared memory."""

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.kernels import ENGINES, ON_GPU, ROOT, begun, files, outcomes, pytest_command, text_at_end
from benchmarks.gpu.report import Report

TOOLS = ("memcheck", "racecheck")
LIMIT_S = 95
EVERY = 6  # one of this number of tests of a file is run
FOUND = 86  # what the sanitizer ends with, where it found something
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?")


def some(listed: str, every: int = EVERY) -> list[str]:
    """Selects every `every`-th test id of each file from the output of `pytest --collect-only -q`, and its first."""
    by_file: dict[str, list[str]] = {}
    for line in listed.splitlines():
        if "::" in line:
            by_file.setdefault(line.partition("::")[0], []).append(line)
    return [test for tests in by_file.values() for test in tests[::every]]


def command(sanitizer: str, tool: str, xml: Path, tests: list[str]) -> list[str]:
    return [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), *pytest_command(xml, *tests)]


def summary(text: str) -> int | None:
    """Errors or hazards that a tool counted."""
    found = SUMMARY.search(text)
    return int(found[1]) if found else None


def run(report: Report) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        report.skip("sanitizer", "there is no compute-sanitizer here")
        return
    kernels = [str(path) for path in files() if path != ENGINES]  # whose operands have memory of their own
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *kernels]
    listed = subprocess.run(collect, cwd=ROOT, env=ON_GPU, stdout=subprocess.PIPE, text=True, check=True).stdout
    tests = some(listed)
    deadline = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for tool in TOOLS:
            xml, log = Path(folder, f"{tool}.xml"), Path(folder, f"{tool}.log")
            running.append((tool, xml, log, begun(command(sanitizer, tool, xml, tests), log)))
        for tool, xml, log, process in running:
            text = text_at_end(process, log, deadline)
            print(f"== {tool}\n{text[:6000]}\n…\n{text[-3000:]}", flush=True)
            found = outcomes(xml) if xml.exists() else {"error": "it ended before its tests did"}
            counted = summary(text)
            if counted is None or counted or process.returncode == FOUND:
                found["error"] = "it found nothing to count" if counted is None else f"{counted} errors or hazards"
            report.add(f"sanitizer/{tool}", **found, **({"counted": counted} if counted is not None else {}))
