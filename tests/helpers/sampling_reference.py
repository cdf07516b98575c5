"""Sampling in numpy and float64, plain, with full sorts; and requests to try it with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.request import IN_FLIGHT, SamplingRequest
from enginewright.runtime.sampling.sampler import Draw, Entries, Fields, Sampler, _Batch
from enginewright.runtime.sampling.token_mask import Mask
from tests.tolerances import LOGPROB, SAMPLED_SCORE

Floats = NDArray[np.float64]


def logits_of(vocab: int, rows: int = 1, seed: int = 0, spread: float = 3.0) -> NDArray[np.float32]:
    return (np.random.default_rng([vocab, seed]).standard_normal((rows, vocab)) * spread).astype(np.float32)


def request(params: SamplingParams, vocab: int, prompt: list[int] | None = None, **more: Any) -> SamplingRequest:
    return SamplingRequest(params, prompt or [0], vocab, **more)


def philox(counter: Sequence[Any], key: Sequence[int]) -> Sequence[Any]:
    """Philox-4x32-10 of a counter (four words, or uint64 arrays of them) and a key (two words)."""
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 2**32 - 1
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def noise(seed: int, choice: int, position: int, vocab: int) -> Floats:
    """The noise of each token, by which its probability is divided (csrc/cpu/noise.h)."""
    low = 2**32 - 1

    def drawn(numbers: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], Floats]:
        words = philox([position & low, position >> 32, choice, numbers], [seed & low, seed >> 32])[0]
        return words, -np.log1p(-((words >> 6) + 0.5) / 2**26)

    tokens = np.arange(vocab, dtype=np.uint64)
    words, group_min = drawn(2**31 + tokens // 64)
    return group_min / 64 + np.where(tokens % 64 == words % 64, 0.0, drawn(tokens)[1])


def adjusted(logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    x = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token, count in Counter(output).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    return x


def probabilities(x: Floats, params: SamplingParams) -> Floats:
    """Probabilities of all tokens after temperature, top-k, top-p and min-p."""
    x = x / params.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    kept = order[: params.top_k] if params.top_k > 0 else order
    weights = np.exp(x[kept] - x[order[0]])
    if params.top_p < 1:
        before = np.cumsum(weights) - weights
        count = int((before < params.top_p * weights.sum()).sum())
        kept, weights = kept[:count], weights[:count]
    enough = weights >= params.min_p
    result = np.zeros(len(x))
    result[np.array(kept)[enough]] = weights[enough]
    return result / result.sum()


def check_draw(token: int, chances: Floats, noise: Floats) -> None:
    """Checks that a token has the largest probability / noise, but for rounding."""
    assert chances[token] > 0, "a token that had been taken out"
    scores = chances / noise
    assert scores[token] >= scores.max() * (1 - SAMPLED_SCORE)


def with_newest(rows: Entries, history: Entries, newest: Sequence[int]) -> tuple[Entries, Entries]:
    """Rows and histories in which each token that was still being sampled is replaced by its id."""
    rows, entries, begin = rows.copy(), list[tuple[int, int]](), 0
    for index, (token, end) in enumerate(zip(newest, rows["history_end"].tolist(), strict=True)):
        counts = dict(history[begin:end].tolist())
        begin = end
        if (more := counts.pop(IN_FLIGHT, 0)) > 0:
            counts[token] = counts.get(token, 0) + more
        entries += counts.items()
        rows["history_end"][index] = len(entries)
    return rows, np.array(entries, history.dtype)


def same_draws(mine: list[Fields], others: list[Fields]) -> None:
    """Checks that samples are equal, but for the last digits of log-probabilities."""
    assert [one[0] for one in mine] == [one[0] for one in others]
    assert [one[3] for one in mine] == [one[3] for one in others]
    for one, other in zip(mine, others, strict=True):
        assert [token for token, _ in one[2]] == [token for token, _ in other[2]]
        assert (one[1] is None) == (other[1] is None)
        pairs = [(one[1] or 0.0, other[1] or 0.0), *((a[1], b[1]) for a, b in zip(one[2], other[2], strict=True))]
        assert all(abs(a - b) < LOGPROB for a, b in pairs)


def masked_rows(
    vocab: int, params: SamplingParams
) -> tuple[NDArray[np.float32], tuple[Entries, Entries, Entries, Mask | None]]:
    """Logits of six rows, and the other arguments of `draw`: the first may be any token, the others a tenth of all, or
    one of two. In the fifth, a token that is not allowed is NaN; in the last, all allowed tokens are -inf.
    """
    random = np.random.default_rng(vocab)
    some = [np.flatnonzero(random.random(vocab) < 0.1).tolist() or [vocab - 1] for _ in range(4)]
    some[1] = [0, vocab - 1]
    logits = logits_of(vocab, 6)
    logits[4, min(set(range(vocab)) - set(some[3]))] = np.nan
    logits[5, some[0]] = -np.inf
    asked = [replace(params, allowed_token_ids=allowed) for allowed in (None, *some, some[0])]
    requests = [request(one, vocab, [token % vocab for token in (3, 1, 4, 1, 5)]) for one in asked]
    return logits, _Batch(requests).arguments()


def chi_square(
    params: SamplingParams, logits: NDArray[np.float32], draws: int, draw: Draw = _cpu.sample
) -> tuple[float, int]:
    """The statistic and its degrees of freedom; a sampled token of probability 0 fails at once."""
    requests = [request(params, len(logits), seed=seed) for seed in range(draws)]
    sampled = Sampler(draw).sample(np.broadcast_to(logits, (draws, len(logits))), requests)
    counts = np.bincount([entry.token for entry in sampled], minlength=len(logits))
    expected = probabilities(logits.astype(np.float64), params) * draws
    assert not counts[expected == 0].any()
    seen = expected > 0
    return float(((counts - expected)[seen] ** 2 / expected[seen]).sum()), int(seen.sum()) - 1


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 300},
    {"top_k": 10**6},
    {"top_p": 1e-6},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.99999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 12, "top_p": 0.8, "min_p": 0.02, "temperature": 1.7},
    {"top_p": 0.9, "min_p": 0.05},
]
