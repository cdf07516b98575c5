"""How far a batch is: a bar on a terminal; nothing elsewhere but one line at the end."""

import sys
from collections.abc import Sequence
from typing import Any


class AnswerBar:
    """total: answers."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens = total, 0, 0
        self._bar: Any = None

    def __enter__(self) -> "AnswerBar":
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            columns: Sequence[Any] = (
                TextColumn("answers"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[tokens]} tokens"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=Console(file=sys.stderr))
            self._bar.add_task("answers", total=self._total, tokens=0)
            self._bar.start()
        return self

    def update(self, done: int, tokens: int) -> None:
        self._done, self._tokens = done, tokens
        if self._bar is not None:
            self._bar.update(0, completed=done, tokens=tokens)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        print(f"[{self._done} of {self._total} answers, {self._tokens} tokens]", file=sys.stderr)
