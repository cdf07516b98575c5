"""Acceptance of draft tokens with the sampler's Gumbel noise, and with one random number for each position.

    python benchmarks/coupling.py ENGINE [--role draft] [--tasks code prose] [--tokens 96]

A draft token is accepted if the same noise gives the same token with both models' probabilities. How often that happens
depends on how noise becomes a token:

    interval  one uniform number a position, and the token at which the running sum of probabilities, in the order of
              ids, exceeds it
    Gumbel    a number for each token of a position, and the token of the largest log p + Gumbel noise
              (https://arxiv.org/abs/2408.07978): the sampler's method (csrc/cpu/noise.h)
    bound     1 − the total variation distance of both models' probabilities: no method of sampling accepts more

The model writes texts, and both models' logits are computed at each of their positions. Chances are integrals over all
noise, so they are exact and nothing is sampled. Accepted tokens of k draft tokens in a row are means over all positions
of a text where they may begin.
"""

import argparse
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from protocol.tasks import TASKS

from enginewright import LLM, SamplingParams
from enginewright.runtime.commands.score import score
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.devices import Executor, open_executor
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.request import SamplingRequest
from enginewright.runtime.sampling.sampler import Sampler
from enginewright.runtime.speculation.runner import LEVELS

Floats = NDArray[np.float64]

LONGEST_CHAIN = 8
FILTERS = [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.95}, {"top_p": 0.95}]
ROWS = 128  # of logits in a step


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> Floats:
    """Probability of each token after temperature and top-p, [vocab_size]."""
    weights: Floats = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    if params.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= params.top_p * weights.sum()]] = 0
    return weights / weights.sum()


def by_interval(p: Floats, q: Floats) -> Floats:
    """Probability of each token to be sampled from both models: the overlap of its two intervals."""
    p_end, q_end = np.cumsum(p), np.cumsum(q)
    return np.maximum(np.minimum(p_end, q_end) - np.maximum(p_end - p, q_end - q), 0)


def by_gumbel(p: Floats, q: Floats) -> Floats:
    """Probability of each token to be sampled from both models with Gumbel noise: 1 / Σ_y max(p_y / p_x, q_y / q_x).

    Equally, the smallest E / p wins where E are exponential: x wins both if each E_y is above E_x times that maximum.
    In the order of p / q, tokens up to x count by p, and those after it by q.
    """
    result = np.zeros_like(p)
    ids = np.flatnonzero((p > 0) & (q > 0))
    ids = ids[np.argsort(-p[ids] / q[ids])]
    up_to = p[q == 0].sum() + np.cumsum(p[ids])
    after = q[p == 0].sum() + np.append(np.cumsum(q[ids][:0:-1])[::-1], 0)
    result[ids] = 1 / (up_to / p[ids] + after / q[ids])
    return result


def at_bound(p: Floats, q: Floats) -> Floats:
    return np.minimum(p, q)


WAYS: dict[str, Callable[[Floats, Floats], Floats]] = {"interval": by_interval, "Gumbel": by_gumbel, "bound": at_bound}


@dataclass(frozen=True)
class Chances:
    """Probabilities of acceptance at each position of one text."""

    right: Floats  # probability that a draft token is accepted
    right_here: Floats  # the same, given that the model samples the token of the text

    def chains(self) -> Floats:
        """Accepted tokens of 1, 2, … draft tokens, [positions where they may begin, LONGEST_CHAIN]."""
        lengths = []
        for begin in range(len(self.right) - LONGEST_CHAIN + 1):
            # Draft tokens before the last one were accepted, so it follows what stands in the text.
            before = np.cumprod(np.append(1, self.right_here[begin : begin + LONGEST_CHAIN - 1]))
            lengths.append(np.cumsum(before * self.right[begin : begin + LONGEST_CHAIN]))
        return np.reshape(lengths, (-1, LONGEST_CHAIN))


def chances(
    model: NDArray[np.float32], draft: NDArray[np.float32], answer: Sequence[int], params: SamplingParams
) -> dict[str, Chances]:
    """By ways of drawing. model, draft: logits before each token of the answer."""
    rows: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for logits, drafted, token in zip(model, draft, answer, strict=True):
        p, q = probabilities(logits, params), probabilities(drafted, params)
        for way, both in WAYS.items():
            tokens = both(p, q)
            rows[way].append((tokens.sum(), tokens[token] / p[token]))
    return {way: Chances(*np.array(values).T) for way, values in rows.items()}


@dataclass(frozen=True)
class Sampled:
    """Tokens of the real sampler at one position, with its own noise."""

    right: bool  # both models gave the same token
    second: bool  # the same, without the draft model's first choice
    level: int  # confidence of the draft model, an index of LEVELS


def counted(model: NDArray[np.float32], draft: NDArray[np.float32], params: SamplingParams) -> list[Sampled]:
    """Tokens of the real sampler for each row of logits."""

    def sample(logits: NDArray[np.float32]) -> list[int]:
        vocab_size = logits.shape[1]
        requests = [SamplingRequest(params, [0] * (row + 1), vocab_size, seed=0) for row in range(len(logits))]
        return [one.token for one in Sampler().sample(logits, requests)]

    tokens, first = sample(model), sample(draft)
    others = draft.copy()
    others[np.arange(len(first)), first] = -np.inf
    sure = [probabilities(row, SamplingParams())[token] for row, token in zip(draft, first, strict=True)]
    return [
        Sampled(token == one, token == two, bisect(LEVELS, probability))
        for token, one, two, probability in zip(tokens, first, sample(others), sure, strict=True)
    ]


def print_costs(llm: LLM, executor: Executor, logits: NDArray[np.float32]) -> None:
    """Prints the share of sampling in a step that decodes."""
    for batch in 1, 32:
        prompts = [[row + 100] * 16 for row in range(batch)]
        seconds = []
        for tokens in 1, 33:
            llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
            began = time.perf_counter()
            llm.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))
            seconds.append(time.perf_counter() - began)
        step = (seconds[1] - seconds[0]) / 32
        for filters in FILTERS:
            sampler, rows = Sampler(executor.draw), np.resize(logits, (batch, logits.shape[1]))
            requests = [SamplingRequest(SamplingParams(**filters), [row], logits.shape[1]) for row in range(batch)]
            taken = []
            for _ in range(20):
                began = time.perf_counter()
                sampler.sample(rows, requests)
                taken.append(time.perf_counter() - began)
            sampling_s = float(np.median(taken))
            print(
                f"batch {batch}, {filters}: a step {1e3 * step:.1f} ms, "
                f"sampling {1e6 * sampling_s / batch:.0f} us a row, {sampling_s / step:.2%} of the step"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--role", default="draft", help="role of the draft model: draft or skip")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["code", "prose"])
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    options = parser.parse_args()
    limits = RuntimeConfig(
        max_model_len=1024, max_num_seqs=1, max_num_batched_tokens=ROWS, max_logit_rows=ROWS, kv_cache_memory=1 << 28
    )
    with (
        Engine.open(options.engine) as engine,
        LLM(engine, max_model_len=1024, speculate="off", kv_cache_memory="1g") as llm,
    ):
        executors = [open_executor(one, limits) for one in (engine, engine.for_role(options.role))]
        print("accepted tokens of 1 to 8 draft tokens; the first number is the acceptance rate of one")
        for filters in FILTERS:
            for task in options.tasks:
                params = [
                    SamplingParams(**filters, seed=row, max_tokens=options.tokens) for row in range(len(TASKS[task]))
                ]
                outputs = llm.generate([llm.encode(prompt) for prompt in TASKS[task]], params)
                texts: list[dict[str, Chances]] = []
                same: list[Sampled] = []
                for output, one in zip(outputs, params, strict=True):
                    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
                    ids = [*prompt, *answer]
                    model, draft = (score(executor, [ids])[0][len(prompt) - 1 : -1] for executor in executors)
                    texts.append(chances(model, draft, answer, one))
                    same += counted(model, draft, one)
                positions = sum(len(text["bound"].right) for text in texts)
                wrong = [one.second for one in same if not one.right]
                print(
                    f"{task}, {filters}: {positions} positions; same token by count: {1 - len(wrong) / len(same):.3f}, "
                    f"and where the first token is wrong, the draft's second is right: {np.mean(wrong):.3f}"
                )
                for level, (low, high) in enumerate(pairwise((0, *LEVELS, 1))):
                    rights = [one.right for one in same if one.level == level]
                    if rights:
                        print(f"  the draft says {low} to {high}: right {np.mean(rights):.2f} of {len(rights)}")
                for way in WAYS:
                    right = np.concatenate([text[way].right for text in texts])
                    chains = np.concatenate([text[way].chains() for text in texts]).mean(axis=0)
                    print(
                        f"  {way:8} {right.mean():.3f}  " + " ".join(f"{length:.2f}" for length in chains), flush=True
                    )
        print_costs(llm, executors[0], model[:1])


if __name__ == "__main__":
    main()
