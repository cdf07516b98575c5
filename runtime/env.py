"""Environment variables: all of them are read here."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from enginewright.errors import UsageError


def cpu_isa() -> str | None:
    """ENGINEWRIGHT_CPU_ISA: the instruction set to use, instead of the best one this machine has."""
    return os.environ.get("ENGINEWRIGHT_CPU_ISA") or None


def num_threads() -> int | None:
    """ENGINEWRIGHT_NUM_THREADS: threads of the CPU executor, instead of one a core."""
    text = os.environ.get("ENGINEWRIGHT_NUM_THREADS")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise UsageError(f"ENGINEWRIGHT_NUM_THREADS is {text!r}", "it must be a number from 1 to 1024")
    return int(text)


def compiler_environment() -> dict[str, str]:
    """For processes that compile: what they need to run, and nothing that changes what they make."""
    needed = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR")
    found = {name: os.environ[name] for name in needed if name in os.environ}
    return found | {"CUDA_VISIBLE_DEVICES": ""}  # NVRTC calls cuInit where there is a driver, in each process


def worker_environment() -> dict[str, str]:
    """For a Python process that needs the modules of this one, and the zone of its clock."""
    zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
    return zone | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1"}


def notify_socket() -> str | None:
    """NOTIFY_SOCKET: where systemd listens for what a service of Type=notify says; @ begins an abstract name."""
    return os.environ.get("NOTIFY_SOCKET") or None


def source_date() -> datetime | None:
    """SOURCE_DATE_EPOCH: seconds since 1970 that stand for now in what has to be the same every time it is made."""
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isdecimal() or int(text) >= 1 << 35:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text!r}", "it must be a whole number of seconds since 1970")
    return datetime.fromtimestamp(int(text), UTC)


def cache_folder() -> Path:
    """XDG_CACHE_HOME: where what can be made again is kept, in a folder of ours; may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "enginewright"
