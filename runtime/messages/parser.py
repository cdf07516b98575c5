"""A model's message as it comes, cut into reasoning, text and calls. Each character is looked at once."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby
from typing import Literal

import msgspec

from enginewright.runtime.messages.calls import MAX_HEAD_CHARS, Arguments, Call, CallFormat, Schemas
from enginewright.runtime.sampling import SampledToken


@dataclass(frozen=True)
class ReasoningFormat:
    """What stands around what a model thinks before it answers."""

    open: str
    close: str
    marks: tuple[str, ...] = ()  # tokens that these are begun with


class ReasoningPlace(Enum):
    """Where in the reasoning a prompt ends."""

    BEGUN = "begun"
    OVER = "over"
    POSSIBLE = "possible"  # the message may begin with it


@dataclass(frozen=True)
class MessageFormat:
    """How a model writes its messages; None: it does not."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a parser has to see, also where they are special tokens."""
        reasoning, calls = self.reasoning, self.calls
        found = [] if reasoning is None else [reasoning.open, reasoning.close, *reasoning.marks]
        return tuple(filter(None, found + ([] if calls is None else [calls.open, calls.close, *calls.marks])))


class Text(msgspec.Struct, frozen=True):
    """Of a message, for the user."""

    text: str
    tokens: tuple[SampledToken, ...] = ()  # that it is written with, where somebody asks for their log-probabilities


class Reasoning(msgspec.Struct, frozen=True):
    """What the model thinks before it answers."""

    text: str


Piece = Text | Reasoning | Call | Arguments
_Place = Literal["text", "reasoning", "call", "arguments"]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces, neighbours of one kind as one; but calls, each of which is whole."""
    whole: list[Piece] = []
    for kind, group in groupby(pieces, type):
        same = list(group)
        if kind is Call:
            whole += same
            continue
        one = kind("".join(piece.text for piece in same if not isinstance(piece, Call)))
        if isinstance(one, Text):
            tokens = chain.from_iterable(piece.tokens for piece in same if isinstance(piece, Text))
            one = Text(one.text, tuple(tokens))
        whole.append(one)
    return whole


class MessageParser:
    """Takes a message's text in pieces of any size: the same text gives the same message, wherever it is cut.

    A call of a tool that may be called comes with its name, and then its arguments as they are written, where the form
    has them as JSON; it is one then, whatever follows. Other calls, and those in the reasoning, which they end, come
    whole, once they have ended. What looks like a call and cannot be read stays text, as it was written. White space
    between the parts of a message is of none of them.

    Args:
        form: the model's.
        schemas: of the tools that may be called; None: there are none, and what looks like a call is text.
        in_reasoning: the prompt has begun the reasoning.
        several: calls after the first are given, too.
        only_first: nothing but reasoning at the beginning is looked for.
    """

    def __init__(
        self,
        form: MessageFormat,
        schemas: Schemas | None = None,
        *,
        in_reasoning: bool = False,
        several: bool = True,
        only_first: bool = False,
    ) -> None:
        self._several, self._only_first = several, only_first
        self._reasoning, self._schemas = form.reasoning, schemas or {}
        self._calls = form.calls if schemas and not only_first else None
        self._place: _Place = "reasoning" if in_reasoning else "text"
        self._outside: _Place = self._place  # of a call: what it goes back to if it is none
        self._rest = ""  # what was not looked at, or may go on as a mark
        self._is_at_start = in_reasoning  # or behind a mark: white space is left out
        self._has_reasoning = in_reasoning
        self._has_text = False  # for the user; calls without a mark come before any
        self._call: list[str] = []  # a call, as far as it was looked at: first its mark
        self._quote = ""  # that a text in a call ends with
        self._is_whole = False  # whether this call is read when it has ended
        self._is_behind = False  # whether arguments have come since the mark of a call
        self._is_wanted = True  # whether this call is given, or is one too many
        self._depth = 0  # of lists and objects, in arguments
        self.num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether what comes next may go on with the reasoning."""
        return "reasoning" in (self._place, self._outside if self._place == "call" else None)

    @property
    def num_held(self) -> int:
        """Characters at the end of what was pushed that may still become text."""
        return len(self._rest) + (sum(map(len, self._call)) if self._place == "call" else 0)

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        return self._take()

    def end(self) -> list[Piece]:
        """What was held back. Nothing comes after it."""
        pieces = self._take()
        if self._place == "call":
            body = "".join(self._call[1:]) + self._rest
            self._finish(pieces, body, "")
        elif self._place == "arguments":
            self._give(pieces, self._rest)
        else:
            self._emit(pieces, self._rest)
        self._rest = ""
        return pieces

    def _take(self) -> list[Piece]:
        pieces: list[Piece] = []
        while self._take_part(pieces):
            pass
        return pieces

    def _take_part(self, pieces: list[Piece]) -> bool:
        """Up to where another part may begin; whether that came."""
        match self._place:
            case "call":
                return self._take_call(pieces)
            case "arguments":
                return self._take_arguments(pieces)
        return self._take_text(pieces)

    def _take_text(self, pieces: list[Piece]) -> bool:
        """Up to a mark; whether there was one."""
        if self._may_begin_calls():
            return True
        if self._only_first and not self._may_have_reasoning():
            self._emit(pieces, self._rest)
            self._rest = ""
            return False
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
            self._is_at_start = self._has_reasoning = True
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

    def _may_have_reasoning(self) -> bool:
        """Of a message that has it at the beginning or nowhere."""
        if self._place == "reasoning":
            return True
        if self._reasoning is None or self._has_text or self._has_reasoning:
            return False
        lead, mark = self._rest.lstrip(), self._reasoning.open
        return lead.startswith(mark) or mark.startswith(lead)

    def _begin_call(self, mark: str) -> None:
        """mark: with the white space before it, which is text if this is no call."""
        self._outside, self._place = self._place, "call"
        self._call, self._quote = [mark], ""
        self._is_behind, self._is_whole = False, self._outside == "reasoning"

    def _take_call(self, pieces: list[Piece]) -> bool:
        """Up to the end of a call; whether it came."""
        assert self._calls is not None
        if self._may_begin_arguments(pieces):
            return True
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
        elif self._is_behind:  # another call begins
            self._finish(pieces, body, "")
            self._rest = mark + self._rest
        else:  # another call begins, or the reasoning ends: this was none
            self._is_at_start = False
            self._place = self._outside
            text = self._call[0] + body
            self._emit(pieces, text.rstrip())
            self._rest = text[len(text.rstrip()) :] + mark + self._rest
        return True

    def _may_begin_arguments(self, pieces: list[Piece]) -> bool:
        """Whether arguments begin that are given as they come."""
        streamed = self._calls.streamed if self._calls is not None else None
        if streamed is None or self._is_whole:
            return False
        seen = "".join(self._call[1:]) + self._rest
        found = streamed.head.match(seen[:MAX_HEAD_CHARS])
        if found is None or found[1] not in self._schemas:
            self._is_whole = found is not None or len(seen) >= MAX_HEAD_CHARS
            return False
        self._rest, self._call = seen[found.end() :], [""]
        self._place, self._depth, self._quote = "arguments", 0, ""
        self._is_behind, self._is_wanted = True, self._several or not self.num_calls
        if self._is_wanted:
            self.num_calls += 1
            pieces.append(Call(found[1], ""))
        return True

    def _take_arguments(self, pieces: list[Piece]) -> bool:
        """Up to the brace that closes them, or a mark that ends the call without it; whether that came."""
        marks, start = self._marks(), 0
        ends = (*marks, *'"[]{}')
        while True:
            found = _IN_TEXT.search(self._rest, start) if self._quote else _first(ends, self._rest, start)
            if found is None:
                held = int(self._rest.endswith("\\")) if self._quote else _held(marks, self._rest, space=False)
                end = len(self._rest) - min(held, len(self._rest) - start)
                self._give(pieces, self._rest[:end])
                self._rest = self._rest[end:]
                return False
            start, mark = found.end(), found[0]
            if mark == '"':
                self._quote = "" if self._quote else mark
            elif not self._quote:
                self._depth += (mark in "[{") - (mark in "]}")
                if self._depth == 0 or mark in marks:
                    break
        end = found.start() if mark in marks else found.end()
        self._give(pieces, self._rest[:end])
        self._rest, self._place = self._rest[end:], "call"
        return True

    def _give(self, pieces: list[Piece], text: str) -> None:
        """More of the arguments of a call."""
        if text and self._is_wanted:
            pieces.append(Arguments(text))

    def _finish(self, pieces: list[Piece], body: str, close: str) -> None:
        """A call has ended, or what looked like one."""
        assert self._calls is not None
        if self._is_behind:
            assert self._calls.streamed is not None
            self._place, self._is_at_start = "text", True
            if not self._calls.streamed.rest.fullmatch(body):
                self._emit(pieces, body + close)
                self._is_at_start = False
            return
        try:
            is_cut = not close and not body.rstrip().endswith(self._calls.before_end)
            calls = [] if is_cut else self._calls.read(body.strip(), self._schemas)
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
        if place in ("call", "arguments") and calls is not None:
            marks = [calls.open, calls.close] if calls.close else []
        if reasoning is not None:
            within = self._outside if place in ("call", "arguments") else place
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


_IN_TEXT = re.compile(r'\\.|"', re.DOTALL)  # of JSON: what ends it, unless it is escaped


def _held(marks: Sequence[str], text: str, *, space: bool = True) -> int:
    """How many characters at the end may be the beginning of a mark, or white space before one.

    Args:
        space: white space is held back.
    """
    longest = max(map(len, marks), default=1)
    for count in range(min(longest - 1, len(text)), 0, -1):
        if any(mark.startswith(text[-count:]) for mark in marks):
            break
    else:
        count = 0
    before = text[: len(text) - count]
    return count + (len(before) - len(before.rstrip()) if space else 0)
