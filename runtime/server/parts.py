"""Responses whose answer is a list of parts in the order in which they came: reasoning, texts and calls."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from secrets import token_hex

from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.sampling.sampling import SampledToken
from enginewright.runtime.server.form import Choice, Form, Include, Usage, new_call_id
from enginewright.runtime.server.token_aligner import TokenAligner
from enginewright.runtime.text.messages.calls import Arguments, Call
from enginewright.runtime.text.messages.parser import Piece, Reasoning, Text
from enginewright.runtime.text.tokenizer import Tokenizer


@dataclass(eq=False)
class Part:
    """A part of an answer while it is generated."""

    index: int
    kind: type[Piece]
    name: str = ""  # of the tool, for a call
    id: str = field(default_factory=lambda: token_hex(12))
    call_id: str = field(default_factory=new_call_id)
    texts: list[str] = field(default_factory=list)  # for a call its arguments, as JSON
    tokens: list[Sequence[SampledToken]] = field(default_factory=list)  # of each of its texts, if they were asked for

    @property
    def text(self) -> str:
        return "".join(self.texts)


class PartsForm(Form):
    """The response to one prompt with one answer; a form is good for one response."""

    def __init__(self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, include: Include) -> None:
        super().__init__(id, model, fingerprint, tokenizer, include)
        self._parts: list[Part] = []
        self._aligner = TokenAligner() if include.logprobs else None

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        events = []
        for piece in choice.push(delta, self._aligner):
            if isinstance(piece, Reasoning) and not self.include.reasoning:
                continue
            last = self._parts[-1] if self._parts else None
            part = self._add(piece)
            if part is not last:
                events += [self._end(last, is_cut=False)] if last is not None else []
                events.append(self._begin(part))
            events += [self._growth(part)] if part.texts[-1] else []
        return b"".join(events)

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        ends = [self._end(one, is_cut=choice.finish_reason == "length") for one in self._parts[-1:]]
        return b"".join((*ends, self._closing(choice, usage)))

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        (choice,) = choices
        for delta in choice.deltas:
            for piece in choice.push(delta, self._aligner):
                if not isinstance(piece, Reasoning) or self.include.reasoning:
                    self._add(piece)
        return self._body(choice, usage)

    def _add(self, piece: Piece) -> Part:
        """The part that a piece belongs to, with its text in it. Neighbours of a kind are one, but for calls."""
        if isinstance(piece, Call):
            self._parts.append(Part(len(self._parts), Call, piece.name))
        elif not isinstance(piece, Arguments) and (not self._parts or self._parts[-1].kind is not type(piece)):
            self._parts.append(Part(len(self._parts), type(piece)))
        part = self._parts[-1]
        part.texts.append(piece.arguments if isinstance(piece, Call) else piece.text)
        part.tokens += [piece.tokens] if isinstance(piece, Text) else []
        return part

    @abstractmethod
    def _begin(self, part: Part) -> bytes:
        """The events before a part's first text."""

    @abstractmethod
    def _growth(self, part: Part) -> bytes:
        """The event of the last of a part's texts."""

    @abstractmethod
    def _end(self, part: Part, *, is_cut: bool) -> bytes:
        """The events behind a part's last text.

        Args:
            is_cut: whether the part would have gone on, had there been more tokens.
        """

    @abstractmethod
    def _closing(self, choice: Choice, usage: Usage) -> bytes:
        """The events at the end of a stream, behind those of the last part."""

    @abstractmethod
    def _body(self, choice: Choice, usage: Usage) -> bytes:
        """All of the response, once all parts are added."""
