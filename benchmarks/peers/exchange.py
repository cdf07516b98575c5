"""Protocol between a worker process and the script that measures it: one JSON line for each request and result.

A worker runs in the environment of the engine that it drives, so this needs Python alone.

    → {"do": "generate", "prompts": [[token id, …], …], "tokens": 64}
    ← {"seconds": …, "cpu_seconds": …, "value": [[token id, …], …]}

Requests are named after what an engine can do; an engine has those of these methods that it can:

    generate(prompts, tokens) → new tokens of each prompt, all requested at once
    open(prompts, room)       read prompts until each has its first new token; at most `room` more will be requested
    step(tokens)              this number of further tokens for each
    close()                   end what is open
    logits(texts, file)       next-token logits at every position, as .npy: float32 [positions of all texts, vocabulary]

A request that an engine cannot answer, with a reason, is answered by {"cannot": reason}; it goes on. Greedy, ends of
text ignored. Before the first answer, the worker says {"about": {…}} once it has loaded. Between requests it waits
for a line and computes nothing; where its engine's threads spin for a while after work, the caller has to wait them
out.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

Prompts = list[list[int]]
Tokens = list[list[int]]


class Cannot(Exception):
    """A request that the engine cannot do; the text is the reason."""


class Seconds(float):
    """Duration that an engine has measured itself; the caller then uses it instead of its own."""


class Stepped(ABC):
    """An engine that is driven by `open` and `step`: `generate` out of these, where all prompts are equally long.

    Both return the tokens of this call, [prompts, tokens of the call].
    """

    @abstractmethod
    def open(self, prompts: Prompts, room: int) -> Tokens: ...

    @abstractmethod
    def step(self, tokens: int) -> Tokens: ...

    @abstractmethod
    def close(self) -> None: ...

    def generate(self, prompts: Prompts, tokens: int) -> Tokens:
        answers = self.open(prompts, tokens)
        if tokens > 1:
            more = self.step(tokens - 1)
            answers = [first + rest for first, rest in zip(answers, more, strict=True)]
        self.close()
        return answers


def private_stdout() -> int:
    """A descriptor of stdout; whatever else the process prints goes to stderr from now on."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


def serve(answers: int, about: dict[str, str], engine: object) -> None:
    """Answers requests until stdin ends.

    Args:
        answers: what private_stdout gave, before the engine was loaded.
        about: versions and settings of the engine.
        engine: has the methods above, or some of them. Only they are timed.
    """
    with open(answers, "w") as out:
        print(json.dumps({"about": about}), file=out, flush=True)
        for line in sys.stdin:
            request: dict[str, Any] = json.loads(line)
            method = getattr(engine, request.pop("do"), None)
            cpu, start = time.process_time(), time.perf_counter()
            try:
                if method is None:
                    raise Cannot("the engine, or our driver of it, has no such function")
                value = method(**request)
            except Cannot as reason:
                print(json.dumps({"cannot": str(reason)}), file=out, flush=True)
                continue
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
            if isinstance(value, Seconds):
                seconds, value = float(value), None
            answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "value": value}
            print(json.dumps(answer), file=out, flush=True)
