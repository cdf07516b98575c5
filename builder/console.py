"""Shows a build on a terminal: phases with progress, and the next command at the end."""

import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from enginewright.builder.adapters.prepare import AdapterReport
from enginewright.builder.build import BuildReport
from enginewright.builder.forecast import Forecast
from enginewright.runtime.commands.quality import describe_quality
from enginewright.runtime.count import format_bytes
from enginewright.runtime.device.ranks.shares import RankShare

REFUSALS_SHOWN = 3  # reasons shown for each pass
# Main output → command to try an engine with, and its arguments after the file.
NEXT = {
    "logits": ("generate", '--chat "What is the capital of France?"'),
    "embedding": ("embed", '"What is the capital of France?"'),
    "score": ("run", ""),
}
SECONDS_BETWEEN_LINES = 10.0  # seconds between lines of a phase, where there is no terminal for a bar


class ConsoleProgress:
    """Shows progress on stderr: bars on a terminal; elsewhere a line for each phase, and more in a long one.

    The expected time is the time of the phase so far for a unit of its work, times the work that is left. It is only
    displayed: no decision of a build depends on a clock.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepares the display.

        Args:
            console: console to draw on; None is stderr.
            clock: clock in seconds.
        """
        console = console or Console(file=sys.stderr)
        columns = (
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("up to"),
            TimeRemainingColumn(),
        )
        bars = Progress(*columns, console=console, get_time=clock, speed_estimate_period=math.inf)
        self._bars = bars if console.is_terminal else None
        self._clock = clock
        self._task: TaskID | None = None
        self._phase = ""
        self._started = self._last_line = 0.0
        self._total = self._done = 0

    def __enter__(self) -> "ConsoleProgress":
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._end_phase()
        if self._bars:
            self._bars.stop()

    def phase(self, name: str, total: int = 0) -> None:
        """Starts a phase.

        Args:
            name: name of the phase.
            total: work in it, in units of its own; 0 where nothing is counted.
        """
        self._end_phase()
        self._phase, self._total, self._done = name, total, 0
        self._started = self._last_line = self._clock()
        if self._bars:
            self._task = self._bars.add_task(name, total=total or None)

    def advance(self, amount: int) -> None:
        """Adds finished work."""
        self._done += amount
        if self._bars and self._task is not None:
            self._bars.advance(self._task, amount)
        elif self._total:
            self._print_progress()

    def _print_progress(self) -> None:
        now, share = self._clock(), min(self._done / self._total, 1.0)
        if now - self._last_line >= SECONDS_BETWEEN_LINES and 0 < share < 1:
            elapsed = now - self._started
            left = elapsed * (1 - share) / share
            print(f"{self._phase:<24} {elapsed:6.1f} s, {share:.0%}, up to {left:.0f} s more", file=sys.stderr)
            self._last_line = now

    def _end_phase(self) -> None:
        if self._bars and self._task is not None:
            total = self._bars.tasks[self._task].total or 1
            self._bars.update(self._task, total=total, completed=total)
        elif self._phase and not self._bars:
            print(f"{self._phase:<24} {self._clock() - self._started:6.1f} s", file=sys.stderr)
        self._phase, self._task = "", None


def describe(report: BuildReport | Forecast) -> str:
    """Formats the result of a build with the next command, or the forecast of one."""
    return "\n".join(("", *(_built(report) if isinstance(report, BuildReport) else _forecast(report))))


def describe_adapter(report: AdapterReport) -> str:
    """Formats the result of `engine adapter`."""
    ranks, quality = f"ranks of up to {report.max_rank}", describe_quality(report.quality)
    return "\n".join(
        (
            "",
            f"adapter  {report.path}",
            f"engine   {report.engine}",
            f"size     {format_bytes(report.size_bytes)}",
            f"content  sha256:{report.content_hash}",
            f"changes  {report.modules} layers of the checkpoint, in {report.sites} of the engine, {ranks}",
            *(f"{name:<8} {line}" for name, line in zip_longest(["quality"], quality, fillvalue="")),
        )
    )


def _built(report: BuildReport) -> Iterator[str]:
    yield f"engine   {report.path}"
    yield f"size     {format_bytes(report.size_bytes)}"
    yield f"content  sha256:{report.content_hash}"
    yield from _calibration(report.calibration)
    yield from _notes(report)
    yield f"memory   {format_bytes(report.weight_bytes)} of weights, {_kv(report)}"
    quality = describe_quality(report.quality)
    yield from (f"{name:<8} {line}" for name, line in zip_longest(["quality"], quality, fillvalue=""))
    yield ""
    command, argument = NEXT[report.gives]
    yield f"next     engine {command} {shlex.quote(str(report.path))} {argument}".rstrip()


def _forecast(report: Forecast) -> Iterator[str]:
    yield f"engine   {report.output}, of {report.name} ({report.model_type})"
    yield f"recipe   {', '.join(f'{key} {value}' for key, value in report.recipe.items())}"
    for target, kernels in report.kernels.items():
        calls = ", ".join(f"{count} {kernel}" for kernel, count in sorted(kernels.items()))
        yield f"plan     {target}: {calls}"
    for name, sentences in report.refusals.items():
        yield f"skipped  by {name}: {' '.join(sentences[:REFUSALS_SHOWN])}"
        if len(sentences) > REFUSALS_SHOWN:
            yield f"         and {len(sentences) - REFUSALS_SHOWN} more (--json lists them)"
    yield f"size     {format_bytes(report.file_bytes)}"
    yield from _calibration(report.calibration)
    dtypes = ", ".join(f"{format_bytes(count)} {dtype}" for dtype, count in sorted(report.weight_bytes.items()))
    yield f"memory   {format_bytes(sum(report.weight_bytes.values()))} of weights ({dtypes}), {_kv(report)}"
    for rank, share in enumerate(report.ranks):
        yield f"rank {rank:<4}{RankShare(**share).describe()}"
    yield from _notes(report)
    yield f"build    takes {_need(report.disk_bytes, report.free_disk_bytes, 'on that disk')}"
    yield f"         and {_need(report.memory_bytes, report.free_memory_bytes, 'in memory')}"
    yield ""
    yield "Nothing was written."


def _calibration(made: Mapping[str, Any] | None) -> Iterator[str]:
    if made is not None:
        digest = f" (sha256:{made['sha256']})" if "sha256" in made else ""
        yield f"calib    {made['samples']} samples, {made['tokens']} tokens, from {made['source']}{digest}"


def _notes(report: BuildReport | Forecast) -> Iterator[str]:
    for note in report.notes:
        yield f"note     {note}"


def _kv(report: BuildReport | Forecast) -> str:
    per_token, whole = report.kv_bytes_per_token, report.kv_bytes_per_token * report.max_seq_len
    return f"{format_bytes(per_token)} of KV per token ({format_bytes(whole)} for a sequence of {report.max_seq_len})"


def _need(needed: int, free: int, where: str) -> str:
    return f"{format_bytes(needed)} {where}, where {'only ' if free < needed else ''}{format_bytes(free)} are free"
