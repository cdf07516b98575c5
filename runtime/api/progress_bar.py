"""Shows the progress of a batch of requests: a bar on a terminal, and otherwise one line at the end."""

import sys
from typing import Any


class ProgressBar:
    """Shows the number of completed requests.

    Args:
        total: the number of requests.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens = total, 0, 0
        self._bar: Any = None

    def __enter__(self) -> "ProgressBar":
        if sys.stderr.isatty():
            import click

            bar = click.progressbar(
                length=self._total, label="answers", show_pos=True, item_show_func=self._tokens_text, file=sys.stderr
            )
            self._bar = bar.__enter__()
        return self

    def update(self, done: int, tokens: int) -> None:
        """Shows the number of completed requests, and of generated tokens."""
        more, self._done, self._tokens = done - self._done, done, tokens
        if self._bar is not None:
            self._bar.update(more)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
        print(f"[{self._done} of {self._total} answers, {self._tokens} tokens]", file=sys.stderr)

    def _tokens_text(self, _: object) -> str:
        return f"{self._tokens} tokens"
