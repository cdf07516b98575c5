"""Speedup by speculation: the same requests with and without it, round by round, and a comparison of the answers.

    python benchmarks/speculation.py ENGINE [--speculate ngram] [--tasks code edit prose random] [--temperatures 0 0.7]
                                     [--batch 1 32] [--tokens 96] [--rounds 5]

Tasks: `code` completes functions, `edit` repeats a text with a change, `prose` goes on with a story
(protocol/tasks.py), and `random` continues random tokens: at temperature 1 hardly any draft token is accepted. Rounds
are interleaved; ratios are medians over them, with their range. `--rounds 0` prints only lengths. These depend on time
only through the number of draft tokens, which the engine chooses by their cost. The acceptance rate of each draft
position tells what a fixed number would give.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from protocol.tasks import TASKS

from enginewright import LLM, SamplingParams
from enginewright.runtime.engine import Engine
from enginewright.runtime.speculation.stats import SpeculationStats

RANDOM = "random"
PROMPT, PROMPTS = 64, 4  # tokens of a random prompt, and how many there are

Requests = tuple[list[list[int]], list[SamplingParams]]


def requests_of(task: str, llm: LLM, count: int, tokens: int, temperature: float) -> Requests:
    """So many at least, and each prompt of the task once at least."""
    if task == RANDOM:
        vocab_size = llm.engine.plan.vocab_size
        prompts = np.random.default_rng(0).integers(vocab_size // 10, vocab_size, (PROMPTS, PROMPT)).tolist()
    else:
        prompts = [llm.encode(prompt) for prompt in TASKS[task]]
    prompts = list(islice(cycle(prompts), max(count, len(prompts))))
    params = [SamplingParams(temperature=temperature, seed=row, max_tokens=tokens) for row in range(len(prompts))]
    return prompts, params


def answers_to(llm: LLM, requests: Requests, batch: int, salt: str) -> list[Sequence[int]]:
    """So many at a time."""
    prompts, params = requests
    answers: list[Sequence[int]] = []
    for begin in range(0, len(prompts), batch):
        part = slice(begin, begin + batch)
        outputs = llm.generate(prompts[part], params[part], cache_salt=salt)
        answers += [output.outputs[0].token_ids for output in outputs]
    return answers


def stats_of(llm: LLM) -> SpeculationStats:
    stats = llm.stats().speculation
    assert stats is not None
    return stats


def lengths(before: SpeculationStats, after: SpeculationStats, num_tokens: int) -> str:
    """Describes how many draft tokens were accepted for `num_tokens` tokens of answers."""
    drafted = np.subtract(after.drafted, before.drafted)
    accepted = np.subtract(after.accepted, before.accepted)
    drafts = after.num_drafts - before.num_drafts
    rates = " ".join(f"{right / all_:.2f}" for right, all_ in zip(accepted, drafted, strict=True) if all_)
    return (
        f"{1 + accepted.sum() / max(drafts, 1):.2f} tokens by a step with draft tokens, of which there were {drafts}, "
        f"{num_tokens / (num_tokens - accepted.sum()):.2f} by any; accepted by position: {rates or 'no draft token'}"
    )


def speeds(seconds: dict[LLM, list[float]], off: LLM, on: LLM, num_tokens: int) -> str:
    ratios = [one / other for one, other in zip(seconds[off], seconds[on], strict=True)]
    return (
        f"; {statistics.median(ratios):.2f} × as fast ({min(ratios):.2f}–{max(ratios):.2f}), "
        f"{num_tokens / statistics.median(seconds[on]):.1f} tokens/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--speculate-tokens", type=int, default=8)
    parser.add_argument("--tasks", nargs="+", choices=[*TASKS, RANDOM], default=[*TASKS, RANDOM])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.7])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    limits = {"max_num_seqs": max(options.batch), "max_model_len": 1024, "kv_cache_memory": "1g"}
    drafting = {"speculate": options.speculate, "speculate_tokens": options.speculate_tokens}
    with (
        Engine.open(options.engine) as engine,
        LLM(engine, **limits, speculate="off") as off,
        LLM(engine, **limits, **drafting) as on,
    ):
        for batch in options.batch:
            for task in options.tasks:
                for temperature in options.temperatures:
                    requests = requests_of(task, off, batch, options.tokens, temperature)
                    seconds: dict[LLM, list[float]] = {off: [], on: []}
                    before = stats_of(on)
                    for number in range(1 + options.rounds):
                        answers = {}
                        for llm in (off, on) if number % 2 else (on, off):
                            began = time.perf_counter()
                            answers[llm] = answers_to(llm, requests, batch, str(number))
                            if number:  # the first one warms up
                                seconds[llm].append(time.perf_counter() - began)
                        assert answers[off] == answers[on], "speculation has changed an answer"
                    num_tokens = sum(map(len, answers[on]))
                    found = lengths(before, stats_of(on), (1 + options.rounds) * num_tokens)
                    speed = speeds(seconds, off, on, num_tokens) if options.rounds else ""
                    print(
                        f"{task}, temperature {temperature:g}, batch {batch}: {found}{speed}; same answers", flush=True
                    )


if __name__ == "__main__":
    main()
