"""The process of a command and the shell that started it: closed standard streams, Ctrl-C and SIGTERM."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes by the convention of shells


def open_standard_streams() -> None:
    """Opens the standard streams that the shell has closed (`>&-`), so that no other file gets their descriptors.

    A closed stdout becomes a pipe without a reader, so that writing to it fails as it does in `| head`.
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
    """Makes SIGTERM raise SystemExit, so that temporary files are removed as they are on Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)  # a second signal ends the process at once
    sys.exit(TERMINATED)
