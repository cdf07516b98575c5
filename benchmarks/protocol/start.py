"""Process start to first token: a worker's process, with what it imports and loads, and a prompt of 32 tokens."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from peers.worker import NotMeasured, synthetic_prompts
from protocol.idle_guard import IdleGuard, snapshot
from protocol.rounds import Entry

PROMPT = 32  # tokens


def first_tokens(entries: Sequence[Entry], rounds: int, idle_guard: IdleGuard) -> dict[str, Any]:
    """Seconds of every start, in turn in each round; a round before them brings files into the page cache."""
    prompts = synthetic_prompts(1, PROMPT)
    seconds: dict[str, list[float]] = {entry.engine.name: [] for entry in entries}
    reasons = {entry.engine.name: entry.cannot for entry in entries if entry.cannot is not None}
    elsewhere = []
    idle_guard.wait()
    for number in range(rounds + 1):
        before = snapshot()
        for entry in entries:
            name = entry.engine.name
            if name in reasons or entry.ready is None or entry.log is None:
                continue
            print(f"starting {name}", file=sys.stderr, flush=True)
            start = time.perf_counter()
            try:
                worker = entry.ready.start(entry.log)
                try:
                    worker.run(prompts, 1)
                    if number > 0:
                        seconds[name].append(time.perf_counter() - start)
                finally:
                    worker.close()
            except NotMeasured as reason:
                reasons[name] = str(reason)
        if number > 0:
            elsewhere.append(snapshot().elsewhere(before))
    found: dict[str, Any] = {"cores_taken_by_others": elsewhere, "contestants": []}
    for entry in entries:
        name, engine = entry.engine.name, entry.engine
        row: dict[str, Any] = {"name": name, "peer": engine.peer, "class": engine.kind}
        row |= {"not_measured": reasons[name]} if name in reasons else {"seconds": seconds[name]}
        found["contestants"].append(row)
    return found
