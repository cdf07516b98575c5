"""GET /metrics: vLLM's names with the prefix enginewright_ instead of vllm:, so that its dashboards are easily adapted.

Everything belongs to the thread of the event loop; the engine's counters are read when a scraper asks.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Protocol

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from enginewright import __version__
from enginewright.runtime.core.request import Request
from enginewright.runtime.core.stats import STEP_TOKENS, Stats
from enginewright.runtime.device.memory_plan import KvBlocks
from enginewright.runtime.server.exposition import MetricsText
from enginewright.runtime.server.histogram import Histogram, cumulative
from enginewright.runtime.server.slices import Slices
from enginewright.runtime.speculation.stats import SpeculationStats
from enginewright.runtime.text.messages.calls import CallOutcomes

PREFIX = "enginewright_"
VLLM_PREFIX = "vllm:"
VLLM_ENGINE = {"engine": "0"}  # the label of vLLM's data-parallel rank, which its dashboards group by
# Metrics that vLLM has, too, with the same meaning and labels; prometheus_client adds _total and the like.
VLLM_NAMES = frozenset(
    (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_params_n",
        "iteration_tokens_total",
        "lora_requests_info",
        "cache_config_info",
    )
)
FINISH_REASONS = ("stop", "length", "abort", "error")
STRUCTURED_OUTCOMES = ("complete", "cut", "failed", "aborted")
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
N_CHOICES = (1, 2, 5, 10, 20)
WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)


def token_bounds(max_tokens: int) -> list[int]:
    """Bucket bounds 1, 2, 5, 10, 20, 50, … for numbers of tokens.

    Args:
        max_tokens: the largest number of tokens.
    """
    powers = [10**exponent for exponent in range(len(str(max_tokens)))]
    return [factor * power for power in powers for factor in (1, 2, 5) if factor * power <= max_tokens]


def rejections(counts: Mapping[int, int], model: str) -> Metric:
    """Counter of requests that got an error, by HTTP status."""
    family = CounterMetricFamily(
        PREFIX + "request_rejected", "Requests that got an error.", labels=["model_name", "status"]
    )
    for status, count in counts.items():
        family.add_metric([model, str(status)], count)
    return family


def as_vllm(family: Metric) -> Metric | None:
    """The metric under vLLM's name and with its labels; None if vLLM has no such metric.

    Source: vllm/v1/metrics/loggers.py.
    """
    name = family.name.removeprefix(PREFIX)
    if name not in VLLM_NAMES:
        return None
    renamed = Metric(VLLM_PREFIX + name, family.documentation, family.type)
    for sample in family.samples:
        rest = sample.name.removeprefix(PREFIX)
        renamed.samples.append(sample._replace(name=VLLM_PREFIX + rest, labels={**sample.labels, **VLLM_ENGINE}))
    return renamed


class LiveRequest(Protocol):
    """A request that has not ended."""

    arrived: float  # time of arrival, by time.perf_counter, in seconds

    @property
    def adapter_name(self) -> str:
        """Name of its adapter; empty without one."""

    @property
    def is_waiting(self) -> bool:
        """True if the engine has not begun with it, or not with all of its prompts."""


class Metrics:
    """Counters and histograms of an engine's requests and their completions.

    Args:
        stats: gives the engine's counters.
        model: the value of the label model_name.
        content_hash: the hash of the engine's content.
        max_model_len: the maximum number of tokens of a sequence.
    """

    def __init__(self, stats: Callable[[], Stats], model: str, content_hash: str, max_model_len: int) -> None:
        self._stats, self._model, self._content_hash = stats, model, content_hash
        self.cache: KvBlocks | None = None  # KV blocks since the engine was last opened
        self.max_loras: int | None = None  # maximum number of adapters in a step; None: requests cannot have any
        self.live: Collection[LiveRequest] = ()  # requests that have not ended, since the engine was last opened
        self.opening = Histogram(FIRST_TOKEN_S)  # seconds, from when there is memory for the engine
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.e2e = Histogram(WHOLE_S)
        self._queue, self._prefill = Histogram(FIRST_TOKEN_S), Histogram(FIRST_TOKEN_S)
        self._decode, self._inference = Histogram(WHOLE_S), Histogram(WHOLE_S)
        self._per_output_token = Histogram(BETWEEN_TOKENS_S)
        bounds = token_bounds(max_model_len)
        self._prompt_tokens, self._generation_tokens = Histogram(bounds), Histogram(bounds)
        self._max_generation_tokens, self._max_tokens = Histogram(bounds), Histogram(bounds)
        self._n = Histogram(N_CHOICES)
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self.rejected: Counter[int] = Counter()
        self.slices = Slices(PREFIX, model)
        self._structured: Counter[str] = Counter(dict.fromkeys(STRUCTURED_OUTCOMES, 0))
        self._tool_calls = CallOutcomes()

    def request_done(self, request: Request, num_tokens: Sequence[int]) -> None:
        """Counts a prompt whose completions have all ended without an error.

        Args:
            request: the prompt's request.
            num_tokens: the number of tokens of each completion.
        """
        times, max_tokens = request.metrics, max(num_tokens)
        assert request.total_s is not None
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._decode.observe(times.decode_s)
        self._inference.observe(times.total_s - times.queue_s)
        if max_tokens > 1:  # completions of a prompt are generated in parallel, so the longest one determines the pace
            self._per_output_token.observe(times.decode_s / (max_tokens - 1))
        self._prompt_tokens.observe(request.num_prompt_tokens)
        for count in num_tokens:
            self._generation_tokens.observe(count)
        self._max_generation_tokens.observe(max_tokens)
        self._n.observe(len(num_tokens))
        if request.params.max_tokens is not None:
            self._max_tokens.observe(request.params.max_tokens)

    def structured_done(self, finish_reason: str | None, *, is_cut: bool) -> None:
        """Counts a completion with a structure.

        Args:
            finish_reason: its end; None: it was aborted.
            is_cut: whether a limit or a stop string ended it before its structure did.
        """
        match finish_reason:
            case "stop" | "length":
                self._structured["cut" if is_cut else "complete"] += 1
            case "error":
                self._structured["failed"] += 1
            case _:
                self._structured["aborted"] += 1

    def calls_done(self, calls: CallOutcomes) -> None:
        """Counts the calls of a completion that has ended."""
        self._tool_calls.add(calls)

    def collect(self, *, is_open: bool) -> Iterator[Metric]:
        """All metrics of the engine.

        Args:
            is_open: whether the engine is open.
        """
        stats = self._stats()
        yield self._gauge("engine_open", "Whether the engine is open: 1, or 0.", is_open)
        yield self._histogram(
            "engine_opening_seconds", "Time to open the engine, once there is memory for it.", self.opening
        )
        yield self._gauge("num_requests_running", "Completions in the engine's batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Completions that wait for a place in it.", stats.num_waiting)
        waiting_s, running_s = self._max_age_s(is_waiting=True), self._max_age_s(is_waiting=False)
        yield self._gauge("oldest_waiting_request_seconds", "Age of the oldest request that waits.", waiting_s)
        yield self._gauge("oldest_running_request_seconds", "Age of the oldest request that runs.", running_s)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", stats.kv_usage)
        yield self._counter("num_preemptions", "Completions that gave their KV blocks back.", stats.num_preemptions)
        yield self._counter("prompt_tokens", "Tokens of prompts, cached ones included.", stats.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens that were generated.", stats.generated_tokens)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found there.", stats.cached_prompt_tokens)
        yield self._counter(
            "prefix_cache_evictions", "Blocks whose content was evicted for other content.", stats.num_evictions
        )
        yield self._gauge("prefix_cache_retained_blocks", "Blocks that hints keep in the cache.", stats.num_retained)
        early = stats.num_early_evictions
        yield self._counter("prefix_cache_early_evictions", "Those evicted before their time was over.", early)
        if stats.disk is not None:
            restored, disk = stats.restored_tokens, stats.disk
            yield self._counter("kv_cache_disk_tokens", "Tokens read from disk instead of being computed.", restored)
            yield self._gauge("kv_cache_disk_bytes", "Size of what is kept on disk.", disk.num_bytes)
            yield self._counter("kv_cache_disk_failures", "Files that could not be used.", disk.num_failures)
        if (remote := stats.remote) is not None:
            yield self._counter(
                "kv_cache_remote_tokens", "Tokens read from stores instead of being computed.", stats.restored_tokens
            )
            yield self._counter("kv_cache_remote_sent_bytes", "Encrypted KV blocks written.", remote.num_sent_bytes)
            yield self._counter(
                "kv_cache_remote_received_bytes", "Encrypted KV blocks read.", remote.num_received_bytes
            )
            yield self._counter("kv_cache_remote_searches", "Prompts that were searched for.", remote.num_searches)
            yield self._counter("kv_cache_remote_found", "Prompts of which blocks were found.", remote.num_found)
            yield self._counters("kv_cache_remote_failures", "Failures by cause.", "cause", remote.failures)
            yield self._gauge("kv_cache_remote_shared_bytes", "KV blocks kept for other servers.", remote.shared_bytes)
        if (moved := stats.transfer) is not None:
            yield self._counter("kv_transfer_sent_bytes", "KV blocks that others have fetched.", moved.num_sent_bytes)
            yield self._counter(
                "kv_transfer_received_bytes", "KV blocks fetched from others.", moved.num_received_bytes
            )
            yield self._counter("kv_transfer_failures", "Prompts that could not be fetched.", moved.num_failures)
            yield self._counter("kv_transfer_expired", "Leases that nobody has fetched.", moved.num_expired)
            yield self._gauge("kv_transfer_leased_bytes", "KV blocks that wait to be fetched.", moved.leased_bytes)
        grammars = stats.grammars
        yield self._gauge("grammars", "Compiled grammars that are kept.", grammars.num_grammars)
        yield self._gauge("grammar_memory_bytes", "Memory of the compiled grammars.", grammars.num_bytes)
        yield self._counter("grammar_evictions", "Grammars that were evicted for others.", grammars.num_evictions)
        yield self._counter("grammar_compilations", "Grammars that began to be compiled.", grammars.num_compilations)
        if stats.speculation is not None:
            yield from self._speculation(stats.speculation)
        yield self._counters("request_success", "Completions that have ended.", "finished_reason", self.finished)
        yield self._counters("structured_outputs", "Ended completions with a structure.", "outcome", self._structured)
        yield self._counters("tool_calls", "Tool calls of ended completions.", "outcome", asdict(self._tool_calls))
        yield rejections(self.rejected, self._model)
        yield self._histogram("time_to_first_token_seconds", "Until the first token of a completion.", self.first_token)
        yield self._histogram("inter_token_latency_seconds", "From one token to the next.", self.between_tokens)
        yield self._histogram("e2e_request_latency_seconds", "Until the end of a completion.", self.e2e)
        yield self._histogram("request_queue_time_seconds", "Before a prompt is begun.", self._queue)
        yield self._histogram("request_prefill_time_seconds", "From there to the first token.", self._prefill)
        yield self._histogram("request_decode_time_seconds", "From there to the last token.", self._decode)
        yield self._histogram("request_inference_time_seconds", "Prefill and decode.", self._inference)
        yield self._histogram(
            "request_time_per_output_token_seconds", "Decode time by tokens after the first.", self._per_output_token
        )
        yield self._histogram("request_prompt_tokens", "Tokens of a prompt.", self._prompt_tokens)
        yield self._histogram("request_generation_tokens", "Tokens of a completion.", self._generation_tokens)
        yield self._histogram(
            "request_max_num_generation_tokens",
            "Tokens of a prompt's longest completion.",
            self._max_generation_tokens,
        )
        yield self._histogram("request_params_max_tokens", "max_tokens, where there is one.", self._max_tokens)
        yield self._histogram("request_params_n", "Completions of a prompt.", self._n)
        yield from self.slices.collect()
        steps = HistogramMetricFamily(PREFIX + "iteration_tokens_total", "Tokens of a step.", labels=["model_name"])
        steps.add_metric([self._model], cumulative(STEP_TOKENS, stats.step_sizes), stats.computed_tokens)
        yield steps
        if self.cache is not None:
            cache = GaugeMetricFamily(
                PREFIX + "cache_config_info",
                "The KV cache; 1. Blocks are of the machine that the engine runs on, as vLLM's label has it.",
                labels=["model_name", "block_size", "num_gpu_blocks"],
            )
            cache.add_metric([self._model, str(self.cache.block_size), str(self.cache.count)], 1)
            yield cache
        if self.max_loras is not None:
            yield self._adapters(self.max_loras)
        build = GaugeMetricFamily(
            PREFIX + "build_info", "Version and engine; 1.", labels=["model_name", "version", "content_hash"]
        )
        build.add_metric([self._model, __version__, self._content_hash], 1)
        yield build

    def _adapters(self, max_loras: int) -> Metric:
        """Adapters of live requests, in the form in which routers read them of vLLM; the value is the time."""
        waiting, running = [
            ",".join(sorted({one.adapter_name for one in self.live if one.is_waiting == is_waiting} - {""}))
            for is_waiting in (True, False)
        ]
        labels = ["model_name", "max_lora", "waiting_lora_adapters", "running_lora_adapters"]
        family = GaugeMetricFamily(
            PREFIX + "lora_requests_info", "Adapters of requests, comma-separated; seconds since 1970.", labels=labels
        )
        family.add_metric([self._model, str(max_loras), waiting, running], time.time())
        return family

    def _max_age_s(self, *, is_waiting: bool) -> float:
        """Seconds since the oldest live request arrived, of those that wait or of those that run; 0: there is none."""
        arrivals = [request.arrived for request in self.live if request.is_waiting == is_waiting]
        return time.perf_counter() - min(arrivals) if arrivals else 0.0

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        num_draft, num_accepted = sum(stats.drafted), sum(stats.accepted)
        yield self._counter(
            "spec_decode_num_drafts", "Completions with draft tokens, counted in each step.", stats.num_drafts
        )
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens.", num_draft)
        yield self._counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", num_accepted)
        for name, counts in ("draft", stats.drafted), ("accepted", stats.accepted):
            family = CounterMetricFamily(
                f"{PREFIX}spec_decode_num_{name}_tokens_per_pos",
                "The same, by the position among the draft tokens of a completion.",
                labels=["model_name", "position"],
            )
            for position, count in enumerate(counts):
                family.add_metric([self._model, str(position)], count)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family

    def _histogram(self, name: str, text: str, values: Histogram) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        buckets, total = values.buckets()
        family.add_metric([self._model], buckets, total)
        return family


class MetricsPage(MetricsText):
    """The text of all metrics.

    Args:
        engines: gives the metrics of each engine that has some, and True if it is open.
        rejected: the number of requests that got an error and named no engine, by HTTP status.
        vllm_names: whether to repeat metrics that vLLM has, too, under its names.
    """

    def __init__(
        self,
        engines: Callable[[], Sequence[tuple[Metrics, bool]]],
        rejected: Mapping[int, int],
        *,
        vllm_names: bool = False,
    ) -> None:
        self._engines, self._rejected, self._vllm_names = engines, rejected, vllm_names
        super().__init__()

    def collect(self) -> Iterator[Metric]:
        """Each metric family once, with the samples of all engines."""
        families: dict[str, Metric] = {}
        found = [family for metrics, is_open in self._engines() for family in metrics.collect(is_open=is_open)]
        if self._rejected:
            found.append(rejections(self._rejected, ""))
        for family in found:
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
        yield from families.values()
        if self._vllm_names:
            yield from filter(None, map(as_vllm, families.values()))
