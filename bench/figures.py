"""From the times at which pieces of answers came to the figures of a report."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from enginewright.errors import UsageError

FloatArray = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
PERCENTILE_METHOD = "linear interpolation between the two nearest values (numpy's default)"


@dataclass(frozen=True)
class Distribution:
    """Of a latency, in ms. Percentiles as PERCENTILE_METHOD says."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> "Distribution | None":
        """None if there is no value."""
        ms = np.fromiter(values, float) * 1e3
        if not ms.size:
            return None
        p50, p90, p95, p99 = np.percentile(ms, PERCENTILES).tolist()
        return cls(float(ms.mean()), p50, p90, p95, p99, float(ms.max()))


@dataclass(frozen=True)
class Failure:
    """kind: the same for failures of one cause. detail: what was said in this case."""

    kind: str
    detail: str


@dataclass
class RequestRecord:
    """What became of one request. Times are seconds since the run began.

    max_tokens: that were asked for. due_s: when its turn was; sent_s: when it went off. piece_s: when each piece of its
    text came; a piece is a token, unless the server sends several at once. end_s: when the stream ended. prompt_tokens,
    cached_tokens, tokens: as the server counts them; without has_usage it did not, and tokens are pieces. failure: None
    is an answer that is whole.
    """

    max_tokens: int
    due_s: float = 0.0
    sent_s: float = 0.0
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    has_usage: bool = False
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token: from the sending to the first piece."""
        return self.piece_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one."""
        return (self.piece_s[-1] - self.piece_s[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Between a piece and the next."""
        return [late - early for early, late in pairwise(self.piece_s)]

    @property
    def e2e_s(self) -> float:
        """End to end: from the sending to the end of the stream."""
        return self.end_s - self.sent_s


@dataclass(frozen=True)
class Goodput:
    """Latencies in ms that a request must not exceed to be a good one; None is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> "Goodput":
        """Reads `ttft=500,tpot=50`.

        Raises:
            UsageError: it is something else.
        """
        known = [entry.name for entry in fields(cls)]
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (piece.strip().lower() for piece in part.partition("="))
            try:
                limit = float(number)
            except ValueError:
                limit = 0.0
            if name not in known or name in limits or not 0 < limit < float("inf"):
                raise UsageError(
                    f"--goodput {text} is not understood",
                    f"{part.strip()!r} is no limit, each of {', '.join(known)} may have one in ms",
                    "Write for example --goodput ttft=500,tpot=50.",
                )
            limits[name] = limit
        return cls(**limits)

    def is_met(self, answer: RequestRecord) -> bool:
        """An answer of one token has no time per output token, and meets every limit of it."""
        values = ((answer.ttft_s, self.ttft), (answer.tpot_s or 0.0, self.tpot), (answer.e2e_s, self.e2e))
        return all(limit is None or value * 1e3 <= limit for value, limit in values)


@dataclass(frozen=True)
class ErrorKind:
    """example: what the first of them said."""

    count: int
    example: str


@dataclass(frozen=True)
class ServeFigures:
    """Of a run. Only whole answers count, but for `failed` and `errors`.

    short_answers: with fewer tokens than max_tokens. without_usage: whose tokens the server did not count. duration_s:
    from the first request's sending to the end of the last, whole or failed. max_in_flight: requests at once.
    cached_prompt_tokens: as far as the server says. behind_ms: how late requests were sent, as the limit on
    concurrency, or the client, held them up. good: the number that met the limits of goodput.
    """

    done: int
    failed: int
    short_answers: int
    without_usage: int
    duration_s: float
    max_in_flight: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    generated_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    gap_ms: Distribution | None
    e2e_ms: Distribution | None
    behind_ms: Distribution | None
    errors: dict[str, ErrorKind]
    good: int | None
    good_requests_per_s: float | None


def serve_figures(answers: Sequence[RequestRecord], goodput: Goodput | None = None) -> ServeFigures:
    done = [answer for answer in answers if answer.failure is None]
    failures = [answer.failure for answer in answers if answer.failure is not None]
    seconds = max(answer.end_s for answer in answers) - min(answer.sent_s for answer in answers)
    seconds = max(seconds, 1e-9)  # of a run in which everything failed at once
    prompts, tokens = sum(answer.prompt_tokens for answer in done), sum(answer.tokens for answer in done)
    good = None if goodput is None else sum(map(goodput.is_met, done))
    return ServeFigures(
        done=len(done),
        failed=len(failures),
        short_answers=sum(answer.tokens < answer.max_tokens for answer in done),
        without_usage=sum(not answer.has_usage for answer in done),
        duration_s=seconds,
        max_in_flight=most_at_once(answers),
        prompt_tokens=prompts,
        cached_prompt_tokens=sum(answer.cached_tokens for answer in done),
        generated_tokens=tokens,
        requests_per_s=len(done) / seconds,
        prompt_tokens_per_s=prompts / seconds,
        generated_tokens_per_s=tokens / seconds,
        total_tokens_per_s=(prompts + tokens) / seconds,
        ttft_ms=Distribution.of_seconds(answer.ttft_s for answer in done),
        tpot_ms=Distribution.of_seconds(answer.tpot_s for answer in done if answer.tpot_s is not None),
        gap_ms=Distribution.of_seconds(gap for answer in done for gap in answer.gaps_s),
        e2e_ms=Distribution.of_seconds(answer.e2e_s for answer in done),
        behind_ms=Distribution.of_seconds(answer.sent_s - answer.due_s for answer in answers),
        errors=_errors(failures),
        good=good,
        good_requests_per_s=None if good is None else good / seconds,
    )


def most_at_once(answers: Iterable[RequestRecord]) -> int:
    """Requests that were under way at the same time."""
    changes = sorted(change for answer in answers for change in ((answer.sent_s, 1), (answer.end_s, -1)))
    return int(np.cumsum([step for _, step in changes]).max(initial=0))  # at one time, an end before a beginning


def tokens_over_time(
    answers: Iterable[RequestRecord], max_bins: int, min_bin_s: float
) -> tuple[FloatArray, FloatArray]:
    """Generated tokens per second in equal parts of the run, up to the last token.

    An answer's tokens are spread over its pieces. There must be an answer.

    Returns:
        Rates, `[bins]`, and the edges of bins in seconds, `[bins + 1]`.
    """
    done = [answer for answer in answers if answer.failure is None]
    times = np.concatenate([answer.piece_s for answer in done])
    weights = np.concatenate([np.full(len(answer.piece_s), answer.tokens / len(answer.piece_s)) for answer in done])
    end = float(times.max())
    edges = np.linspace(0, end, min(max(int(end / min_bin_s), 1), max_bins) + 1)
    tokens, _ = np.histogram(times, edges, weights=weights)
    return tokens / np.diff(edges), edges


def _errors(failures: Sequence[Failure]) -> dict[str, ErrorKind]:
    counts = Counter(failure.kind for failure in failures)
    examples = {failure.kind: failure.detail for failure in reversed(failures)}
    return {kind: ErrorKind(count, examples[kind]) for kind, count in counts.most_common()}
