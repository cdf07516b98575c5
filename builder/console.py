"""A build on a terminal: phases with progress, and what to do with the engine at the end."""

import shlex
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from enginewright.builder.build import BuildReport


class ConsoleProgress:
    """Draws on stderr: bars on a terminal, one line a phase elsewhere."""

    def __init__(self) -> None:
        console = Console(file=sys.stderr)
        columns = (TextColumn("{task.description:<24}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._phase = ""
        self._started = 0.0

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

    def phase(self, name: str, total_bytes: int = 0) -> None:
        self._end_phase()
        self._phase, self._started = name, time.monotonic()
        if self._bars:
            self._task = self._bars.add_task(name, total=total_bytes or None)

    def advance(self, nbytes: int) -> None:
        if self._bars and self._task is not None:
            self._bars.advance(self._task, nbytes)

    def _end_phase(self) -> None:
        if self._bars and self._task is not None:
            total = self._bars.tasks[self._task].total or 1
            self._bars.update(self._task, total=total, completed=total)
        elif self._phase and not self._bars:
            print(f"{self._phase:<24} {time.monotonic() - self._started:6.1f} s", file=sys.stderr)
        self._phase, self._task = "", None


def describe(report: BuildReport) -> str:
    """What was built, and the command to try next."""
    context_mb = report.kv_bytes_per_token * report.max_seq_len / 1e6
    calibration = report.calibration and (
        "calib    {samples} samples, {tokens} tokens, from {source} (sha256:{sha256})".format(**report.calibration),
    )
    return "\n".join(
        (
            "",
            f"engine   {report.path}",
            f"size     {report.size_bytes / 1e6:.1f} MB",
            f"content  sha256:{report.content_hash}",
            *(calibration or ()),
            f"memory   {report.weight_bytes / 1e6:.1f} MB of weights, "
            f"{report.kv_bytes_per_token / 1e3:.1f} kB of KV a token "
            f"({context_mb:.0f} MB for a sequence of {report.max_seq_len})",
            "",
            f'next     engine generate {shlex.quote(str(report.path))} --chat "What is the capital of France?"',
        )
    )
