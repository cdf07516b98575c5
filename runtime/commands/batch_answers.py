"""Answers to a batch as lines of its output: written in the order of their requests, and kept by a run that resumes."""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import msgspec

from enginewright.errors import EngineError, UsageError
from enginewright.output_file import is_regular, open_in_place, write_all

AnswerKey = tuple[str, str]  # the name of the field that has a request's id, and the id as JSON
FRESH = "Name the output of the same requests, or leave --resume out to replace it."


def answer_key(fields: Mapping[str, Any]) -> AnswerKey | None:
    """The id of a request, or of the request that a line of answers belongs to; None: it has none."""
    for name in ("custom_id", "id"):
        if fields.get(name) is not None:
            return name, json.dumps(fields[name], sort_keys=True)
    return None


class AnswerWriter:
    """Writes answers in the order of their requests, each as soon as those before it are written.

    Use it in `with`. Where that ends early, by whatever error, the answers that wait for earlier ones are written as
    well, and a line that is half written is cut off.

    Args:
        path: None is stdout.
        count: number of answers of the whole batch.
        num_kept: of these, the number that an earlier run has written.
        resume: append to what the file has.
        note: added to what is said of an early end, where the answers are in a regular file.
    """

    def __init__(
        self, path: Path | None, count: int, num_kept: int = 0, *, resume: bool = False, note: str = ""
    ) -> None:
        self._path, self._count, self._num_kept, self._note = path, count, num_kept, note
        self._stream: BinaryIO
        if path is None:
            self._stream, self._can_cut = sys.stdout.buffer, False
        else:
            with self._writing():
                self._can_cut = is_regular(path)
                self._stream = open_in_place(path, keep=resume)
        # Where each written answer ends, after where the first one begins. A signal may end the work between any two
        # instructions: this list alone says what is written.
        self._ends = [self._stream.seek(0, 2) if resume else 0]
        self._is_whole = True  # no line is half written
        self._waiting: dict[int, bytes] = {}

    def add(self, index: int, lines: bytes) -> None:
        """Take the answer to a request.

        Args:
            index: the place of the request among those that this run answers.
        """
        self._waiting[index] = lines
        while (following := len(self._ends) - 1) in self._waiting:
            self._write(self._waiting[following])
            del self._waiting[following]

    def __enter__(self) -> "AnswerWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self._write_waiting()
        finally:
            written = self._num_kept + len(self._ends) - 1
            if self._path is not None:
                with self._writing():
                    self._stream.close()
                if written < self._count:
                    note = self._note if self._can_cut else ""
                    print(f"[{written} of {self._count} answers are in {self._path}{note}]", file=sys.stderr)

    def _write_waiting(self) -> None:
        if not self._cut_half_line():
            return
        try:
            num_written = len(self._ends) - 1
            for index in sorted(self._waiting):
                if index >= num_written:
                    self._write(self._waiting[index])
        finally:
            self._cut_half_line()

    def _cut_half_line(self) -> bool:
        """True if the output ends with a whole line now."""
        if not self._is_whole and self._can_cut:
            with self._writing():
                self._stream.truncate(self._ends[-1])
                self._stream.seek(self._ends[-1])
            self._is_whole = True
        return self._is_whole

    def _write(self, lines: bytes) -> None:
        self._is_whole = False
        with self._writing():
            write_all(self._stream, lines)
            self._stream.flush()
        self._ends.append(self._ends[-1] + len(lines))
        self._is_whole = True

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The system's errors as ours, but for a stdout that nobody reads: that ends the command as it ends others."""
        try:
            yield
        except OSError as error:
            if self._path is None and isinstance(error, BrokenPipeError):
                raise
            raise EngineError(f"{self._path or 'stdout'} cannot be written", error.strerror or str(error)) from error


def keep_answers(path: Path, num_lines: Mapping[AnswerKey, int]) -> set[AnswerKey]:
    """Find the requests that an earlier run has answered, and cut off what it has left of one more.

    Args:
        num_lines: number of lines that answer each request.

    Raises:
        UsageError: a line is no answer to any of these, or the file cannot be read or cut.
    """
    found: Counter[AnswerKey] = Counter()
    last: AnswerKey | None = None
    begin = end = 0  # of the lines of the last request
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                key = _key(line, f"{path}, line {number}")
                if key is None or key not in num_lines:
                    raise UsageError(f"{path}, line {number}", "it answers no request of the input", FRESH)
                if key != last:
                    begin = end
                last = key
                end += len(line)
                found[key] += 1
        if last is not None and found[last] < num_lines[last]:
            end = begin
        if end < path.stat().st_size:
            with path.open("r+b") as file:
                file.truncate(end)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UsageError(f"{path} cannot be continued", error.strerror or str(error)) from error
    return {key for key, count in found.items() if count >= num_lines[key]}


def _key(line: bytes, where: str) -> AnswerKey | None:
    try:
        return answer_key(msgspec.json.decode(line, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(where, f"it is no answer: {error}", FRESH) from error
