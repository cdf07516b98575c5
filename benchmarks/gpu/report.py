"""Findings of a part, written line by line, so that those before a failure are kept."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Figure = dict[str, Any]


class Report:
    """Writes the findings of a part to a file.

    Args:
        path: The file.
        settings: Options of the command, such as the path of SmolLM2.
    """

    def __init__(self, path: Path, **settings: Any) -> None:
        self._path, self.settings = path, settings

    def add(self, name: str, **values: Any) -> None:
        """A figure, or a check. error: what went wrong instead, in words."""
        with self._path.open("a") as file:
            file.write(json.dumps({"name": name, **{key: _short(value) for key, value in values.items()}}) + "\n")

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Records an exception in the block as an error of this name; the part continues."""
        try:
            yield
        except Exception as problem:
            self.add(name, error=f"{type(problem).__name__}: {problem}"[:300])

    def skip(self, name: str, why: str) -> None:
        """Records something that cannot run here: a peer that is not installed, or does not support the operands."""
        self.add(name, **{"not run": " ".join(why.split())[:200]})


def read_report(path: Path) -> list[Figure]:
    """Reads the complete lines of a part, which may have been stopped within a line."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _short(value: Any) -> Any:
    """Five digits are more than any figure holds."""
    match value:
        case float():
            return float(f"{value:.5g}")
        case dict():
            return {key: _short(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_short(entry) for entry in value]
    return value
