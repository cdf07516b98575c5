"""Reports in text: a line for each figure, and a table of latencies."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

from enginewright_bench.figures import Distribution, ServeFigures
from enginewright_bench.offline import OfflineReport, Round
from enginewright_bench.profile import KernelProfile, ProfileReport, StepProfile
from enginewright_bench.serving import ServeConfig, ServeReport
from enginewright_bench.workload import WorkloadConfig

LABEL, COLUMN, ROOFLINE_LABEL = 20, 10, 45  # characters


def describe_offline(report: OfflineReport) -> str:
    """Formats the report of an offline run."""
    limits = ", ".join(f"{name} {value}" for name, value in report.limits.items() if value is not None)
    rounds = report.rounds
    first = rounds[0]
    lines = [
        f"{_engine(report.engine)}, all at once{'; ' + limits if limits else ''}",
        f"{_workload(report.config.workload, first.requests)}; {_many(len(rounds), 'round')}",
        _machine(report.engine, report.machine),
        "",
        *(_row(f"{name}/s", _rates(rounds, f"{key}_per_s")) for name, key in _RATES.items()),
        _row("tokens/CPU-second", _rates(rounds, "generated_tokens_per_cpu_s")),
        _row("steps", _range([entry.steps for entry in rounds])),
        _row("preemptions", _range([entry.preemptions for entry in rounds])),
        _row(
            "prefix cache",
            f"{_range([entry.cached_prompt_tokens for entry in rounds])} of {first.prompt_tokens:,} prompt tokens",
        ),
        *_speculation(report),
        "",
        *_latencies({"first token (TTFT)": report.ttft_ms, "completion (E2E)": report.e2e_ms}),
    ]
    return "\n".join(lines)


def _speculation(report: OfflineReport) -> Iterable[str]:
    """Formats the acceptance of draft tokens, and the gain from them."""
    if report.mean_length is not None:
        drafted, accepted = (
            sum(getattr(entry, f"{kind}_tokens") for entry in report.rounds) for kind in ("draft", "accepted")
        )
        yield _row(
            "draft tokens",
            f"{accepted:,} of {drafted:,} accepted: {report.mean_length:.2f} tokens by a step with some",
        )
    comparison = report.comparison
    if comparison is not None:
        if report.mean_length is None:
            yield _row("draft tokens", "none: they would not have paid")
        ratios = comparison.ratios
        spread = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        pace = _rates(comparison.rounds, "generated_tokens_per_s")
        yield _row("not speculating", f"{pace} generated tokens/s")
        yield _row("speedup", f"{statistics.median(ratios):.2f} ×{spread}")
        same = comparison.answers - comparison.differing_answers
        yield _row("same completions", f"{same:,} of {comparison.answers:,}")


def describe_serve(report: ServeReport) -> str:
    """Formats the report of a run under load."""
    config, figures = report.config, report.figures
    total = figures.done + figures.failed
    lines = [
        f"{config.base_url}, model {report.model}, {config.endpoint.name}",
        f"{_workload(config.workload, total)}; {_load(config)}",
        "",
        _row("requests", f"{figures.done} done, {figures.failed} failed, in {figures.duration_s:.2f} s"),
        _row("in flight", f"{figures.max_in_flight} at most"),
        *(_row(f"{name}/s", _rate(getattr(figures, f"{key}_per_s"))) for name, key in _RATES.items()),
    ]
    if config.goodput is not None:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in asdict(config.goodput).items() if ms is not None)
        lines.append(_row("good requests/s", f"{figures.good_requests_per_s:.2f} ({figures.good}: {limits} or less)"))
    if figures.cached_prompt_tokens:
        cached = f"{figures.cached_prompt_tokens:,} of {figures.prompt_tokens:,} prompt tokens"
        lines.append(_row("prefix cache", cached))
    if report.server_cpu_s is not None:
        pace = f", {_rate(report.tokens_per_cpu_s)} generated tokens a second of it" if report.tokens_per_cpu_s else ""
        lines.append(_row("server's CPU time", f"{report.server_cpu_s:.2f} s{pace}"))
    lines.append(_row("client's CPU time", f"{report.client_cpu_s:.2f} s"))
    table = {
        "first token (TTFT)": figures.ttft_ms,
        "each after it (TPOT)": figures.tpot_ms,
        "gaps between tokens": figures.gap_ms,
        "completion (E2E)": figures.e2e_ms,
    }
    if config.request_rate < float("inf"):
        table["sent too late"] = figures.send_delay_ms
    return "\n".join([*lines, "", *_latencies(table), *_notes(figures)])


def describe_profile(report: ProfileReport) -> str:
    """Formats a profile."""
    lines = [_engine(report.engine), _machine(report.engine, report.machine), "", *_rooflines(report)]
    for step in report.steps:
        lines += ["", *_step(step)]
    return "\n".join(lines)


def _rooflines(report: ProfileReport) -> Iterable[str]:
    """Formats the rooflines, a column for each number of threads."""
    rooflines = report.fresh_rooflines
    yield f"{'roofline':<{ROOFLINE_LABEL}}" + "".join(
        f"{_many(roofline.threads, 'thread'):>{COLUMN}}" for roofline in rooflines
    )
    for name, each in (("fresh memory", rooflines), ("the weights in place", report.rooflines)):
        label = f"read {each[0].read_bytes / 1e6:,.1f} MB, {name}"
        yield _roofline_row(label, [roofline.read_bytes_per_s for roofline in each], "GB/s")
    for operands, rate in rooflines[0].dots.items():
        label = f"multiply {operands}, {rate.instruction}"
        yield _roofline_row(label, [roofline.dots[operands].ops_per_s for roofline in rooflines], "GOPS")


def _roofline_row(label: str, rates: Iterable[float], unit: str) -> str:
    return f"{label:<{ROOFLINE_LABEL}}" + "".join(f"{rate / 1e9:>{COLUMN},.1f}" for rate in rates) + f" {unit}"


def _step(step: StepProfile) -> Iterable[str]:
    pace = _rate(step.point.sequences * step.point.tokens / step.step_s)
    spread = f"{step.shares[0]:.0%} to {step.shares[-1]:.0%}"
    read = f"{step.roofline.read_bytes / 1e6:,.1f} MB at {step.roofline.read_bytes_per_s / 1e9:,.1f} GB/s"
    share = f"{step.share_of_roofline:.0%} of the roofline ({spread}; weights and KV: {read})"
    yield f"{step.point}: {pace} tokens/s, {share}"
    yield _cells("kernel", "shape", "calls", "ms", "MB", "GB/s", "GOPS", "of roofline", "of step")
    for group in step.groups:
        yield _kernel(group.kernel, group, step.step_s)
    inside = KernelProfile.sum(step.kernels)
    rest = step.step_s - inside.seconds
    yield _cells("outside of kernels", "", "", f"{rest * 1e3:,.3f}", "", "", "", "", f"{rest / step.step_s:.1%}")
    yield _kernel("step", replace(inside, shape="", seconds=step.step_s), step.step_s)


def _kernel(name: str, kernel: KernelProfile, step_s: float) -> str:
    return _cells(
        name,
        kernel.shape,
        str(kernel.calls),
        f"{kernel.seconds * 1e3:,.3f}",
        f"{kernel.nbytes / 1e6:,.2f}",
        f"{kernel.nbytes / kernel.seconds / 1e9:,.1f}",
        f"{sum(kernel.ops.values()) / kernel.seconds / 1e9:,.1f}",
        f"{kernel.share_of_roofline:.1%}",
        f"{kernel.seconds / step_s:.1%}",
    )


def _cells(kernel: str, shape: str, calls: str, *values: str) -> str:
    return f"{kernel:<{LABEL}}{shape:<{LABEL}}{calls:>5}" + "".join(f"{value:>{COLUMN}}" for value in values)


def _engine(engine: Mapping[str, Any]) -> str:
    return f"{engine['name']} ({', '.join(f'{key} {value}' for key, value in engine['recipe'].items())})"


def _machine(engine: Mapping[str, Any], machine: Mapping[str, Any]) -> str:
    cores = _many(machine["cores"], "core")
    return f"{machine['cpu']}, {cores}; {engine['isa']}, {_many(engine['threads'], 'thread')}"


_RATES = {
    "requests": "requests",
    "prompt tokens": "prompt_tokens",
    "generated tokens": "generated_tokens",
    "all tokens": "total_tokens",
}


def _notes(figures: ServeFigures) -> Iterable[str]:
    """Formats facts without which the figures could be misread."""
    notes = [f"failed: {error.count} × {kind}: {error.example}" for kind, error in figures.errors.items()]
    if figures.short_answers:
        notes.append(
            f"{figures.short_answers} of {figures.done} completions are shorter than requested: "
            "they met an end-of-text token, or the server does not support ignore_eos."
        )
    if figures.without_usage:
        notes.append(
            f"{figures.without_usage} of {figures.done} completions came without usage: "
            "their tokens are counted as pieces of the stream, and those of their prompts as none."
        )
    return ["", *notes] if notes else []


def _workload(workload: WorkloadConfig, count: int) -> str:
    if workload.dataset is not None:
        return f"{_many(count, 'prompt')} of {workload.dataset.name}, seed {workload.seed}"
    shared = f" ({workload.shared_prefix_len} shared)" if workload.shared_prefix_len else ""
    lengths = f"{workload.input_len} tokens in{shared}, {workload.output_len} out"
    return f"{_many(count, 'prompt')}, {lengths}, seed {workload.seed}"


def _load(config: ServeConfig) -> str:
    rate = f"{config.request_rate:g} requests/s" if config.request_rate < float("inf") else "all at once"
    return rate if config.max_concurrency is None else f"{rate}, {config.max_concurrency} in flight at most"


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _rates(rounds: Sequence[Round], name: str) -> str:
    """Formats the median and, for several rounds, the range."""
    values = sorted(entry.rates[name] for entry in rounds)
    middle = (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
    return _rate(middle) + (f" ({_rate(values[0])} to {_rate(values[-1])})" if len(values) > 1 else "")


def _range(counts: Sequence[int]) -> str:
    return f"{min(counts):,}" if min(counts) == max(counts) else f"{min(counts):,} to {max(counts):,}"


def _rate(value: float | None) -> str:
    return f"{value:,.1f}" if value is not None and value >= 100 else f"{value:.2f}"


def _row(label: str, text: str) -> str:
    return f"{label:<{LABEL}}  {text}"


def _latencies(table: Mapping[str, Distribution | None]) -> list[str]:
    """Formats a row for each latency; one without values (completions of one token have no gaps) has no row."""
    names = [entry.name for entry in fields(Distribution)]
    lines = [f"{'ms':<{LABEL}}" + "".join(f"{name:>{COLUMN}}" for name in names)]
    for label, values in table.items():
        if values is not None:
            cells = "".join(f"{value:>{COLUMN},.1f}" for value in asdict(values).values())
            lines.append(f"{label:<{LABEL}}" + cells)
    return lines if len(lines) > 1 else []
