"""What a worker process says to the script that measures it: one JSON line a request, on stdin and stdout.

A worker runs in the environment of the engine that it drives, so this needs Python alone.

    → {"prompts": [[token id, …], …], "tokens": 64}
    ← {"seconds": …, "cpu_seconds": …, "tokens": [[token id, …], …]}

Before the first, the worker says {"about": {…}} once it has loaded. Between requests it waits for a line and computes
nothing; where its engine's threads spin for a while after work, the caller has to wait them out.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Prompts = list[list[int]]
Tokens = list[list[int]]


def private_stdout() -> int:
    """A descriptor of stdout; whatever else the process prints goes to stderr from now on."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(answers: int, about: dict[str, str], run: Callable[[Prompts, int], Tokens]) -> None:
    """Answers requests until stdin ends.

    Args:
        answers: what private_stdout gave, before the engine was loaded.
        about: versions and settings of the engine.
        run: prompts, number of new tokens → new tokens of each prompt. Only this is timed.
    """
    with open(answers, "w") as out:
        print(json.dumps({"about": about}), file=out, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            cpu, start = time.process_time(), time.perf_counter()
            tokens = run(request["prompts"], request["tokens"])
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
            answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}
            print(json.dumps(answer), file=out, flush=True)
