"""GET /metrics: vLLM's names, with the prefix enginewright_ in place of vllm:, so that its dashboards fit.

Everything belongs to the thread of the event loop; what the engine counts is read when somebody looks.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from math import inf

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector, CollectorRegistry

from enginewright.runtime.stats import Stats

PREFIX = "enginewright_"
FINISH_REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


class Histogram:
    """bounds: in ascending order. prometheus_client's takes a lock for each number; this one is of one thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Counts up to each bound, and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == inf else str(float(bound)), float(total)))
        return buckets, self._sum


class Metrics(Collector):
    """What is counted where answers are sent; an answer is one choice."""

    def __init__(self, stats: Callable[[], Stats], model: str) -> None:
        self._stats, self._model = stats, model
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.whole = Histogram(WHOLE_S)
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejected: Counter[int] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The text, and its content type.

        Args:
            accept: the header in which a scraper says what it reads.
        """
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield self._gauge("num_requests_running", "Answers in the engine's batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Answers that wait for a place in it.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", stats.kv_usage)
        yield self._counter("num_preemptions", "Answers that gave their KV blocks back.", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Tokens of prompts, cached ones included.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens that were drawn.", stats.generated_tokens)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found there.", stats.cached_prompt_tokens)
        finished = CounterMetricFamily(
            PREFIX + "request_success", "Answers that have ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([self._model, reason], count)
        yield finished
        rejected = CounterMetricFamily(
            PREFIX + "request_rejected", "Requests that got an error.", labels=["model_name", "status"]
        )
        for status, count in self.rejected.items():
            rejected.add_metric([self._model, str(status)], count)
        yield rejected
        yield self._histogram("time_to_first_token_seconds", "Until an answer's first token.", self.first_token)
        yield self._histogram("inter_token_latency_seconds", "From one token to the next.", self.between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "Until an answer's end.", self.whole)

    def describe(self) -> list[Metric]:
        """Nothing: prometheus_client would otherwise collect once to learn the names."""
        return []

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        buckets, total = values.buckets()
        family.add_metric([self._model], buckets, total)
        return family
