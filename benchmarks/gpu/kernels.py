"""The tests of CUDA kernels and their engines on the GPU; elsewhere the same files run in emulation."""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.gpu.report import Report

ROOT = Path(__file__).resolve().parents[2]
ENGINES = ROOT / "tests/cuda/test_engine.py"
LIMIT_S = 135  # of all files: a kernel that never ends shall not hide what the others say
ON_GPU = {**os.environ, "ENGINEWRIGHT_TEST_DEVICE": "cuda"}


def files() -> list[Path]:
    return [*sorted((ROOT / "tests/cuda/kernels").glob("test_*.py")), ENGINES]


def pytest_command(xml: Path, *tests: str) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-n", "0", f"--junitxml={xml}"]
    return [sys.executable, "-m", "pytest", *options, *tests]


def begun(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as said:
        return subprocess.Popen(command, cwd=ROOT, env=ON_GPU, stdout=said, stderr=subprocess.STDOUT)


def text_at_end(process: subprocess.Popen[bytes], log: Path, deadline: float) -> str:
    """Output of a process when it has ended by itself or at the deadline, in seconds of time.monotonic()."""
    try:
        process.wait(max(deadline - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return log.read_text(errors="replace")


def outcomes(xml: Path) -> dict[str, object]:
    """The number of tests of a run, and the names of those that did not pass, with their first line."""
    tests = list(ElementTree.parse(xml).getroot().iter("testcase"))
    wrong = []
    for test in tests:
        for problem in (*test.findall("failure"), *test.findall("error")):
            lines = problem.get("message", "").splitlines()
            wrong.append(f"{test.get('name')}: {lines[0][:200] if lines else 'no message'}")
    found: dict[str, object] = {"tests": len(tests), "failed": len(wrong)}
    if wrong or not tests:
        found["error"] = wrong[0] if wrong else "no test ran"
        found["failures"] = wrong[:20]
    return found


def run(report: Report) -> None:
    """All files at once: most of the time goes into compiling, which each of them does at its start."""
    deadline = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for path in files():
            xml, log = Path(folder, f"{path.stem}.xml"), Path(folder, f"{path.stem}.log")
            running.append((path, xml, log, begun(pytest_command(xml, str(path)), log)))
        for path, xml, log, process in running:
            text = text_at_end(process, log, deadline)
            print(f"== {path.name}\n{text}", flush=True)
            said = text.strip().splitlines()[-1:] or ["it said nothing"]
            found = outcomes(xml) if xml.exists() else {"error": f"pytest ended with {process.returncode}: {said[0]}"}
            report.add(f"kernels/{path.stem.removeprefix('test_')}", **found)
