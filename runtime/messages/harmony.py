"""gpt-oss: a message is several, each with a channel, and maybe a tool that it is for (OpenAI's harmony format).

<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.NAME<|message|>{…}<|call|>
"""

import re
from collections.abc import Sequence

from enginewright.runtime.messages.calls import Arguments, Call, CallFormat, Schemas, WrittenCalls, json_call, load
from enginewright.runtime.messages.parser import Piece, Reasoning, Text

_MESSAGE = "<|message|>"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "<|end|>", "<|call|>", "<|return|>")
_BODY_ENDS = re.compile(r"<\|(?:start|channel|end|call|return)\|>")
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# What the messages of an answer begin with: those before the last one, what stands behind each of these, and the last
# one, unless it is a call.
PREAMBLES = (f"<|channel|>analysis{_MESSAGE}", f"<|channel|>commentary{_MESSAGE}")
NEXT = "<|end|><|start|>assistant"
FINAL = f"<|channel|>final{_MESSAGE}"
MAX_HEADER_CHARS = 1024  # what goes on without a body is no header
_LONGEST = max(map(len, _MARKS))


def _read(text: str, schemas: Schemas) -> list[Call]:
    """A header and a body."""
    header, _, body = text.partition(_MESSAGE)
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        raise ValueError("for no tool")
    return [json_call({"name": recipient[1], "arguments": load(body.strip() or "{}")})]


HARMONY = CallFormat(
    "harmony",
    ("<|channel|>", _MESSAGE, "analysis"),
    _read,
    # A call ends the answer: <|call|> is one of the model's ends.
    WrittenCalls("<|channel|>commentary to=functions.", f" <|constrain|>json{_MESSAGE}", "", between=None),
    marks=_MARKS,
)


class HarmonyParser:
    """As MessageParser. What comes before the first mark is text.

    Arguments of a tool that may be called come as they are, from their brace on; white space behind them is left out.
    """

    def __init__(self, schemas: Schemas | None = None, *, several: bool = True) -> None:
        self._schemas, self._several = schemas, several
        self._rest = ""  # what was not looked at, or may go on as a mark
        self._header: str | None = None  # of the message that goes on, as far as it came; None: it has none
        self._call: list[str] | None = None  # its body, if it is for a tool, as far as it was not given
        self._is_given: bool | None = None  # whether it is given as it comes; None: nothing has come of it
        self._is_wanted = True  # or it is one call too many
        self._in_header = False
        self.num_calls = 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the message that goes on is an analysis."""
        return self._header is not None and self._call is None and _ANALYSIS.search(self._header) is not None

    @property
    def num_held(self) -> int:
        """Characters at the end of what was pushed that may still become text."""
        header = len(self._header or "")
        if self._in_header:
            return header + len(self._rest)
        call = 0 if self._call is None else sum(map(len, self._call))
        return len(self._rest) + call + (header + len(_MESSAGE) if self._call is not None and not self._is_given else 0)

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        pieces: list[Piece] = []
        while self._take_header(pieces) if self._in_header else self._take_body(pieces):
            pass
        return pieces

    def end(self) -> list[Piece]:
        """What was held back. Nothing comes after it."""
        pieces: list[Piece] = []
        if self._in_header:
            self._in_header = False
            pieces += _text((self._header or "") + self._rest)
        else:
            self._emit(pieces, self._rest)
            self._finish(pieces)
        self._rest = ""
        return pieces

    def _take_header(self, pieces: list[Piece]) -> bool:
        """Up to the body; whether it begins, or what came is no header."""
        start = max(0, len(self._header or "") - len(_MESSAGE))
        self._header = (self._header or "") + self._rest
        self._rest = ""
        place = self._header.find(_MESSAGE, start)
        if place < 0 and len(self._header) > MAX_HEADER_CHARS:
            pieces += _text(self._header)
            self._header, self._in_header = None, False
            return True
        if place < 0:
            return False
        self._rest = self._header[place + len(_MESSAGE) :]
        self._header = self._header[:place]
        self._in_header = False
        self._call = [] if _RECIPIENT.search(self._header) else None
        return True

    def _take_body(self, pieces: list[Piece]) -> bool:
        """Up to the next header; whether it begins."""
        found = _BODY_ENDS.search(self._rest)
        if found is None:
            kept = next(
                (
                    count
                    for count in range(min(_LONGEST - 1, len(self._rest)), 0, -1)
                    if any(mark.startswith(self._rest[-count:]) for mark in _MARKS)
                ),
                0,
            )
            self._emit(pieces, self._rest[: len(self._rest) - kept])
            self._rest = self._rest[len(self._rest) - kept :]
            return False
        self._emit(pieces, self._rest[: found.start()])
        self._finish(pieces)
        self._rest = self._rest[found.end() :]
        if found[0] in ("<|start|>", "<|channel|>"):
            self._header, self._in_header = found[0], True
        return True

    def _emit(self, pieces: list[Piece], text: str) -> None:
        if self._call is not None:
            self._give(pieces, text)
        elif text and self.in_reasoning:
            pieces.append(Reasoning(text))
        else:
            pieces += _text(text)

    def _give(self, pieces: list[Piece], text: str) -> None:
        """More of a call's body. White space is kept, since it may be behind the arguments."""
        assert self._header is not None and self._call is not None
        self._call.append(text)
        if not text.strip():
            return
        if self._is_given is None:
            recipient = _RECIPIENT.search(self._header)
            name = recipient[1] if recipient is not None else ""
            self._is_given = name in (self._schemas or ()) and text.lstrip().startswith("{")
            self._is_wanted = self._several or not self.num_calls
            if self._is_given and self._is_wanted:
                self._call = [text.lstrip()]
                self.num_calls += 1
                pieces.append(Call(name, ""))
        if self._is_given:
            body = "".join(self._call)
            self._call = [body[len(body.rstrip()) :]]
            pieces += [Arguments(body.rstrip())] if self._is_wanted else []

    def _finish(self, pieces: list[Piece]) -> None:
        """A message has ended."""
        if self._call is not None and not self._is_given:
            whole = f"{self._header}{_MESSAGE}{''.join(self._call)}"
            try:
                calls = _read(whole, self._schemas or {}) if self._schemas else []
            except ValueError:
                calls = []
            if not calls:
                pieces += _text(whole)
            elif self._several or not self.num_calls:
                pieces += calls
                self.num_calls += 1
        self._header, self._call, self._is_given = None, None, None


def _text(text: str) -> Sequence[Piece]:
    return [Text(text)] if text else []
