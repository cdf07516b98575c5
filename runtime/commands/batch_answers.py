"""Writes the answers of a batch in the order of their requests, and finds those of an earlier run that is resumed."""

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

AnswerKey = tuple[str, str]  # name of the field with a request's id, and the id as JSON
FRESH = "Name the output of the same requests, or leave --resume out to replace it."


def answer_key(fields: Mapping[str, Any]) -> AnswerKey | None:
    """The id of a request, or of the request that a line of answers belongs to.

    Args:
        fields: the keys of the line.

    Returns:
        Name and value of the id; None if there is none.
    """
    for name in ("custom_id", "id"):
        if fields.get(name) is not None:
            return name, json.dumps(fields[name], sort_keys=True)
    return None


class AnswerWriter:
    """Writes answers in the order of their requests, each as soon as those before it are written.

    Use it in `with`. If that ends early, by any error, answers that wait for earlier ones are written as well, and a
    half-written line is cut off.

    Args:
        path: the output file; None is stdout.
        count: the number of answers of the whole batch.
        num_kept: the number of these that an earlier run has written.
        resume: whether to append to the file.
        note: text for the message about an early end, if the answers are in a regular file.
    """

    def __init__(
        self, path: Path | None, count: int, num_kept: int = 0, *, resume: bool = False, note: str = ""
    ) -> None:
        self._path, self._count, self._num_kept, self._note = path, count, num_kept, note
        self._stream: BinaryIO
        if path is None:
            sys.stdout.flush()
            self._stream = getattr(sys.stdout.buffer, "raw", sys.stdout.buffer)
            self._can_cut = False
        else:
            with self._writing():
                self._can_cut = is_regular(path)
                self._stream = open_in_place(path, keep=resume)
        self._start = self._stream.seek(0, 2) if resume else 0  # offset of the first answer in the file, in bytes
        # For each answer that was begun, its length and the sizes of its writes. A signal may end the work between any
        # two instructions, so only this list decides what is written: all of them, but the last one perhaps in part.
        self._begun: list[tuple[int, list[int]]] = []
        self._waiting: dict[int, bytes] = {}

    def add(self, index: int, lines: bytes) -> None:
        """Adds the answer to a request.

        Args:
            index: the index of the request in this run.
            lines: the lines of the answer.
        """
        self._waiting[index] = lines
        while (following := len(self._begun)) in self._waiting:
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
            written = self._num_kept + len(self._begun) - (not self._ends_with_answer)
            if self._path is not None:
                with self._writing():
                    self._stream.close()
                if written < self._count:
                    note = self._note if self._can_cut else ""
                    print(f"[{written} of {self._count} answers are in {self._path}{note}]", file=sys.stderr)

    def _write_waiting(self) -> None:
        if not self._cut_half_answer():
            return
        try:
            num_written = len(self._begun)
            for index in sorted(self._waiting):
                if index >= num_written:
                    self._write(self._waiting[index])
        finally:
            self._cut_half_answer()

    @property
    def _ends_with_answer(self) -> bool:
        """True if the last answer that was begun is written as a whole."""
        if not self._begun:
            return True
        length, sizes = self._begun[-1]
        return sum(sizes) == length

    def _cut_half_answer(self) -> bool:
        """Cuts off an answer that is written in part; returns True if the output now ends with a complete one."""
        if self._ends_with_answer:
            return True
        if self._can_cut:
            end = self._start + sum(length for length, _ in self._begun[:-1])
            with self._writing():
                self._stream.truncate(end)
                self._stream.seek(end)
        elif any(self._begun[-1][1]):
            return False
        self._begun.pop()
        return True

    def _write(self, lines: bytes) -> None:
        sizes: list[int] = []
        self._begun.append((len(lines), sizes))
        with self._writing():
            write_all(self._stream, lines, sizes)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Converts OS errors, except for a closed stdout, which ends this command as it ends others."""
        try:
            yield
        except OSError as error:
            if self._path is None and isinstance(error, BrokenPipeError):
                raise
            raise EngineError(f"{self._path or 'stdout'} cannot be written", error.strerror or str(error)) from error


def keep_answers(path: Path, num_lines: Mapping[AnswerKey, int]) -> set[AnswerKey]:
    """Finds the requests that an earlier run has answered, and cuts off an incomplete answer.

    Args:
        path: the output of the earlier run.
        num_lines: the number of lines that answer each request.

    Returns:
        The ids of the answered requests.

    Raises:
        UsageError: a line answers none of these requests, or the file cannot be read or truncated.
    """
    found: Counter[AnswerKey] = Counter()
    last: AnswerKey | None = None
    begin = end = 0  # offsets of the last request's lines
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
