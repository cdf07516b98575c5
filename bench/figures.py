"""Computes the figures of a report from the arrival times of completions' pieces."""

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
    """Distribution of a latency, in ms; PERCENTILE_METHOD defines the percentiles."""

    mean: float  # mean
    p50: float  # median
    p90: float  # 90th percentile
    p95: float  # 95th percentile
    p99: float  # 99th percentile
    max: float  # maximum

    @classmethod
    def of_seconds(cls, values: Iterable[float]) -> "Distribution | None":
        """Computes the distribution of values in seconds; None if there are none."""
        ms = np.fromiter(values, float) * 1e3
        if not ms.size:
            return None
        p50, p90, p95, p99 = np.percentile(ms, PERCENTILES).tolist()
        return cls(float(ms.mean()), p50, p90, p95, p99, float(ms.max()))


@dataclass(frozen=True)
class Failure:
    """The failure of a request."""

    kind: str  # the same text for failures of one cause
    detail: str  # message of this case


@dataclass
class RequestRecord:
    """The result of one request. Times are seconds since the run began."""

    max_tokens: int  # requested limit of generated tokens
    due_s: float = 0.0  # scheduled time of sending
    sent_s: float = 0.0  # time of sending
    # arrival times of the text's pieces; a piece is a token, unless the server sends several at once
    piece_s: list[float] = field(default_factory=list)
    end_s: float = 0.0  # end of the stream
    prompt_tokens: int = 0  # tokens of the prompt, as the server counts them
    cached_tokens: int = 0  # prompt tokens that the prefix cache had, as the server counts them
    tokens: int = 0  # generated tokens, as the server counts them; without has_usage, the number of pieces
    has_usage: bool = False  # True if the server counted tokens
    failure: Failure | None = None  # failure; None is a complete completion

    @property
    def ttft_s(self) -> float:
        """Time to the first token, in seconds: from the sending to the first piece."""
        return self.piece_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds; None if there is only one token."""
        return (self.piece_s[-1] - self.piece_s[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between consecutive pieces."""
        return [late - early for early, late in pairwise(self.piece_s)]

    @property
    def e2e_s(self) -> float:
        """Seconds from the sending to the end of the stream."""
        return self.end_s - self.sent_s


@dataclass(frozen=True)
class Goodput:
    """Limits of latencies, in ms, that a good request must meet; None is no limit."""

    ttft: float | None = None  # limit of the time to the first token
    tpot: float | None = None  # limit of the time per output token
    e2e: float | None = None  # limit of the time from end to end

    @classmethod
    def parse(cls, text: str) -> "Goodput":
        """Parses `ttft=500,tpot=50`.

        Raises:
            UsageError: the text has another form.
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
                    f"{part.strip()!r} is not a limit, each of {', '.join(known)} may have one in ms",
                    "Write for example --goodput ttft=500,tpot=50.",
                )
            limits[name] = limit
        return cls(**limits)

    def is_met(self, answer: RequestRecord) -> bool:
        """Checks a request; with one token it has no time per output token, and meets every limit of it."""
        values = ((answer.ttft_s, self.ttft), (answer.tpot_s or 0.0, self.tpot), (answer.e2e_s, self.e2e))
        return all(limit is None or value * 1e3 <= limit for value, limit in values)


@dataclass(frozen=True)
class ErrorKind:
    """Failures of one kind."""

    count: int  # number of failures
    example: str  # message of the first one


@dataclass(frozen=True)
class ServeFigures:
    """Figures of a run. Only complete completions count, but for `failed` and `errors`."""

    done: int  # complete completions
    failed: int  # failed requests
    short_answers: int  # completions with fewer tokens than max_tokens
    without_usage: int  # completions whose tokens the server did not count
    duration_s: float  # seconds from the first sending to the last end, failures included
    max_in_flight: int  # maximum of requests at once
    prompt_tokens: int  # tokens of prompts
    cached_prompt_tokens: int  # tokens of prompts that the prefix cache had, as far as the server reports them
    generated_tokens: int  # tokens of completions
    requests_per_s: float  # completions in a second
    prompt_tokens_per_s: float  # tokens of prompts in a second
    generated_tokens_per_s: float  # tokens of completions in a second
    total_tokens_per_s: float  # tokens of prompts and completions in a second
    ttft_ms: Distribution | None  # time to the first token
    tpot_ms: Distribution | None  # time per output token after the first
    gap_ms: Distribution | None  # time between consecutive pieces
    e2e_ms: Distribution | None  # time from the sending to the end
    send_delay_ms: Distribution | None  # delay of sending, caused by the limit on concurrency or by the client
    errors: dict[str, ErrorKind]  # kind → failures
    good: int | None  # completions that met the limits of goodput; None without limits
    good_requests_per_s: float | None  # good completions in a second


def serve_figures(answers: Sequence[RequestRecord], goodput: Goodput | None = None) -> ServeFigures:
    """Computes the figures of a run.

    Args:
        answers: records of all requests, at least one.
        goodput: limits of good requests.
    """
    done = [answer for answer in answers if answer.failure is None]
    failures = [answer.failure for answer in answers if answer.failure is not None]
    seconds = max(answer.end_s for answer in answers) - min(answer.sent_s for answer in answers)
    seconds = max(seconds, 1e-9)  # avoids 0 in a run whose requests all failed at once
    prompts, tokens = sum(answer.prompt_tokens for answer in done), sum(answer.tokens for answer in done)
    good = None if goodput is None else sum(map(goodput.is_met, done))
    return ServeFigures(
        done=len(done),
        failed=len(failures),
        short_answers=sum(answer.tokens < answer.max_tokens for answer in done),
        without_usage=sum(not answer.has_usage for answer in done),
        duration_s=seconds,
        max_in_flight=max_in_flight(answers),
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
        send_delay_ms=Distribution.of_seconds(answer.sent_s - answer.due_s for answer in answers),
        errors=_errors(failures),
        good=good,
        good_requests_per_s=None if good is None else good / seconds,
    )


def max_in_flight(answers: Iterable[RequestRecord]) -> int:
    """Returns the maximum of requests that were in flight at the same time."""
    changes = sorted(change for answer in answers for change in ((answer.sent_s, 1), (answer.end_s, -1)))
    return int(np.cumsum([step for _, step in changes]).max(initial=0))  # at equal times, an end counts before a start


def tokens_over_time(
    answers: Iterable[RequestRecord], max_bins: int, min_bin_s: float
) -> tuple[FloatArray, FloatArray]:
    """Computes generated tokens per second in equal parts of the run, up to the last token.

    The tokens of a completion are spread over its pieces.

    Args:
        answers: records of requests, one of them without failure.
        max_bins: limit of parts.
        min_bin_s: minimum of a part, in seconds.

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
