"""Results: one JSON file, and the table and plot that are made from it."""

import json
from pathlib import Path
from typing import Any

from protocol.plot import plot
from protocol.rows import in_rows
from protocol.table import table

FORMAT = 1


class Results:
    """Results of the measurements; all files are written again after every part.

    Args:
        path: Path of the files, without their suffix.
        add: Keeps the existing results and replaces the measured parts.
        hidden: A folder whose name is removed from the results; errors of peers may contain it.
    """

    def __init__(self, path: Path, *, add: bool, hidden: Path) -> None:
        self.path, self.hidden = path, str(hidden.resolve())
        self.found: dict[str, Any] = {"format": FORMAT, "runs": []}
        file = path.with_suffix(".json")
        if add and file.exists():
            self.found = json.loads(file.read_text())
            if self.found["format"] != FORMAT:
                raise SystemExit(f"{file} has format {self.found['format']}, and this writes {FORMAT}; move it away")
        path.parent.mkdir(parents=True, exist_ok=True)

    def about(self, settings: dict[str, Any], machine: dict[str, Any]) -> None:
        """Adds a run with its settings and machine; the parts that it measures refer to it."""
        self.found["runs"].append({"settings": settings, "machine": machine})

    def put(self, part: str, group: str, value: Any, point: str | None = None) -> None:
        """Stores a part, or one point of it, in place of the earlier one, and writes the files."""
        groups = self.found.setdefault(part, {})
        entry = {"run": len(self.found["runs"]) - 1, "value": value}
        if point is None:
            groups[group] = entry
        else:
            groups.setdefault(group, {})[point] = entry
        text = in_rows(self.found).replace(self.hidden, "WORK")
        self.found = json.loads(text)
        self._write(".json", text + "\n")
        self.render()

    def render(self) -> None:
        self._write(".md", table(self.found))
        plot(self.found, self.path.with_suffix(".svg"))

    def failed(self, name: str) -> bool:
        """Returns True if one of our engines could not be built in the last run."""
        last = len(self.found["runs"]) - 1
        rows = [row for entry in self.found.get("build", {}).values() if entry["run"] == last for row in entry["value"]]
        return any(f"engine {row['name']}" == name and "not_measured" in row for row in rows)

    def _write(self, suffix: str, text: str) -> None:
        target = self.path.with_suffix(suffix)
        part = target.with_name(f".{target.name}.part")
        part.write_text(text)
        part.replace(target)
