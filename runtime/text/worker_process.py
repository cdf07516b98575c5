"""A process for work that may have to be stopped: what others have written decides how long it takes."""

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any
from weakref import finalize

from enginewright.errors import WorkerLostError
from enginewright.runtime.env import worker_environment
from enginewright.runtime.text.worker_protocol import (
    MAX_CPU_SECONDS,
    MAX_MEMORY_BYTES,
    MAX_SECONDS,
    framed,
    read_frames,
    to_frame,
)

logger = logging.getLogger(__name__)

# By what the work itself ends a process: its own timers, and the limits of its stack and memory. Any other signal comes
# from outside, and says nothing about the work.
_ENDED_BY: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {MAX_CPU_SECONDS:g} s of CPU time",
    signal.SIGALRM: f"it takes more than {MAX_SECONDS:g} s",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGABRT: f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory, or is nested too deeply",
}


class WorkerProcess:
    """A process that answers frames of JSON (worker_protocol.py), started again where it had to be stopped.

    A frame under which something outside ends the process is asked a second time, of another process.

    May be used from any thread; one frame is answered at a time.

    Args:
        module: that is run, whose main calls `serve`.
        first: what each process gets before anything else. If its reply is not empty, it is that to what was asked.
    """

    def __init__(self, module: str, *first: Any) -> None:
        self._module = module
        self._first = [to_frame(one) for one in first]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, str]:
        """Start it before it is needed; what it says of the first frames, if anything.

        Raises:
            WorkerLostError: two processes were ended from outside.
        """
        with self._lock:
            return self._twice(lambda: self._start()[1])

    def ask(self, data: bytes) -> dict[str, str]:
        """The reply to a frame.

        Args:
            data: its JSON.

        Returns:
            {"too_long": why} where the work has ended the process.

        Raises:
            WorkerLostError: two processes were ended from outside.
        """
        frame = framed(data)
        with self._lock:
            return self._twice(lambda: self._ask(frame))

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                _end(self._process)

    def _twice(self, work: Callable[[], dict[str, str]]) -> dict[str, str]:
        try:
            return work()
        except WorkerLostError as error:
            logger.warning("%s, and is started again", error)
            return work()

    def _ask(self, frame: bytes) -> dict[str, str]:
        process = self._process
        if process is None or process.poll() is not None:
            process, reply = self._start()
            if reply:
                return reply
        return _ask(process, frame)

    def _start(self) -> tuple[subprocess.Popen[bytes], dict[str, str]]:
        self._process = process = subprocess.Popen(
            # Without site, which may take longer than all the rest; worker_environment has the path.
            [sys.executable, "-S", "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            process_group=0,  # Ctrl-C in a terminal is for its parent
        )
        finalize(self, _end, process)
        for frame in self._first:
            if reply := _ask(process, frame):
                return process, reply
        return process, {}


def _ask(process: subprocess.Popen[bytes], frame: bytes) -> dict[str, str]:
    """The reply to a frame, or why the work has ended the process instead.

    Raises:
        WorkerLostError: the process was ended from outside.
    """
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(frame)
        process.stdin.flush()
        reply: dict[str, str] | None = next(read_frames(process.stdout), None)
    except BrokenPipeError:
        reply = None
    if reply is not None:
        return reply
    _end(process)
    status = process.returncode
    if status < 0 and -status not in _ENDED_BY:
        raise WorkerLostError(f"the process {process.pid} was ended by signal {-status}")
    return {"too_long": _ENDED_BY.get(-status) or f"its process has ended with status {status}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it has not ended, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # what it did not read is of no use any more
            continue
