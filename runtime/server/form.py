"""How answers are written: what both APIs share. A chunk of a stream is assembled around what was encoded once."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from enginewright.runtime.outputs import Delta
from enginewright.runtime.sampling import SampledToken
from enginewright.runtime.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity
REPLACEMENT = "\ufffd"

encode = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Choice:
    """One answer while it comes.

    deltas: kept where the answer is sent whole. num_chars: of its tokens' texts. last_s: when it last grew.
    """

    index: int
    num_tokens: int = 0
    num_chars: int = 0
    last_s: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    deltas: list[Delta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[SampledToken]:
        return [token for delta in self.deltas for token in delta.tokens]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Form(ABC):
    """One answer's id, and the JSON around its choices.

    Args:
        fingerprint: of the engine; the same seed gives the same answer where it is the same.
        logprobs: whether choices have them.
        include_usage: whether a stream ends with its usage.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]
    id_prefix: ClassVar[str]
    prompt_key: ClassVar[str]  # of a body, for errors

    def __init__(
        self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, *, logprobs: bool, include_usage: bool
    ) -> None:
        self.id = id
        self.include_usage = include_usage
        self._tokenizer, self._has_logprobs = tokenizer, logprobs
        self._about = {"id": id, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        head = encode({"object": self.chunk_object, **self._about})[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """The event before a choice's first piece; empty if there is none."""

    @abstractmethod
    def _piece(self, text: str) -> bytes:
        """Keys of a choice that hold what was added to it."""

    @abstractmethod
    def _whole(self, text: str) -> dict[str, Any]:
        """Keys of a choice that hold all of it."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Of tokens that follow those of the calls before."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The event of what was added to a choice; empty if nobody could see a difference."""
        if not delta.text and delta.finish_reason is None and not self._has_logprobs:
            return b""
        logprobs = encode(self.logprobs(choice, delta.tokens)) if self._has_logprobs else b"null"
        end = b',"finish_reason":null'
        if delta.finish_reason is not None:
            end = b"," + encode({"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})[1:-1]
        return self._event(choice, self._piece(delta.text) + b',"logprobs":' + logprobs + end)

    def usage_chunk(self, usage: Usage) -> bytes:
        return event({"object": self.chunk_object, **self._about, "choices": [], "usage": usage.to_dict()})

    def body(self, choices: Iterable[Choice], usage: Usage) -> bytes:
        """All choices at once."""
        whole = [
            {
                "index": choice.index,
                **self._whole(choice.text),
                "logprobs": self.logprobs(choice, choice.tokens) if self._has_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ]
        return encode({"object": self.object, **self._about, "choices": whole, "usage": usage.to_dict()})

    def _event(self, choice: Choice, keys: bytes) -> bytes:
        return b"".join((self._head, b"%d" % choice.index, keys, self._tail))

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def shown(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
