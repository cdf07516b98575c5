"""Outputs that are no regular files, and the command as a process of its own."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

NULL, FULL = 3, 7  # minor numbers of /dev/null and /dev/full


def make_device(path: Path, minor: int) -> None:
    """A device as one of /dev, which a test may lose: those of the machine are never named as an output."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        os.close(os.open(path, os.O_WRONLY))
    except PermissionError:
        pytest.skip("this user, or this file system, has no devices of its own")


@contextmanager
def read_end(path: Path, kind: str) -> Iterator[tuple[Path, Callable[[], bytes]]]:
    """A FIFO at `path`, or a pipe under /dev/fd, and a thread that reads it.

    Returns:
        The path to write to, and a function that gives what was written once `with` has ended.
    """
    with ThreadPoolExecutor(1) as thread:
        if kind == "fifo":
            os.mkfifo(path)
            read = thread.submit(path.read_bytes)
            yield path, read.result
        else:
            reader, writer = os.pipe()
            read = thread.submit(lambda: os.fdopen(reader, "rb").read())
            try:
                yield Path(f"/dev/fd/{writer}"), read.result
            finally:
                os.close(writer)


def start_engine(*arguments: object) -> subprocess.Popen[str]:
    """Starts the command `engine` with these arguments."""
    command = [sys.executable, "-m", "enginewright.cli", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
