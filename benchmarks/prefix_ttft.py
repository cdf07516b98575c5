"""Time to the first token of a prompt whose prefix is in the prefix cache, compared with a new prompt.

    python benchmarks/prefix_ttft.py ENGINE [--tokens 1000] [--rounds 5] [--kv-cache-disk 4g --kv-cache-dir DIR]

Three cases, in turn in each round, on the engine as a library (LLM):

    cold      a prompt that begins with new random tokens, and ends with a question of some more
    memory    the same prefix with another question
    disk      the same prefix with a third question, after the engine was closed and opened again; only with
              --kv-cache-disk

Measured is the time from the request to the first token, which is the only one. Prints the median of each case, and
of its ratios to `cold` of the same round, with their range.
"""

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from enginewright import LLM, SamplingParams
from enginewright.runtime.device.machine import num_cores

QUESTION = 8  # tokens after the prefix
ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def tokens(llm: LLM, count: int) -> list[int]:
    """Random ones, others in every run: a folder may keep the prompts of an earlier run."""
    return [random.randrange(llm.engine.plan.vocab_size) for _ in range(count)]


def first_token_s(llm: LLM, prefix: list[int], *, is_cached: bool) -> float:
    """Seconds until the first token after a prefix and a new question."""
    prompt = prefix + tokens(llm, QUESTION)
    start = time.perf_counter()
    (output,) = llm.generate([prompt], ONE)
    seconds = time.perf_counter() - start
    if (output.num_cached_tokens > 0) != is_cached:
        raise SystemExit(f"{output.num_cached_tokens} tokens of {len(prompt)} were in the prefix cache")
    return seconds


def opened(arguments: argparse.Namespace) -> LLM:
    """The engine, after a prompt of which nothing is measured: the first steps read the weights from the file."""
    options: dict[str, Any] = {"threads": arguments.threads}
    if arguments.kv_cache_disk is not None:
        options |= {"kv_cache_disk": arguments.kv_cache_disk, "kv_cache_dir": str(arguments.kv_cache_dir)}
    llm = LLM(arguments.engine, **options)
    first_token_s(llm, tokens(llm, arguments.tokens), is_cached=False)
    return llm


def measure(arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each case by round."""
    llm = opened(arguments)
    times: dict[str, list[float]] = {"cold": [], "memory": []}
    for _ in range(arguments.rounds):
        prefix = tokens(llm, arguments.tokens)
        for case in ("cold", "memory"):
            times[case].append(first_token_s(llm, prefix, is_cached=case != "cold"))
        if arguments.kv_cache_disk is not None:
            llm.close()
            llm = opened(arguments)
            times.setdefault("disk", []).append(first_token_s(llm, prefix, is_cached=True))
    llm.close()
    return times


def report(times: dict[str, list[float]]) -> None:
    for case, seconds in times.items():
        line = f"{case:<7} first token after {statistics.median(seconds) * 1e3:8.1f} ms"
        if case != "cold":
            ratios = [cold / one for cold, one in zip(times["cold"], seconds, strict=True)]
            spread = f"(of rounds: {min(ratios):.1f} to {max(ratios):.1f})"
            line += f"; {statistics.median(ratios):.1f} × earlier than cold {spread}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tokens", type=int, default=1000, help="of the prefix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--kv-cache-disk", help="as engine run has it: how much may be kept on disk")
    parser.add_argument("--kv-cache-dir", type=Path, help="where")
    arguments = parser.parse_args()
    if (arguments.kv_cache_disk is None) != (arguments.kv_cache_dir is None):
        parser.error("--kv-cache-disk and --kv-cache-dir go together")
    print(f"{arguments.engine.name}, a prefix of {arguments.tokens} tokens, {arguments.threads} threads")
    report(measure(arguments))


if __name__ == "__main__":
    main()
