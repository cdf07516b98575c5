"""Requests of a simulated fleet: prompts that begin with one of many shared prefixes, as often as Zipf's law says."""

import json
import random
from dataclasses import dataclass

import numpy as np
from fleet.replica import Request

from enginewright.route.prefixes import CHUNK_BYTES, read_body

BYTES_PER_TOKEN = 4  # of text
KEY_TOKENS = CHUNK_BYTES // BYTES_PER_TOKEN
TENANT = b"t" * 32


@dataclass(frozen=True)
class Workload:
    """A distribution of requests. Lengths have log-normal distributions with these means."""

    requests: int = 100_000  # number of requests
    prefixes: int = 5_000  # number of shared prefixes
    exponent: float = 1.0  # exponent of Zipf's law: the n-th prefix has a share of n to the power of minus this
    prefix_tokens: int = 1_500  # mean tokens of a prefix
    own_tokens: int = 150  # mean tokens of a prompt after its prefix
    answer_tokens: int = 120  # mean tokens of an answer
    sigma: float = 0.5  # standard deviation of the lengths' logarithms
    seed: int = 0  # seed of everything


class Requests:
    """Requests with the keys of real bodies, computed once for all runs.

    Args:
        workload: their distribution.
    """

    def __init__(self, workload: Workload) -> None:
        rng, count = np.random.default_rng(workload.seed), workload.requests

        def lengths(mean: int, number: int) -> list[int]:
            middle = np.log(mean) - workload.sigma**2 / 2
            drawn = rng.lognormal(middle, workload.sigma, number)
            return [max(1, int(one)) for one in drawn.clip(max=4 * mean)]

        weights = 1.0 / np.arange(1, workload.prefixes + 1) ** workload.exponent
        chosen = rng.choice(workload.prefixes, count, p=weights / weights.sum())
        self._prefixes = lengths(workload.prefix_tokens, workload.prefixes)
        self._own = lengths(workload.own_tokens, count)
        self._answers = lengths(workload.answer_tokens, count)
        self._gaps = rng.exponential(size=count)  # of arrivals, at one request in a second
        texts = [_text(f"prefix {number}", tokens) for number, tokens in enumerate(self._prefixes)]
        shared: dict[bytes, bytes] = {}  # one object for equal keys
        self._keys = [
            [shared.setdefault(key, key) for key in _keys(texts[prefix], _text(f"request {number}", own))]
            for number, (prefix, own) in enumerate(zip(chosen.tolist(), self._own, strict=True))
        ]
        tokens = zip(chosen.tolist(), self._own, strict=True)
        self._prompt_tokens = [self._prefixes[prefix] + own for prefix, own in tokens]

    def at(self, rate: float, count: int | None = None) -> list[Request]:
        """New requests that arrive at random.

        Args:
            rate: mean number of requests in a second.
            count: number of requests; None is all.
        """
        times = (self._gaps[:count].cumsum() / rate).tolist()
        parts = zip(times, self._keys, self._prompt_tokens, self._answers, strict=False)
        return [Request(*one) for one in parts]


def _keys(system: str, user: str) -> list[bytes]:
    """The keys of a chat."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return read_body(json.dumps({"model": "m", "messages": messages}).encode()).keys(TENANT)


def _text(seed: str, tokens: int) -> str:
    return random.Random(seed).randbytes(tokens * BYTES_PER_TOKEN // 2).hex()
