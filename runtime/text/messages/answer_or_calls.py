"""Parses a message that is an answer of some structure, or calls instead of it."""

import re

from enginewright.runtime.text.messages.calls import CallOutcomes, Schemas
from enginewright.runtime.text.messages.parser import MessageFormat, MessageParser, Piece, ReasoningFormat, TextPiece
from enginewright.runtime.text.messages.source import Reading

MAX_HEAD_CHARS = 256  # characters of a message within which calls are recognized
_SPACE = re.compile(r"\s+")


class AnswerParser(MessageParser):
    """Parses an answer of some structure after reasoning: all of the answer is text, whatever marks it contains.

    Args:
        reasoning: the format of the reasoning; None if the model has none.
        in_reasoning: as of a MessageParser.
    """

    def __init__(self, reasoning: ReasoningFormat | None, *, in_reasoning: bool) -> None:
        super().__init__(MessageFormat(reasoning), in_reasoning=in_reasoning)

    def _read(self) -> Reading[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
        if not self._in_reasoning:
            yield from self._source.pass_on_until(self._release)
        self._source.take_rest()  # may be the prefix of a mark
        self._release(is_whole=True)

    def _read_reasoning(self, reasoning: ReasoningFormat) -> Reading[None]:
        source = self._source
        if not self._in_reasoning:
            yield from source.space()
            if not (yield from source.has(reasoning.open)):
                return
            self._begin(in_reasoning=True)
        if (yield from source.pass_on_until(self._release, reasoning.close)):
            yield from source.has(reasoning.close)
            self._begin(in_reasoning=False)


class AnswerOrCallsParser:
    """Parses a message that after its reasoning is an answer or calls, which its first characters decide.

    It is used like a MessageParser. All of an answer is text, whatever marks it contains: to parse it as calls would
    change JSON that follows its schema.

    Args:
        form: the format of a model that calls tools.
        schemas: as of a MessageParser.
        in_reasoning: as of a MessageParser.
        several: as of a MessageParser.
    """

    def __init__(self, form: MessageFormat, schemas: Schemas, *, in_reasoning: bool, several: bool) -> None:
        assert form.calls is not None
        written = form.calls.written
        before = written.first + written.before_name
        begins = [before + name + written.before_arguments for name in schemas]  # starts of calls without a mark
        self._openings = tuple(_SPACE.sub("", one) for one in ([form.calls.open] if form.calls.open else begins))
        self._reasoning = AnswerParser(form.reasoning, in_reasoning=in_reasoning)
        self._calls = MessageParser(MessageFormat(None, form.calls), schemas, several=several)
        self._begun = ""  # text that may start either of them
        self._is_answer: bool | None = None  # None while unknown

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._calls.num_calls

    @property
    def outcomes(self) -> CallOutcomes:
        """Numbers of calls that have ended."""
        return self._calls.outcomes

    @property
    def may_call(self) -> bool:
        """True if there are tools."""
        return self._calls.may_call

    @property
    def in_reasoning(self) -> bool:
        """True while the reasoning may go on."""
        return self._reasoning.in_reasoning

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the input that may still become text."""
        return self._reasoning.num_held + len(self._begun) + self._calls.num_held

    def push(self, text: str) -> list[Piece]:
        """Parses more text, and returns the new pieces."""
        return self._sort(self._reasoning.push(text))

    def end(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the pieces that were held back. Nothing follows.

        Args:
            is_cut: as of a MessageParser.
        """
        pieces = self._sort(self._reasoning.end(is_cut=is_cut))
        return pieces + self._calls.push(self._begun) + self._calls.end(is_cut=is_cut)

    def _sort(self, pieces: list[Piece]) -> list[Piece]:
        """The pieces, with their texts parsed as the answer or as calls."""
        found: list[Piece] = []
        for piece in pieces:
            found += self._take(piece.text) if isinstance(piece, TextPiece) else [piece]
        return found

    def _take(self, text: str) -> list[Piece]:
        if self._is_answer is None:
            self._begun += text
            begun = _SPACE.sub("", self._begun[:MAX_HEAD_CHARS])
            is_calls = begun.startswith(self._openings)
            may_be_calls = len(self._begun) < MAX_HEAD_CHARS and any(one.startswith(begun) for one in self._openings)
            if may_be_calls and not is_calls:
                return []
            self._is_answer = not is_calls
            text, self._begun = self._begun, ""
        return [TextPiece(text)] if self._is_answer else self._calls.push(text)
