"""What speculation brings: the same requests with and without it, round by round, and whether the answers are the same.

    python benchmarks/speculation.py ENGINE [--speculate ngram] [--batch 1 32] [--tokens 96] [--rounds 5]

Tasks: `copy` goes on with code that stands in the prompt three times; `text` continues random tokens at temperature 1,
where next to nothing can be guessed. Rounds are interleaved; ratios are medians over them.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from enginewright import LLM, SamplingParams
from enginewright.runtime.engine import Engine

CODE = "".join(
    f"def area_of_{name}(width, height):\n    return width * height + {len(name)}\n\n"
    for name in ("box", "room", "field")
)
PROMPT = 64  # tokens of a random one


def task(name: str, llm: LLM, batch: int, tokens: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts and parameters of as many requests."""
    if name == "copy":
        return [llm.encode(3 * CODE)] * batch, [
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        ] * batch
    vocab_size = llm.engine.plan.vocab_size
    prompts = np.random.default_rng(0).integers(vocab_size // 10, vocab_size, (batch, PROMPT)).tolist()
    return prompts, [SamplingParams(seed=row, max_tokens=tokens, ignore_eos=True) for row in range(batch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--speculate-tokens", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    limits = {"max_num_seqs": max(options.batch), "max_model_len": 1024, "kv_cache_memory": "1g"}
    guessing = {"speculate": options.speculate, "speculate_tokens": options.speculate_tokens}
    with (
        Engine.open(options.engine) as engine,
        LLM(engine, **limits, speculate="off") as off,
        LLM(engine, **limits, **guessing) as on,
    ):
        for batch in options.batch:
            for name in "copy", "text":
                prompts, params = task(name, off, batch, options.tokens)
                seconds: dict[LLM, list[float]] = {off: [], on: []}
                before = on.stats().speculation
                for number in range(1 + options.rounds):
                    answers = []
                    for llm in (off, on) if number % 2 else (on, off):
                        began = time.perf_counter()
                        outputs = llm.generate(prompts, params, cache_salt=str(number))
                        if number:  # the first one warms up
                            seconds[llm].append(time.perf_counter() - began)
                        answers.append([output.outputs[0].token_ids for output in outputs])
                    assert answers[0] == answers[1], "speculation has changed an answer"
                after = on.stats().speculation
                assert before is not None and after is not None
                drafts, accepted = (
                    after.num_drafts - before.num_drafts,
                    sum(after.accepted) - sum(before.accepted),
                )
                ratio = statistics.median(one / other for one, other in zip(seconds[off], seconds[on], strict=True))
                pace = batch * options.tokens / statistics.median(seconds[on])
                print(
                    f"{name}, batch {batch}: {ratio:.2f} × as fast, {pace:.1f} tokens/s; guesses {drafts} times, "
                    f"{accepted} right, {1 + accepted / max(drafts, 1):.2f} tokens by such a step; same answers"
                )


if __name__ == "__main__":
    main()
