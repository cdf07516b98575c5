"""Reads the texts that `--calib-data` names: JSON lines, plain text, or a file of a data set of the hub.

A line of JSON has "text", "prompt" and "completion", or "messages"; other keys are ignored. Plain text is cut into
pieces at the ends of lines. Of a large file only the start is read.
"""

import codecs
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import msgspec

from enginewright.builder.checkpoint.files import LFS_POINTER
from enginewright.builder.checkpoint.hub import HubId, download_file, parse_hub_id
from enginewright.errors import UsageError

LIMIT_BYTES = 64 << 20  # limit of a file that is read; samples are a few hundred kilobytes at most
PIECE_CHARACTERS = 768  # characters of a piece of plain text: a sample's tokens, and a third more
JSON_LINES = (".jsonl", ".ndjson", ".json")
PLAIN = (".txt", ".text", ".md", ".rst")
# Suffixes of files of data sets that cannot be read here.
OTHER_FORMS = (".parquet", ".arrow", ".feather", ".csv", ".tsv", ".gz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".bin")
DESCRIPTIONS = ("dataset_infos.json", "dataset_dict.json", "state.json")  # files of data sets other than their data
NAMES_SHOWN = 5  # names that an error lists
FORMS = 'JSON lines (.jsonl: {"text": …}, {"prompt": …, "completion": …} or {"messages": […]}) or plain text'


@dataclass(frozen=True)
class CalibrationText:
    """One text of the calibration data."""

    content: str | list[dict[str, Any]]  # a text, or messages with role and content
    where: str  # file, and line or piece, for errors


class _Line(msgspec.Struct):
    """A line of JSON; other keys are ignored."""

    text: str | None = None  # a text
    prompt: str | None = None  # start of a text, with `completion`
    completion: str | None = None  # rest of the text
    messages: list[dict[str, Any]] | None = None  # messages with role and content


_LINE = msgspec.json.Decoder(_Line)


def read_texts(ref: str) -> list[CalibrationText]:
    """Reads the texts of a file, or of a data set of the hub: owner/name, owner/name@revision, owner/name:file.

    Raises:
        UsageError: there is no such file, it is not text, or a line of JSON has an unknown form.
        EngineError: the hub cannot be reached.
    """
    path, name = _find(ref)
    suffix = PurePath(name).suffix.lower()
    if suffix in OTHER_FORMS:
        raise _not_read(name, suffix)
    content = _read(path, name)
    texts = list(_lines(content, name) if suffix in JSON_LINES else _pieces(content, name))
    if not texts:
        raise UsageError(f"{name} cannot be used for calibration", "it is empty", f"Give {FORMS}.")
    return texts


def is_remote(ref: str) -> bool:
    """Checks if a name is that of a data set of the hub, and not of a local file."""
    id, _, file = ref.partition(":")
    named_as_file = not file and PurePath(ref).suffix.lower() in (*JSON_LINES, *PLAIN, *OTHER_FORMS)
    return not Path(ref).exists() and parse_hub_id(id) is not None and not named_as_file


def _find(ref: str) -> tuple[Path, str]:
    """Finds the file, and its name for errors."""
    path = Path(ref)
    if path.is_dir():
        raise UsageError(f"{path} cannot be used for calibration", "it is a folder", "Name a file in it.")
    if path.exists():
        return path, ref
    id, _, file = ref.partition(":")
    hub_id = parse_hub_id(id)
    if hub_id is None or not is_remote(ref):
        near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.glob("*")], n=1, cutoff=0.7)
        fix = f"Did you mean {path.parent / near[0]}?" if near else f"Name a file of {FORMS}, or a data set of the hub."
        raise UsageError(f"there is no calibration data {ref}", "no such file, and not a hub id", fix)
    path, file = download_file(hub_id, lambda names: _choose(names, hub_id, file))
    return path, f"{id}:{file}"


def _choose(names: list[str], hub_id: HubId, wanted: str) -> str:
    """Chooses the file of a data set."""
    id = hub_id.repository
    if wanted in names:
        return wanted
    readable = [name for name in names if name.endswith((*JSON_LINES, ".txt")) and name not in DESCRIPTIONS]
    if not wanted and len(readable) == 1:
        return readable[0]
    if readable:
        what = f"the data set {id} has no file {wanted}" if wanted else f"the data set {id} has several files"
        near = difflib.get_close_matches(wanted, readable, n=1) or readable[:1]
        raise UsageError(what, _listed(readable), f"Name one: {id}:{near[0]}")
    raise _not_read(f"the data set {id}", _listed(names) or "it is empty")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )


def _not_read(name: str, why: str) -> UsageError:
    return UsageError(
        f"{name} cannot be used for calibration",
        f"{why}: this form cannot be read",
        f"Write some hundred of its texts into a file of {FORMS}.",
    )


def _read(path: Path, name: str) -> str:
    """Reads the text of a file, or its start if it is large."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{name} cannot be read", error.strerror or str(error)) from error
    if data.startswith(LFS_POINTER):
        raise UsageError(
            f"{name} is a pointer of Git LFS, not the file itself", fix="Run `git lfs pull` in its folder."
        )
    whole = len(data) <= LIMIT_BYTES
    if not whole:
        data = data[: data.rfind(b"\n", 0, LIMIT_BYTES) + 1] or data[:LIMIT_BYTES]
    if b"\0" in data:
        raise UsageError(f"{name} cannot be used for calibration", "it is binary, not text", f"Give {FORMS}, in UTF-8.")
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8"
        raise UsageError(f"{name} cannot be used for calibration", why, f"Give {FORMS}, in UTF-8.") from error


def _lines(content: str, name: str) -> Iterator[CalibrationText]:
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{name}, line {number}"
            try:
                yield CalibrationText(_of_line(_LINE.decode(line)), where)
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                raise UsageError(where, str(error), f"Give {FORMS}.") from error


def _of_line(line: _Line) -> str | list[dict[str, Any]]:
    if line.messages:
        return line.messages
    if line.text is not None:
        return line.text
    if line.prompt is not None and line.completion is not None:
        return line.prompt + line.completion
    raise ValueError('it has neither "text", "prompt" with "completion", nor "messages"')


def _pieces(content: str, name: str) -> Iterator[CalibrationText]:
    """Cuts plain text into pieces as long as a sample: whole lines, and long lines in parts."""
    begin = 0
    while begin < len(content):
        end = content.find("\n", begin + PIECE_CHARACTERS) + 1
        if not 0 < end <= begin + 2 * PIECE_CHARACTERS:
            end = begin + PIECE_CHARACTERS
        if content[begin:end].strip():
            yield CalibrationText(content[begin:end], f"{name}, character {begin}")
        begin = end
