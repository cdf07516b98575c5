"""Base class of responses whose answer is a list of parts in their order: reasoning, texts and calls."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex

from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.form import Choice, Form, Include, Usage, new_call_id
from enginewright.runtime.server.token_aligner import TokenAligner
from enginewright.runtime.text.messages.calls import ArgumentsPiece, CallPiece
from enginewright.runtime.text.messages.parser import Piece, ReasoningPiece, TextPiece
from enginewright.runtime.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Part:
    """A part of an answer while it is generated."""

    index: int  # number of the part in the answer
    kind: type[Piece]  # class of its pieces: TextPiece, ReasoningPiece or CallPiece
    name: str = ""  # name of the tool, for a call
    id: str = field(default_factory=lambda: token_hex(12))  # random id of the part
    call_id: str = field(default_factory=new_call_id)  # id of the call
    texts: list[str] = field(default_factory=list)  # texts in their order; for a call its arguments as JSON
    # tokens of each text, if log-probabilities are included
    tokens: list[Sequence[SampledToken]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Complete text so far."""
        return "".join(self.texts)


class PartsForm(Form):
    """The response to one prompt with one answer; an instance writes one response."""

    def __init__(self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, include: Include) -> None:
        super().__init__(id, model, fingerprint, tokenizer, include)
        self._parts: list[Part] = []
        self._aligner = TokenAligner() if include.logprobs else None

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """Events for a delta."""
        events = []
        for piece in choice.push(delta, self._aligner):
            if isinstance(piece, ReasoningPiece) and not self.include.reasoning:
                continue
            last = self._parts[-1] if self._parts else None
            part = self._add(piece)
            if part is not last:
                events += [self._end(last, is_cut=False)] if last is not None else []
                events.append(self._begin(part))
            events += [self._growth(part)] if part.texts[-1] else []
        return b"".join(events)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Events at the end of a stream."""
        (choice,) = choices
        ends = [self._end(one, is_cut=choice.finish_reason == "length") for one in self._parts[-1:]]
        return b"".join((*ends, self._closing(choice, usage)))

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The response in one piece."""
        (choice,) = choices
        for delta in choice.deltas:
            for piece in choice.push(delta, self._aligner):
                if not isinstance(piece, ReasoningPiece) or self.include.reasoning:
                    self._add(piece)
        return self._body(choice, usage)

    def _add(self, piece: Piece) -> Part:
        """Adds a piece, and returns its part. Neighbours of one kind are one part, except for calls."""
        if isinstance(piece, CallPiece):
            self._parts.append(Part(len(self._parts), CallPiece, piece.name))
        elif not isinstance(piece, ArgumentsPiece) and (not self._parts or self._parts[-1].kind is not type(piece)):
            self._parts.append(Part(len(self._parts), type(piece)))
        part = self._parts[-1]
        part.texts.append(piece.arguments if isinstance(piece, CallPiece) else piece.text)
        part.tokens += [piece.tokens] if isinstance(piece, TextPiece) else []
        return part

    @abstractmethod
    def _begin(self, part: Part) -> bytes:
        """Events before a part's first text."""

    @abstractmethod
    def _growth(self, part: Part) -> bytes:
        """The event for a part's last text."""

    @abstractmethod
    def _end(self, part: Part, *, is_cut: bool) -> bytes:
        """Events after a part's last text.

        Args:
            part: the part.
            is_cut: whether the part was cut off at the maximum number of tokens.
        """

    @abstractmethod
    def _closing(self, choice: Choice, usage: Usage) -> bytes:
        """Events at the end of a stream, after those of the last part."""

    @abstractmethod
    def _body(self, choice: Choice, usage: Usage) -> bytes:
        """The response in one piece, once all parts are added."""
