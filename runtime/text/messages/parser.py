"""Parses a model's message while it is generated into reasoning, text and calls."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, groupby

import msgspec

from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.text.messages.calls import (
    ArgumentsPiece,
    CallFormat,
    CallOutcomes,
    CallPiece,
    FoundCalls,
    Schemas,
    check_calls,
    is_object,
)
from enginewright.runtime.text.messages.source import MessageSource, Reading


@dataclass(frozen=True)
class ReasoningFormat:
    """Marks around the reasoning before an answer."""

    open: str  # mark before the reasoning
    close: str  # mark after the reasoning
    marks: tuple[str, ...] = ()  # tokens that these marks start with


class ReasoningPlace(Enum):
    """Position in the reasoning at the end of a prompt."""

    BEGUN = "begun"  # the prompt starts the reasoning
    OVER = "over"  # the reasoning is over, or there is none
    POSSIBLE = "possible"  # the message may start with reasoning


@dataclass(frozen=True)
class MessageFormat:
    """Format of a model's messages."""

    reasoning: ReasoningFormat | None = None  # format of reasoning; None if the model has none
    calls: CallFormat | None = None  # format of calls; None if the model makes none

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a parser must see, even if they are special tokens."""
        reasoning, calls = self.reasoning, self.calls
        found = [] if reasoning is None else [reasoning.open, reasoning.close, *reasoning.marks]
        return tuple(filter(None, found + ([] if calls is None else [calls.open, calls.close, *calls.marks])))


class TextPiece(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str  # text
    tokens: tuple[SampledToken, ...] = ()  # tokens of the text, if log-probabilities are requested


class ReasoningPiece(msgspec.Struct, frozen=True):
    """Text of the model's reasoning before its answer."""

    text: str  # text


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Joins neighbouring pieces of one kind, except for calls."""
    whole: list[Piece] = []
    for kind, group in groupby(pieces, type):
        same = list(group)
        if kind is CallPiece:
            whole += same
            continue
        one = kind("".join(piece.text for piece in same if not isinstance(piece, CallPiece)))
        if isinstance(one, TextPiece):
            tokens = chain.from_iterable(piece.tokens for piece in same if isinstance(piece, TextPiece))
            one = TextPiece(one.text, tuple(tokens))
        whole.append(one)
    return whole


class PieceParser(ABC):
    """Parses a message in pieces of any size; the result does not depend on where the text is cut.

    Args:
        schemas: schemas of the tools that may be called; None if there are none, so that everything like a call is
            text.
        several: whether calls after the first one count.

    Attributes:
        num_calls: number of calls so far, including one that is not complete.
        outcomes: numbers of calls that have ended.
        may_call: True if there are tools.
    """

    def __init__(self, schemas: Schemas | None, *, several: bool) -> None:
        self._schemas, self._several = schemas or {}, several
        self._source = MessageSource()
        self._pieces: list[Piece] = []  # pieces that were not given out yet
        self._found: FoundCalls | None = None  # the calls that are being read
        self._is_wanted = True  # False if the latest call is one too many
        self._reading = self._read()
        self.num_calls = 0
        self.outcomes, self.may_call = CallOutcomes(), bool(schemas)
        self._arguments: list[list[str]] = []  # arguments of each call that is read or was read last, in parts

    @property
    @abstractmethod
    def in_reasoning(self) -> bool:
        """True if the next text may continue the reasoning."""

    @abstractmethod
    def _read(self) -> Reading[None]:
        """Reads the message."""

    @property
    def num_held(self) -> int:
        """Number of characters at the end of the input that may still become text."""
        return self._source.num_held

    def push(self, text: str) -> list[Piece]:
        """Parses more text, and returns the new pieces."""
        self._source.feed(text)
        return self._go_on()

    def end(self, *, is_cut: bool = False) -> list[Piece]:
        """Returns the pieces that were held back. Nothing follows.

        Args:
            is_cut: whether the message was cut off. Then the start of a call is no text, and arguments are given out as
                far as they were generated.
        """
        self._source.is_ended, self._source.is_cut = True, is_cut
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._reading, None)
        if self._found is not None and self._found.is_certain:
            self._give(self._found.take())
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read_calls(
        self, found: FoundCalls, reading: Reading[None], *, may_be_cut: bool, is_marked: bool
    ) -> Reading[bool]:
        """Reads calls and gives them out.

        Args:
            found: collects the calls.
            reading: the reader of the calls.
            may_be_cut: whether a text that is no call yet is dropped if the message is cut off.
            is_marked: whether a mark of calls precedes, so that a text that is no call counts as a malformed one.

        Returns:
            True if the text consists only of calls; otherwise the source still has it.
        """
        self._found, self._arguments = found, []
        try:
            yield from reading
            calls = found.end()
            if not found.is_certain:
                check_calls(calls)
        except ValueError:
            source = self._source
            is_over = source.met_end and (found.is_certain or (source.is_cut and may_be_cut))
            if is_over:
                source.take_rest()
            if is_over and source.is_cut:
                self._give(found.end())
            elif found.is_certain:
                self._give(found.take())
            if is_over or found.is_certain or (may_be_cut and (is_marked or found.has_name)):
                self._count_calls(is_one_missing=not self._arguments or found.has_name_only)
            return is_over
        finally:
            self._found = None
        self._give(calls)
        self._count_calls()
        return True

    def _count_calls(self, *, is_one_missing: bool = False) -> None:
        """Counts the calls that were read last. One is complete if its arguments are an object.

        Args:
            is_one_missing: whether there is one more, which was not given out.
        """
        num_complete = sum(is_object("".join(parts)) for parts in self._arguments)
        num_broken = len(self._arguments) - num_complete + (is_one_missing and (self._several or not self.num_calls))
        self.outcomes.parsed += num_complete
        if self._source.is_cut and self._source.met_end:
            self.outcomes.cut += num_broken
        else:
            self.outcomes.malformed += num_broken

    def _give(self, calls: Sequence[CallPiece | ArgumentsPiece]) -> None:
        for piece in calls:
            if isinstance(piece, CallPiece):
                self._is_wanted = self._several or not self.num_calls
                self.num_calls += self._is_wanted
                self._arguments += [[]] if self._is_wanted else []
            if self._is_wanted:
                self._pieces.append(piece)
                self._arguments[-1].append(piece.arguments if isinstance(piece, CallPiece) else piece.text)


class MessageParser(PieceParser):
    """Parses messages with marks around their parts.

    If the format writes arguments as JSON, a call of a known tool is given out with its name, and then its arguments as
    they are written; it stays a call, whatever follows. Other calls, and those in the reasoning, which they end, are
    given out complete. Text that looks like a call and cannot be parsed stays text. White space between the parts of a
    message belongs to none of them.

    Args:
        form: the model's message format.
        schemas: as of a PieceParser.
        in_reasoning: whether the prompt has started the reasoning.
        several: as of a PieceParser.
    """

    def __init__(
        self,
        form: MessageFormat,
        schemas: Schemas | None = None,
        *,
        in_reasoning: bool = False,
        several: bool = True,
    ) -> None:
        super().__init__(schemas, several=several)
        self._reasoning, self._calls = form.reasoning, form.calls if schemas else None
        self._in_reasoning = in_reasoning
        self._is_at_start = in_reasoning  # True at the start and after a mark, where white space is dropped
        self._has_text = False  # True once there is text for the user; calls without a mark must precede it

    @property
    def in_reasoning(self) -> bool:
        """True if the next text may continue the reasoning."""
        return self._in_reasoning

    def _read(self) -> Reading[None]:
        source, calls = self._source, self._calls
        while True:
            if calls is not None and calls.begins and not self._has_text and not self._in_reasoning:
                yield from source.space()
                if (yield from source.starts_with(calls.begins)):
                    yield from self._read_block(calls, is_marked=False)
            mark = yield from source.pass_on_until(self._release, *self._marks())
            if not mark:
                break
            yield from source.has(mark)
            if calls is not None and mark == calls.open:
                yield from self._read_block(calls, is_marked=True)
            else:
                self._begin(in_reasoning=not self._in_reasoning)
        rest = source.take_rest()  # may be the prefix of a mark
        if rest and source.is_cut and not self._in_reasoning and calls is not None and calls.open.startswith(rest):
            source.drop()
        self._release(is_whole=True)

    def _marks(self) -> tuple[str, ...]:
        """Marks that may come next."""
        marks = [] if self._calls is None else [self._calls.open]
        if self._reasoning is not None:
            marks.append(self._reasoning.close if self._in_reasoning else self._reasoning.open)
        return tuple(filter(None, marks))

    def _begin(self, *, in_reasoning: bool) -> None:
        """Starts another part of the message after a mark."""
        self._source.drop()
        self._in_reasoning, self._is_at_start = in_reasoning, True

    def _read_block(self, calls: CallFormat, *, is_marked: bool) -> Reading[None]:
        """Reads calls, or text if there are none.

        Args:
            calls: the format of the calls.
            is_marked: whether their mark precedes.
        """
        source, reasoning = self._source, self._reasoning
        found = FoundCalls(source, self._schemas, is_streamed=calls.is_streamed and not self._in_reasoning)
        closing = (calls.open, calls.close) if calls.close else ()
        source.stops = (*closing, reasoning.close) if reasoning is not None and self._in_reasoning else closing
        block = self._read_whole_block(calls, found)
        may_be_cut = not self._in_reasoning
        if (yield from self._read_calls(found, block, may_be_cut=may_be_cut, is_marked=is_marked)):
            self._begin(in_reasoning=False)
        else:
            self._is_at_start |= found.is_certain
            self._release()

    def _read_whole_block(self, calls: CallFormat, found: FoundCalls) -> Reading[None]:
        """Reads calls and their end: a mark, the next call, or the end of the message."""
        source = self._source
        yield from calls.read(source, found)
        if calls.open and not calls.close:
            return
        yield from source.space()
        if calls.close and ((yield from source.has(calls.close)) or (yield from source.starts_with(calls.open))):
            return
        if not (yield from source.at_end()):
            raise ValueError("more than calls")

    def _release(self, text: str = "", *, is_whole: bool = False) -> None:
        """Gives out the text that was read, except for white space at its end, which may precede a mark.

        Args:
            text: the text that was read last.
            is_whole: whether the message ends here.
        """
        if text.isspace():
            return
        kept = self._source.take_back()
        given = kept if is_whole else kept.rstrip()
        self._source.keep(kept[len(given) :])
        if self._is_at_start:
            given = given.lstrip()
        if given:
            self._is_at_start = False
            self._has_text |= not self._in_reasoning
            self._pieces.append(ReasoningPiece(given) if self._in_reasoning else TextPiece(given))
