"""A model's message as it comes, cut into reasoning, text and calls. Each character is looked at once."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from enginewright.runtime.messages.calls import Call, CallFormat, Schemas


@dataclass(frozen=True)
class ReasoningFormat:
    """What stands around what a model thinks before it answers."""

    open: str
    close: str


@dataclass(frozen=True)
class MessageFormat:
    """How a model writes its messages; None: it does not."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a parser has to see, also where they are special tokens."""
        reasoning, calls = self.reasoning, self.calls
        found = [] if reasoning is None else [reasoning.open, reasoning.close]
        return tuple(filter(None, found + ([] if calls is None else [calls.open, calls.close, *calls.marks])))


class Text(msgspec.Struct, frozen=True):
    """Of a message, for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """What the model thinks before it answers."""

    text: str


Piece = Text | Reasoning | Call
_Place = Literal["text", "reasoning", "call"]


class MessageParser:
    """Takes a message's text in pieces of any size: the same text gives the same message, wherever it is cut.

    A call comes whole, once it has ended. What looks like one and cannot be read stays text, as it was written; one
    that begins in the reasoning ends it. White space between the parts of a message is of none of them.

    Args:
        form: the model's.
        schemas: of the tools that may be called; None: there are none, and what looks like a call is text.
        in_reasoning: the prompt has begun the reasoning.
        several: calls after the first are given, too.
    """

    def __init__(
        self,
        form: MessageFormat,
        schemas: Schemas | None = None,
        *,
        in_reasoning: bool = False,
        several: bool = True,
    ) -> None:
        self._several = several
        self._reasoning, self._schemas = form.reasoning, schemas or {}
        self._calls = form.calls if schemas else None
        self._place: _Place = "reasoning" if in_reasoning else "text"
        self._outside: _Place = self._place  # of a call: what it goes back to if it is none
        self._rest = ""  # what was not looked at, or may go on as a mark
        self._is_at_start = in_reasoning  # or behind a mark: white space is left out
        self._has_text = False  # for the user; calls without a mark come before any
        self._call: list[str] = []  # a call, as far as it was looked at: first its mark
        self._quote = ""  # that a text in a call ends with
        self.num_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        return self._take()

    def end(self) -> list[Piece]:
        """What was held back. Nothing comes after it."""
        pieces = self._take()
        if self._place == "call":
            body = "".join(self._call[1:]) + self._rest
            self._finish(pieces, body, "")
            self._rest = ""
        self._emit(pieces, self._rest)
        self._rest = ""
        return pieces

    def _take(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._take_call(pieces) if self._place == "call" else self._take_text(pieces):
            pass
        return pieces

    def _take_text(self, pieces: list[Piece]) -> bool:
        """Up to a mark; whether there was one."""
        if self._may_begin_calls():
            return True
        marks = self._marks()
        found = _first(marks, self._rest)
        if found is None:
            held = _held(marks, self._rest)
            self._emit(pieces, self._rest[: len(self._rest) - held])
            self._rest = self._rest[len(self._rest) - held :]
            return False
        mark = found[0]
        before = self._rest[: found.start()]
        space = before[len(before.rstrip()) :]
        self._emit(pieces, before.rstrip())
        self._rest = self._rest[found.end() :]
        if self._reasoning is not None and mark in (self._reasoning.open, self._reasoning.close):
            self._place = "reasoning" if mark == self._reasoning.open else "text"
            self._is_at_start = True
        else:
            self._begin_call(space + mark)
        return True

    def _may_begin_calls(self) -> bool:
        """Whether calls without a mark begin here."""
        calls = self._calls
        if calls is None or not calls.begins or self._has_text or self._place != "text":
            return False
        if not self._rest.lstrip().startswith(calls.begins):
            return False
        self._begin_call("")
        return True

    def _begin_call(self, mark: str) -> None:
        """mark: with the white space before it, which is text if this is no call."""
        self._outside, self._place = self._place, "call"
        self._call, self._quote = [mark], ""

    def _take_call(self, pieces: list[Piece]) -> bool:
        """Up to the end of a call; whether it came."""
        assert self._calls is not None
        marks, quotes, start = self._marks(), self._calls.quotes, 0
        while True:
            if self._quote:
                found = re.compile(rf"\\.|{self._quote}", re.DOTALL).search(self._rest, start)
            else:
                found = _first((*marks, *quotes), self._rest, start)
            if found is None:
                held = int(self._rest.endswith("\\")) if self._quote else _held(marks, self._rest)
                held = min(held, len(self._rest) - start)
                self._call.append(self._rest[: len(self._rest) - held])
                self._rest = self._rest[len(self._rest) - held :]
                return False
            start, mark = found.end(), found[0]
            if mark in quotes:
                self._quote = "" if self._quote else mark
            elif not self._quote:
                break
        body = "".join(self._call[1:]) + self._rest[: found.start()]
        self._rest = self._rest[found.end() :]
        if mark == self._calls.close:
            self._finish(pieces, body, mark)
        else:  # another call begins, or the reasoning ends: this was none
            self._is_at_start = False
            self._place = self._outside
            text = self._call[0] + body
            self._emit(pieces, text.rstrip())
            self._rest = text[len(text.rstrip()) :] + mark + self._rest
        return True

    def _finish(self, pieces: list[Piece], body: str, close: str) -> None:
        """A call has ended, or what looked like one."""
        assert self._calls is not None
        try:
            calls = self._calls.read(body.strip(), self._schemas)
        except ValueError:
            calls = []
        self._place = "text" if calls else self._outside
        if calls:
            given = calls if self._several else calls[: 1 - self.num_calls]
            pieces += given
            self.num_calls += len(given)
            self._is_at_start = True
        else:
            self._is_at_start = False
            self._emit(pieces, self._call[0] + body + close)

    def _marks(self) -> tuple[str, ...]:
        """What is looked for where it stands."""
        reasoning, calls, place = self._reasoning, self._calls, self._place
        marks = [calls.open] if calls is not None else []
        if place == "call" and calls is not None:
            marks = [calls.open, calls.close] if calls.close else []
        if reasoning is not None:
            within = self._outside if place == "call" else place
            if within == "reasoning":
                marks.append(reasoning.close)
            elif place == "text":
                marks.append(reasoning.open)
        return tuple(filter(None, marks))

    def _emit(self, pieces: list[Piece], text: str) -> None:
        if self._is_at_start:
            text = text.lstrip()
        if text:
            self._is_at_start = False
            self._has_text = self._has_text or self._place == "text"
            pieces.append(Reasoning(text) if self._place == "reasoning" else Text(text))


def _first(marks: Sequence[str], text: str, start: int = 0) -> re.Match[str] | None:
    if not marks:
        return None
    return re.compile("|".join(map(re.escape, marks))).search(text, start)


def _held(marks: Sequence[str], text: str) -> int:
    """How many characters at the end may be the beginning of a mark, or white space before one."""
    longest = max(map(len, marks), default=1)
    for count in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in marks):
            break
    else:
        count = 0
    before = text[: len(text) - count]
    return count + len(before) - len(before.rstrip())
