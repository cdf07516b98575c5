"""gpt-oss: several messages per answer, each with a channel and maybe a tool as recipient (OpenAI's harmony format)."""

import re

from enginewright.runtime.text.messages.calls import CallFormat, FoundCalls, Schemas, WrittenCalls
from enginewright.runtime.text.messages.json_text import read_object
from enginewright.runtime.text.messages.parser import PieceParser, ReasoningPiece, TextPiece
from enginewright.runtime.text.messages.source import MessageSource, Reading

_MESSAGE = "<|message|>"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE, "<|end|>", "<|call|>", "<|return|>")
_BEGINNINGS = ("<|start|>", "<|channel|>")  # marks that start a header
_ENDS = (*_BEGINNINGS, "<|end|>", "<|call|>", "<|return|>")  # marks that end a body
_ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
# Headers of an answer's messages before the last one, the text after each of these messages, and the header of the last
# one unless it is a call.
PREAMBLES = (f"<|channel|>analysis{_MESSAGE}", f"<|channel|>commentary{_MESSAGE}")
NEXT = "<|end|><|start|>assistant"
FINAL = f"<|channel|>final{_MESSAGE}"
MAX_HEADER_CHARS = 1024  # a longer text without a body is no header


def _read_arguments(source: MessageSource, found: FoundCalls) -> Reading[None]:
    """Reads the body of a call after its header."""
    yield from source.space()
    if (yield from source.at_end()) or (yield from source.starts_with(*_ENDS)):
        found.add("{}")
        return
    yield from read_object(source, found.add, *_ENDS, in_texts=_ENDS)
    yield from source.space()
    if not (yield from source.starts_with(*_ENDS)) and not (yield from source.at_end()):
        raise ValueError("more than arguments")


HARMONY = CallFormat(
    "harmony",
    ("<|channel|>", _MESSAGE, "analysis"),
    _read_arguments,
    # A call ends the answer: <|call|> is one of the model's ends.
    WrittenCalls("<|channel|>commentary to=functions.", f" <|constrain|>json{_MESSAGE}", "", between=None),
    is_streamed=True,
    marks=_MARKS,
)


class HarmonyParser(PieceParser):
    """Parses such messages. Text before the first mark is text of the answer.

    Arguments of a tool that may be called are given out as they are written, from their brace on.
    """

    def __init__(self, schemas: Schemas | None = None, *, several: bool = True) -> None:
        super().__init__(schemas, several=several)
        self._in_reasoning = False

    @property
    def in_reasoning(self) -> bool:
        """True if the current message is an analysis."""
        return self._in_reasoning

    def _read(self) -> Reading[None]:
        source, mark = self._source, ""
        while True:
            if mark in _BEGINNINGS:
                yield from self._read_header(mark)
            mark = yield from source.pass_on_until(self._release, *_ENDS)
            if not mark:
                break
            self._in_reasoning = False
            yield from source.has(mark)
            if mark not in _BEGINNINGS:
                source.drop()
        rest = source.take_rest()  # may be the prefix of a mark
        if rest and source.is_cut and self._schemas and not self._in_reasoning:
            source.drop()
        self._release()

    def _read_header(self, begun: str) -> Reading[None]:
        """Reads the rest of a header, and the body of a call."""
        source, header = self._source, [begun]
        mark = yield from source.pass_on_until(header.append, _MESSAGE, max_chars=MAX_HEADER_CHARS)
        if not mark:
            if source.met_end:
                source.take_rest()
            if source.met_end and source.is_cut:
                source.drop()
            self._release()
            return
        yield from source.has(mark)
        text = "".join(header)
        recipient = _RECIPIENT.search(text)
        if recipient is None:
            source.drop()
            self._in_reasoning = _ANALYSIS.search(text) is not None
            return
        found = FoundCalls(source, self._schemas, is_streamed=True)
        found.begin(recipient[1])
        body = _read_arguments(source, found)
        if self._schemas and (yield from self._read_calls(found, body, may_be_cut=True, is_marked=True)):
            source.drop()
        else:
            self._release()

    def _release(self, _: str = "") -> None:
        """Gives out the text that was read."""
        if text := self._source.take_back():
            self._pieces.append(ReasoningPiece(text) if self._in_reasoning else TextPiece(text))
