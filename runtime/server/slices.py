"""Times and tokens of requests by their properties, each of which is a slice with a few values.

A request counts once in each slice. The slices are not crossed, so the number of series is the sum of the numbers of
their values, and not the product. No value is a text of a client's.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from enginewright.runtime.core.outputs import RequestMetrics
from enginewright.runtime.core.request import Request
from enginewright.runtime.server.histogram import Histogram
from enginewright.runtime.server.work import class_name
from enginewright.runtime.step.work_class import WorkClass

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)  # bounds of all histograms of slices
PROMPT_TOKENS = (256, 2048, 16_384)  # bounds of the values of the slice prompt_tokens
# Phases of a request: template, tokenizer and grammar; until admission; to the first token; to the last token.
PHASES = ("prepare", "queue", "prefill", "decode")
TOKENS = ("prompt", "cached", "generation")  # kinds of tokens; those of prompts include cached ones
LABELS = ["model_name", "slice", "value"]
MAX_VALUES = 64  # values of a slice; those that come later count as OTHER
OTHER = "other"


def slice_values(
    request: Request, *, may_call: bool, work: WorkClass, tenant_class: str | None, adapter: str | None
) -> Mapping[str, str]:
    """The value of a request in each slice.

    Args:
        request: the request, which has ended.
        may_call: whether it has tools that the model may call.
        work: its priority and tenant.
        tenant_class: the class of its tenant; None: tenants have no classes.
        adapter: the name of its adapter, "" if it has none; None: the server has no adapters.
    """
    tokens = request.num_prompt_tokens
    share = request.num_cached_tokens / tokens
    values = {
        "structured": _yes_or_no(request.params.structured_outputs is not None),
        "tools": _yes_or_no(may_call),
        "speculation": _yes_or_no(request.num_draft_tokens > 0),
        "cached": "none" if share == 0 else "up_to_half" if share <= 0.5 else "over_half",
        "prompt_tokens": next((f"up_to_{bound}" for bound in PROMPT_TOKENS if tokens <= bound), "more"),
        "priority": class_name(work.priority),
    }
    optional = {"tenant": tenant_class, "adapter": "none" if adapter == "" else adapter}
    return values | {name: value for name, value in optional.items() if value is not None}


def _yes_or_no(holds: bool) -> str:
    return "yes" if holds else "no"


def _seconds() -> Histogram:
    return Histogram(SECONDS)


@dataclass(eq=False, slots=True)
class Measurements:
    """Times and tokens of one request, or of many."""

    first_token: Histogram = field(default_factory=_seconds)  # seconds from arrival to a completion's first token
    between_tokens: Histogram = field(default_factory=_seconds)  # seconds from one token to the next
    num_requests: int = 0  # prompts whose completions have all ended without an error
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))  # seconds of these by phase
    num_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TOKENS, 0))  # tokens of all by kind

    def complete(self, prepare_s: float, times: RequestMetrics) -> None:
        """Counts a prompt whose completions have all ended without an error.

        Args:
            prepare_s: seconds from its arrival to its submission.
            times: its times since its submission.
        """
        self.num_requests += 1
        for phase, seconds in zip(PHASES, (prepare_s, times.queue_s, times.prefill_s, times.decode_s), strict=True):
            self.phase_s[phase] += seconds

    def add(self, other: "Measurements") -> None:
        """Adds the measurements of other requests."""
        self.first_token.add(other.first_token)
        self.between_tokens.add(other.between_tokens)
        self.num_requests += other.num_requests
        for phase, seconds in other.phase_s.items():
            self.phase_s[phase] += seconds
        for kind, count in other.num_tokens.items():
            self.num_tokens[kind] += count


class Slices:
    """Measurements by slice and value, as far as there were such requests.

    Args:
        prefix: prefix of the names of all metrics.
        model: the value of the label model_name.
    """

    def __init__(self, prefix: str, model: str) -> None:
        self._prefix, self._model = prefix + "sliced_", model
        self._measured: dict[tuple[str, str], Measurements] = {}
        self._num_values: Counter[str] = Counter()  # values of each slice

    def add(self, values: Mapping[str, str], measured: Measurements) -> None:
        """Counts a request that has ended.

        Args:
            values: its value in each slice.
            measured: its measurements.
        """
        for name, value in values.items():
            key = (name, value)
            if key not in self._measured:
                key = key if self._num_values[name] < MAX_VALUES else (name, OTHER)
                self._num_values[name] += key not in self._measured
            self._measured.setdefault(key, Measurements()).add(measured)

    def collect(self) -> Iterator[Metric]:
        """The metrics of all slices."""
        first = HistogramMetricFamily(
            self._prefix + "time_to_first_token_seconds", "Until the first token of a completion.", labels=LABELS
        )
        between = HistogramMetricFamily(
            self._prefix + "inter_token_latency_seconds", "From one token to the next.", labels=LABELS
        )
        requests = CounterMetricFamily(
            self._prefix + "requests", "Prompts whose completions have ended without an error.", labels=LABELS
        )
        phases = CounterMetricFamily(
            self._prefix + "phase_seconds", "Seconds of these prompts, by phase.", labels=[*LABELS, "phase"]
        )
        tokens = CounterMetricFamily(
            self._prefix + "tokens", "Tokens of ended requests, by kind; those of prompts include cached ones.",
            labels=[*LABELS, "kind"],
        )  # fmt: skip
        for (name, value), measured in self._measured.items():
            labels = [self._model, name, value]
            first.add_metric(labels, *measured.first_token.buckets())
            between.add_metric(labels, *measured.between_tokens.buckets())
            requests.add_metric(labels, measured.num_requests)
            for phase in PHASES:
                phases.add_metric([*labels, phase], measured.phase_s[phase])
            for kind in TOKENS:
                tokens.add_metric([*labels, kind], measured.num_tokens[kind])
        yield from (first, between, requests, phases, tokens)
