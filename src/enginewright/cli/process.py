"""The process of a command and the shell that started it: closed standard streams, Ctrl-C and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes, as shells give them


def open_standard_streams() -> None:
    """Open those that the shell has closed (`>&-`), so that no other file gets their descriptors.

    Nobody reads a closed stdout: it becomes a pipe without a reader, and what is written there fails as in `| head`.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        if name == "stdout":
            reader, fd = os.pipe()
            os.close(reader)
        else:
            fd = os.open(os.devnull, os.O_RDWR)
        if not _is_open(number):
            os.dup2(fd, number)
            os.close(fd)
            fd = number
        setattr(sys, name, os.fdopen(fd, "w" if number else "r", closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@contextmanager
def sigterm_ends_the_command() -> Iterator[None]:
    """Let SIGTERM end the command by SystemExit, so that temporary files go as they do on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal does not wait
    sys.exit(TERMINATED)
