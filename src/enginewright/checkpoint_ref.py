"""Recognizes a checkpoint that is named where an engine is expected, and says how to build it."""

import os
import re
import shlex
from pathlib import Path

from enginewright.errors import UsageError

PATH_PREFIXES = ("./", "../", "/", "~")  # with one of these a text is a path, not a hub id

HUB_ID = re.compile(r"(?P<owner>\w[\w.-]*)/(?P<name>\w[\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)


def find_checkpoint(given: str | Path) -> tuple[str, str] | None:
    """Recognizes a checkpoint where an engine is expected.

    Args:
        given: an engine file, a checkpoint's folder, a GGUF file, or a hub id. In a string, a leading `./` says that it
            is a path; `Path` drops it.

    Returns:
        The kind of checkpoint, in words, and the model's name; None if it is no checkpoint.
    """
    path = Path(given)
    try:
        if path.is_dir():
            if (path / "config.json").is_file() or any(path.glob("*.gguf")):
                return "a checkpoint's folder", path.resolve().name
        elif path.suffix.lower() == ".gguf":
            if path.is_file():
                return "a GGUF checkpoint", path.stem
        elif (match := HUB_ID.fullmatch(str(given))) and path.suffix != ".engine" and not path.parent.exists():
            return "a model of the Hugging Face hub", match["name"]
    except (OSError, ValueError):
        return None  # The caller opens the path next, and that error says what is wrong.
    return None


def refuse_checkpoint(given: str | Path) -> None:
    """Refuses a checkpoint that is given where an engine is expected, with the command that builds the engine.

    Raises:
        UsageError: `given` is a checkpoint.
    """
    path, found = Path(given), find_checkpoint(given)
    if found is None:
        return
    kind, name = found
    engine = f"{name}.engine"
    raise UsageError(
        f"{path} is {kind}, not an engine" if path.exists() else f"there is no engine {path}",
        "build it first" if path.exists() else f"no such file; if it is {kind}, it has to be built first",
        f"Run: {shlex.join(['engine', 'build', str(path), '--output', engine])}\nThen name {engine} here.",
    )


def check_written_path(given: str) -> None:
    """Refuses a text that is written as a path, such as ./x/y, if nothing exists there; it is no hub id.

    Raises:
        UsageError: there is no such file.
    """
    if given.startswith(PATH_PREFIXES) and not Path(given).exists():
        raise no_such_file(given)


def no_such_file(path: str | Path) -> UsageError:
    """Makes the error for an engine file that does not exist."""
    why = "it is a link that leads nowhere" if os.path.islink(path) else "there is no such file"
    return UsageError(f"{path} cannot be opened", why)
