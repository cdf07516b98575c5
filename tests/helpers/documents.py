"""Code blocks of the README and the documentation, and how each may be run."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n+)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SERVER = re.compile(r"(?:\w+=(?:\"[^\"]*\"|\S+) )*engine (?:run|route) ")  # start of a command that runs until a signal
MARK = re.compile(r"(not run|run with): (\S.*)")


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    A comment in front of it may be `<!-- not run: REASON -->`, or `<!-- run with: NAME -->`, where NAME is a
    folder of .cache with an environment of Python.
    """

    page: Path
    line: int  # number of its first line
    language: str
    text: str
    not_run: str  # the reason, or empty
    environment: str  # a folder of .cache, or empty for the environment of the tests

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Commands of a shell's block, without comments, and without texts for a command's stdin."""
        found, part = [], ""
        for line in re.sub(r"<<'END'\n.*?\nEND\n", "\n", self.text, flags=re.DOTALL).splitlines():
            part += line.removesuffix("\\")
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quotation goes on
                part += "\n"
                continue
            if not line.endswith("\\"):
                found += [part] if words else []
                part = ""
        return found


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The blocks of a page, or those in some languages, in order."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        if languages and found["language"] not in languages:
            continue
        kind, value = match.groups() if (match := MARK.fullmatch(found["mark"] or "")) else ("", "")
        line = text.count("\n", 0, found.start("language")) + 1
        not_run, environment = value * (kind == "not run"), value * (kind == "run with")
        yield Block(page, line, found["language"], found["text"], not_run, environment)


def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text())
