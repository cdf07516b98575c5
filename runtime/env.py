"""Reads all environment variables of the project; no other file reads any."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from enginewright.errors import UsageError


def cpu_isa() -> str | None:
    """ENGINEWRIGHT_CPU_ISA: the instruction set to use instead of the best one that this machine has."""
    return os.environ.get("ENGINEWRIGHT_CPU_ISA") or None


def num_threads() -> int | None:
    """ENGINEWRIGHT_NUM_THREADS: threads of the CPU executor, instead of one for each core.

    Raises:
        UsageError: the value is not a number from 1 to 1024.
    """
    text = os.environ.get("ENGINEWRIGHT_NUM_THREADS")
    if not text:
        return None
    if not text.isdecimal() or not 0 < int(text) <= 1024:
        raise UsageError(f"ENGINEWRIGHT_NUM_THREADS is {text!r}", "it must be a number from 1 to 1024")
    return int(text)


def compiler_environment() -> dict[str, str]:
    """Environment of a process that compiles: all that it needs, and nothing that changes its output."""
    needed = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TMPDIR")
    found = {name: os.environ[name] for name in needed if name in os.environ}
    return found | {"CUDA_VISIBLE_DEVICES": ""}  # else NVRTC would call cuInit in each process


def worker_environment() -> dict[str, str]:
    """Environment of a Python process with the same module path and time zone as this one."""
    zone = {"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}
    return zone | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONDONTWRITEBYTECODE": "1"}


def gpu_worker_environment() -> dict[str, str]:
    """Environment of a Python process that uses a GPU: that of this one, whose driver and NCCL read many variables."""
    return {**os.environ, **worker_environment()}


def notify_socket() -> str | None:
    """NOTIFY_SOCKET: socket on which systemd hears from a service of Type=notify; @ starts an abstract name."""
    return os.environ.get("NOTIFY_SOCKET") or None


def source_date() -> datetime | None:
    """SOURCE_DATE_EPOCH: seconds since 1970, used as the current time in outputs that must be reproducible.

    Raises:
        UsageError: the value is not a whole number of seconds.
    """
    text = os.environ.get("SOURCE_DATE_EPOCH")
    if not text:
        return None
    if not text.isdecimal() or int(text) >= 1 << 35:
        raise UsageError(f"SOURCE_DATE_EPOCH is {text!r}", "it must be a whole number of seconds since 1970")
    return datetime.fromtimestamp(int(text), UTC)


def aws_credentials() -> tuple[str | None, str | None, str | None]:
    """AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN: the key that signs requests to S3."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    key_id, secret, token = (os.environ.get(name) or None for name in names)
    return key_id, secret, token


def aws_region() -> str:
    """AWS_REGION or AWS_DEFAULT_REGION: region of S3 buckets whose URL names none."""
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


def aws_endpoint() -> str | None:
    """AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL: origin of the S3 server of buckets whose URL names none."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def cache_folder() -> Path:
    """XDG_CACHE_HOME: folder of ours for files that can be made again; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "enginewright"
