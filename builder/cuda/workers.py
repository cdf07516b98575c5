"""Runs processes that compile kernels. NVRTC has one lock for a process, so threads would not help."""

import subprocess
import sys
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType

import msgspec

from enginewright.builder.cuda.kernel import Compiled, Failed, Job
from enginewright.errors import EngineError
from enginewright.runtime import env

_RESULT = msgspec.json.Decoder(Compiled | Failed)


def compile_all(jobs: Sequence[Job], processes: int) -> Generator[Compiled | Failed]:
    """Yields the results of jobs, in their order. Closing the generator early leaves out the rest.

    Args:
        jobs: kernels to compile.
        processes: maximum of processes.

    Raises:
        EngineError: a process has died.
    """
    if not jobs:
        return
    with ExitStack() as stack:
        idle = SimpleQueue[_Worker]()
        for _ in range(min(processes, len(jobs))):
            idle.put(stack.enter_context(_Worker()))

        def compile_one(job: Job) -> Compiled | Failed:
            worker = idle.get()
            try:
                return worker.compile(job)
            finally:
                idle.put(worker)

        pool = stack.enter_context(ThreadPoolExecutor(min(processes, len(jobs))))
        stack.callback(pool.shutdown, cancel_futures=True)
        yield from pool.map(compile_one, jobs)


class _Worker:
    """One process; use it in `with`, and from one thread at a time."""

    def __enter__(self) -> "_Worker":
        # -P: no imports from the working directory
        command = [sys.executable, "-P", "-m", "enginewright.builder.cuda.worker"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env.compiler_environment())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def compile(self, job: Job) -> Compiled | Failed:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            why = f"its process ended with {self._process.wait()}, at {job.instance} for {job.sm}"
            raise EngineError("the compiler of GPU kernels has died", why)
        result: Compiled | Failed = _RESULT.decode(line)
        return result
