"""Runs work that may have to be stopped, since untrusted input decides how long it takes, in a process."""

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

# Signals by which the work itself ends a process: its timers, and the limits of its stack and memory. Any other signal
# comes from outside, and is no fault of the work.
_ENDED_BY: dict[int, str] = {
    signal.SIGPROF: f"it takes more than {MAX_CPU_SECONDS:g} s of CPU time",
    signal.SIGALRM: f"it takes more than {MAX_SECONDS:g} s",
    signal.SIGSEGV: "it is nested too deeply",
    signal.SIGABRT: f"it takes more than {MAX_MEMORY_BYTES >> 20} MiB of memory, or is nested too deeply",
}


class WorkerProcess:
    """A process that answers frames of JSON (worker_protocol.py), and is restarted if it had to be stopped.

    If the process is killed from outside, the frame is sent a second time, to another process. It may be used from any
    thread, and answers one frame at a time.

    Args:
        module: the module to run, whose main calls `serve`.
        first: frames that each process gets first. A reply to one that is not empty becomes the reply to the request.
    """

    def __init__(self, module: str, *first: Any) -> None:
        self._module = module
        self._first = [to_frame(one) for one in first]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, str]:
        """Starts the process before it is needed.

        Returns:
            The reply to the first frames, empty without an error.

        Raises:
            WorkerLostError: two processes were killed from outside.
        """
        with self._lock:
            return self._twice(lambda: self._start()[1])

    def ask(self, data: bytes) -> dict[str, str]:
        """Sends a frame, and waits for the reply.

        Args:
            data: the frame's JSON.

        Returns:
            The reply; {"too_long": reason} if the work has ended the process.

        Raises:
            WorkerLostError: two processes were killed from outside.
        """
        frame = framed(data)
        with self._lock:
            return self._twice(lambda: self._ask(frame))

    def close(self) -> None:
        """Ends the process."""
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
            # Without site, which may take longer than the rest of the start; worker_environment has the path.
            [sys.executable, "-S", "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=worker_environment(),
            process_group=0,  # so that Ctrl-C in a terminal reaches only the parent
        )
        finalize(self, _end, process)
        for frame in self._first:
            if reply := _ask(process, frame):
                return process, reply
        return process, {}


def _ask(process: subprocess.Popen[bytes], frame: bytes) -> dict[str, str]:
    """Sends a frame.

    Returns:
        The reply, or the reason why the work has ended the process.

    Raises:
        WorkerLostError: the process was killed from outside.
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
    """Ends the process, if it still runs, and closes its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # unread data are no longer needed
            continue
