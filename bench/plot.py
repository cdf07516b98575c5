"""Plots of runs.

Under load: time to first token, time between tokens, and tokens over time. Offline: time to first token and to the end
of completions, and the rates of rounds.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginewright.errors import UsageError
from enginewright.output_file import require_writable, write_file
from enginewright_bench.figures import tokens_over_time
from enginewright_bench.offline import OfflineReport
from enginewright_bench.serving import ServeReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png")
WIDTH_IN, HEIGHT_IN, DPI = 12.0, 4.2, 150
LINE, MARK, GRID = "#1f5a96", "#b3541e", "#d9d9d9"
TAIL = 1.5  # end of a latency's axis at the latest, as a multiple of p99
MAX_BINS = 60  # bins of the run
MIN_BIN_S = 0.1  # seconds


def check_plot(path: Path) -> None:
    """Checks before a run that its plot can be written. Raises UsageError if not."""
    if path.suffix.lower() not in FORMATS:
        raise UsageError(f"--plot {path} has an unknown format", f"it may end in {' or '.join(FORMATS)}")
    require_writable(path)


def draw(report: ServeReport, path: Path) -> None:
    """Draws the plot of a run under load; the file is complete or not there.

    Args:
        report: the run.
        path: the file.

    Raises:
        EngineError: no request was completed, or the file cannot be written.
    """
    report.check()
    done = [answer for answer in report.answers if answer.failure is None]
    with _picture(path, _title(report)) as (first, gaps, pace):
        _ecdf(first, [answer.ttft_s * 1e3 for answer in done], "Time to first token", "requests")
        _ecdf(gaps, [gap * 1e3 for answer in done for gap in answer.gaps_s], "Time between tokens", "gaps")
        _pace(pace, report)


def draw_offline(report: OfflineReport, path: Path) -> None:
    """Draws the plot of an offline run, over all requests of all rounds.

    Args:
        report: the run.
        path: the file.

    Raises:
        EngineError: the file cannot be written.
    """
    engine, count = report.engine, report.rounds[0].requests
    title = f"{engine['name']}: {count} requests at once, {engine['isa']}, {engine['threads']} threads"
    with _picture(path, title) as (first, total, rounds):
        _ecdf(first, [seconds * 1e3 for seconds in report.first_token_s], "Time to first token", "requests")
        _ecdf(total, [seconds * 1e3 for seconds in report.total_s], "Time to whole completion", "requests")
        _rounds(rounds, [each.rates["generated_tokens_per_s"] for each in report.rounds])


@contextmanager
def _picture(path: Path, title: str) -> Iterator[Sequence["Axes"]]:
    """Yields three axes to draw on, then writes the file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"font.size": 10, "svg.fonttype": "path", "svg.hashsalt": "enginewright"}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        yield figure.subplots(1, 3)
        figure.suptitle(title, fontsize=11)
        image = BytesIO()
        figure.savefig(image, format=path.suffix[1:].lower(), dpi=DPI, metadata=_NO_DATE[path.suffix.lower()])
        write_file(path, image.getvalue())


_NO_DATE: dict[str, dict[str, Any]] = {".svg": {"Date": None}, ".png": {}}


def _title(report: ServeReport) -> str:
    config, figures = report.config, report.figures
    rate = f"{config.request_rate:g} requests/s" if config.request_rate < float("inf") else "all at once"
    limit = f", {config.max_concurrency} in flight at most" if config.max_concurrency is not None else ""
    failed = f", {figures.failed} failed" if figures.failed else ""
    return f"{report.model}: {figures.done} requests{failed}, {rate}{limit}"


def _ecdf(axes: "Axes", ms: Iterable[float], title: str, what: str) -> None:
    """Plots the share of values up to each value, with percentiles. A long tail is cut off, and its end printed."""
    values = np.sort(np.fromiter(ms, float))
    _frame(axes, title, "ms", f"share of {what}")
    axes.set_ylim(0, 1.02)
    if not values.size:
        axes.text(0.5, 0.5, f"no {what}", ha="center", transform=axes.transAxes)
        return
    axes.ecdf(values, color=LINE, linewidth=1.8)
    middle, high = np.percentile(values, (50, 99)).tolist()
    end = max(min(float(values[-1]), TAIL * high), 1e-3) * 1.04
    axes.set_xlim(0, end)
    for name, value, height in (("p50", middle, 0.05), ("p99", high, 0.16)):
        axes.axvline(value, color=MARK, linewidth=1, linestyle="--")
        side = "left" if value < end / 2 else "right"  # side of the line where the text begins
        shift = 4 if side == "left" else -4
        _note(axes, f"{name} {_ms(value)} ms", (value, height), (shift, 0), side)
    axes.set_title(f"max {_ms(float(values[-1]))} ms", fontsize=9, loc="right", color=MARK)


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _pace(axes: "Axes", report: ServeReport) -> None:
    pace, edges = tokens_over_time(report.answers, MAX_BINS, MIN_BIN_S)
    _frame(axes, "Generated tokens", "seconds since the run began", "tokens/s")
    axes.stairs(pace, edges, color=LINE, linewidth=1.8)
    mean = report.figures.generated_tokens_per_s
    axes.axhline(mean, color=MARK, linewidth=1, linestyle="--")
    axes.set_title(f"mean {mean:,.0f} tokens/s", fontsize=9, loc="right", color=MARK)
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(0, max(float(pace.max()), mean) * 1.08)


def _rounds(axes: "Axes", rates: Sequence[float]) -> None:
    _frame(axes, "Generated tokens", "round", "tokens/s")
    numbers = range(1, len(rates) + 1)
    axes.bar(numbers, rates, color=LINE, width=0.6)
    middle = statistics.median(rates)
    axes.axhline(middle, color=MARK, linewidth=1, linestyle="--")
    axes.set_title(f"median {middle:,.0f} tokens/s", fontsize=9, loc="right", color=MARK)
    axes.set_xticks(numbers)
    axes.set_ylim(0, max(rates) * 1.08)


def _note(axes: "Axes", text: str, at: tuple[float, float], shift: tuple[float, float], side: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.0}
    axes.annotate(text, at, xytext=shift, textcoords="offset points", ha=side, color=MARK, fontsize=9, bbox=box)


def _frame(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
