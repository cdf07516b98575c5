"""An answer on the terminal, as it is written."""

import shlex
import sys
import time
from pathlib import Path

from enginewright.errors import EngineError
from enginewright.runtime.llm import LLM
from enginewright.runtime.prompts import Prompt
from enginewright.runtime.sampling import SamplingParams


def print_stream(llm: LLM, question: Prompt, params: SamplingParams, path: Path) -> None:
    """Text on stdout as it comes; how fast, and what to try next, on stderr."""
    start = time.perf_counter()
    first = last = start
    count = 0
    reason = None
    for delta in llm.stream(question, params):
        last = time.perf_counter()
        first = last if count == 0 else first
        count += 1
        reason = delta.finish_reason
        print(delta.text, end="", flush=True)
    print()
    if reason == "error":
        raise EngineError("the model's logits are not numbers", fix="Check the engine with `engine verify`.")
    pace = f", then {(count - 1) / (last - first):.0f} tokens/s" if count > 1 else ""
    print(f"[{count} tokens; the first after {first - start:.2f} s{pace}; ended by {reason}]", file=sys.stderr)
    name = shlex.quote(str(path))
    print(f'[next: engine inspect {name}, or engine generate {name} --chat "…" --temperature 0.8]', file=sys.stderr)
