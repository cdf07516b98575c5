"""A process that compiles kernels: a job is a line of JSON on stdin, its result a line on stdout.

`workers.py` starts it, as `python -m enginewright.builder.cuda.worker`.
"""

import os
import signal
import sys

import msgspec

from enginewright.builder.cuda.kernel import Compiled, Failed, Job
from enginewright.builder.cuda.nvrtc import compile_cpp
from enginewright.builder.cuda.triton_kernel import compile_triton
from enginewright.triton_instance import TritonInstance

_JOB = msgspec.json.Decoder(Job)


def _compile(job: Job) -> Compiled | Failed:
    if isinstance(job.instance, TritonInstance):
        return compile_triton(job.instance, job.sm)
    return compile_cpp(job.instance.source, job.instance.expression, job.sm, job.texts)


def main() -> None:
    """Compiles jobs until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process is interrupted, too, and ends this one
    results = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # compilers print to stdout
    for line in sys.stdin.buffer:
        results.write(msgspec.json.encode(_compile(_JOB.decode(line))) + b"\n")


if __name__ == "__main__":
    main()
