"""The parts of the benchmark: each runs in a process of its own with a time limit, and its findings are kept."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Figure, read_report

ROOT = Path(__file__).resolve().parents[2]
DONE, FAILED, STOPPED, NOT_RUN = "done", "failed", "stopped at its limit", "not run"


@dataclass(frozen=True)
class Part:
    """A part of the benchmark."""

    name: str
    limit_s: int  # maximum seconds
    what: str  # title on the page
    by_name: bool = False  # it runs only if the command names it

    @property
    def module(self) -> str:
        return f"benchmarks.gpu.{self.name}"


PARTS = (  # the most important ones first
    Part("roofline", 60, "What the memory and the tensor cores give"),
    Part("kernels", 150, "Each kernel against its reference"),
    Part("engines", 120, "Engines of tiny models: all families, all methods"),
    Part("models", 150, "A model of the 1B shape"),
    Part("gemm", 120, "Matrix products of an 8B model's shapes"),
    Part("attention", 90, "Paged attention"),
    Part("large", 200, "A model of the 8B shape in FP8"),
    Part("sanitizer", 120, "Kernels under compute-sanitizer"),
    Part("tiles", 540, "Other tiles of matrix products", by_name=True),
)


@dataclass(frozen=True)
class Result:
    """status: DONE, or what else came of it. why: the end of what it said, where it is not DONE."""

    status: str
    seconds: float
    figures: list[Figure]
    date: str
    why: str = ""


def run_part(module: str, limit_s: float, site: Path | None, settings: Mapping[str, Any], log: Path) -> Result:
    """log: gets all that it says."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, log.open("a") as said:
        results = Path(folder, "results.jsonl")
        said.write(f"==== {module}\n")
        said.flush()
        begin = said.tell()
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.worker", module, str(results), json.dumps(settings)],
            cwd=ROOT,
            env=environment(site),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = FAILED if process.wait(limit_s) else DONE
        except subprocess.TimeoutExpired:
            status = STOPPED
        finally:
            _end_all(process)
        with log.open() as text:
            text.seek(begin)
            last = [line.strip() for line in text.read().splitlines() if line.strip()][-1:]
        why = "" if status == DONE else (last[0][:300] if last else "it said nothing")
        today = time.strftime("%Y-%m-%d", time.gmtime())
        return Result(status, round(time.monotonic() - start, 1), read_report(results), today, why)


def environment(site: Path | None = None) -> dict[str, str]:
    """For processes of this checkout. site: a folder of packages that this Python lacks."""
    paths = [ROOT, ROOT / "src", ROOT / "benchmarks", *([site.resolve()] if site else [])]
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths_of_all = list(dict.fromkeys([*map(str, paths), *given]))
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(paths_of_all), "PYTHONUNBUFFERED": "1"}
    libraries = sorted(map(str, site.resolve().glob("nvidia/*/lib"))) if site else []
    if libraries:  # cuda-bindings looks for NVRTC where Python has its packages, and then where the system does
        others = filter(None, [os.environ.get("LD_LIBRARY_PATH")])
        made["LD_LIBRARY_PATH"] = os.pathsep.join([*libraries, *others])
    return made


def _end_all(process: subprocess.Popen[bytes]) -> None:
    """And the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
