"""Duration and maximum anonymous memory of `engine build`, for each of our builds."""

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.worker import NotMeasured
from protocol.idle_guard import snapshot
from protocol.models import Model

SAMPLE_S = 0.005


@dataclass(frozen=True)
class Built:
    """An engine that `engine build` has made, and what the build took."""

    path: Path
    seconds: float  # of the whole command
    rss_anon_bytes: int  # the most that was seen
    weight_bytes: int  # as stored
    kv_bytes: float  # of one position
    quality: dict[str, Any]  # what the gate has measured, as JSON
    cores_taken_by_others: float  # on average, during the build


def build(model: Model, name: str, options: tuple[str, ...], folder: Path, gate: str = "off") -> Built:
    """`engine build` in a process of its own.

    Raises:
        NotMeasured: it has failed, as where it does not know an option yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{model.name}-{name}.engine"
    command = [sys.executable, "-m", "enginewright.cli", "build", str(model.folder), *options]
    command += ["--output", str(path), "--gate", gate, "--json"]
    before, start = snapshot(), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    max_bytes, ended = [0], threading.Event()
    watch = threading.Thread(target=_watch, args=(process.pid, max_bytes, ended))
    watch.start()
    out, errors = process.communicate()
    seconds = time.perf_counter() - start
    ended.set()
    watch.join()
    if process.returncode != 0:
        said = [line for line in errors.splitlines() if line.strip()][-1:]
        raise NotMeasured(f"engine build {' '.join(options)} ended with {process.returncode}: {' '.join(said)}")
    report = json.loads(out)
    others = snapshot().elsewhere(before)
    sizes = report["weight_bytes"], report["kv_bytes_per_token"]
    return Built(path, seconds, max_bytes[0], *sizes, report["quality"], others)


def _watch(pid: int, max_bytes: list[int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_S):
        try:
            text = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return
        for line in text.splitlines():
            if line.startswith("RssAnon:"):
                max_bytes[0] = max(max_bytes[0], int(line.split()[1]) * 1024)
