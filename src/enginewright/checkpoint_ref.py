"""Recognizes a checkpoint that is named where an engine is wanted, and says how to build it."""

import re
import shlex
from pathlib import Path

from enginewright.errors import UsageError

PATH_PREFIXES = ("./", "../", "/", "~")  # whoever types one means a path, not a hub id

HUB_ID = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


def refuse_checkpoint(given: str | Path) -> None:
    """Tell people who name a checkpoint in the place of an engine to build it, with the command.

    Args:
        given: what was named: an engine file, a checkpoint's folder, a GGUF file, or a hub id. A text keeps the `./`
            that says that it is a path; `Path` drops it.

    Raises:
        UsageError: it is a checkpoint.
    """
    path = Path(given)
    kind = name = ""
    try:
        if path.is_dir():
            if (path / "config.json").is_file() or any(path.glob("*.gguf")):
                kind, name = "a checkpoint's folder", path.resolve().name
        elif path.suffix.lower() == ".gguf":
            if path.is_file():
                kind, name = "a GGUF checkpoint", path.stem
        elif (match := HUB_ID.fullmatch(str(given))) and path.suffix != ".engine" and not path.parent.exists():
            kind, name = "a model of the Hugging Face hub", match["name"]
    except (OSError, ValueError):
        return  # Opening it says what is wrong.
    if not name:
        return
    engine = f"{name}.engine"
    raise UsageError(
        f"{path} is {kind}, not an engine" if path.exists() else f"there is no engine {path}",
        "build it first" if path.exists() else f"no such file; if it is {kind}, it has to be built first",
        f"Run: {shlex.join(['engine', 'build', str(path), '--output', engine])}\nThen name {engine} here.",
    )


def check_written_path(given: str) -> None:
    """Refuse a path that is written as one, such as ./x/y, where there is nothing; it is no hub id.

    Raises:
        UsageError: there is no such file.
    """
    if given.startswith(PATH_PREFIXES) and not Path(given).exists():
        raise no_such_file(given)


def no_such_file(path: str | Path) -> UsageError:
    """The error for an engine file that does not exist."""
    return UsageError(f"{path} cannot be opened", "there is no such file")
