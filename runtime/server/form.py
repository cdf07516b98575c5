"""How completions are written as JSON: what all APIs share, and what those share whose responses are choices."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from secrets import token_hex
from typing import Any, ClassVar

import msgspec

from enginewright.runtime.core.outputs import Delta, RequestMetrics
from enginewright.runtime.core.prompts import Prompt, text_of
from enginewright.runtime.sampling.sampling import SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.text_offsets import TextOffsets
from enginewright.runtime.server.token_aligner import TokenAligner
from enginewright.runtime.text.messages.formats import Parser
from enginewright.runtime.text.messages.parser import Piece, Text, joined
from enginewright.runtime.text.tokenizer import REPLACEMENT, Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class PromptPart:
    """A prompt, as far as a completion repeats it."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[SampledToken | None]  # by position, if they were asked for; filled before the first token


@dataclass(eq=False)
class Choice:
    """One completion while it is generated."""

    index: int
    prompt: PromptPart
    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # that began within the reasoning, as far as they were pushed
    offsets: TextOffsets | None = None  # of its tokens in its text, as far as log-probabilities have been written
    echoed: bool = False  # whether those of its prompt have been
    last_s: float | None = None  # when it last grew
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    deltas: list[Delta] = field(default_factory=list)  # kept where the completion is sent whole
    parser: Parser | None = None  # of a message with reasoning or calls; None: all of it is text

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[SampledToken]:
        return [token for delta in self.deltas for token in delta.tokens]

    def push(self, delta: Delta, aligner: TokenAligner | None = None) -> list[Piece]:
        """The parts of its message that this adds. Each delta is to be given once, in order.

        Args:
            aligner: the same for all deltas; it gives texts their tokens.
        """
        pieces: list[Piece] = []
        parts = list(pairwise((0, *delta.ends, len(delta.text))))
        for place, (start, end) in enumerate(parts):
            text, is_last = delta.text[start:end], place == len(parts) - 1
            found = self._pieces(text, is_token=bool(delta.tokens))
            if self.parser is not None and is_last and delta.finish_reason is not None:
                found += self.parser.end(is_cut=delta.is_cut)
            if aligner is not None:
                tokens = delta.tokens[place:] if is_last else delta.tokens[place : place + 1]
                found = aligner.align(tokens, text, found, self.parser.num_held if self.parser is not None else 0)
            pieces += found
        return joined(pieces)

    def _pieces(self, text: str, *, is_token: bool) -> list[Piece]:
        if self.parser is None:
            return [Text(text)] if text else []
        self.num_reasoning_tokens += is_token and self.parser.in_reasoning
        return self.parser.push(text)


@dataclass(frozen=True)
class Usage:
    """What a request took, of all its prompts and completions together."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    guessed_tokens: int = 0  # that were verified
    accepted_tokens: int = 0  # of these, those that were right
    times: RequestMetrics | None = None  # of the prompt whose completions took longest; None: they go on

    @property
    def phases(self) -> dict[str, Any]:
        """A key for the times, where they are known: no API has one of its own, and clients leave alone what they do
        not know.
        """
        if self.times is None:
            return {}
        return {"phases": {name: round(getattr(self.times, name), 6) for name in ("queue_s", "prefill_s", "decode_s")}}

    def to_dict(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **self.phases,
        }
        if self.guessed_tokens:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.guessed_tokens - self.accepted_tokens,
            }
        return usage


@dataclass(frozen=True)
class Include:
    """What a response has beside the text of completions."""

    logprobs: bool = False  # of the completion's tokens
    prompt_logprobs: bool = False  # vLLM's, of the prompt's tokens
    echo: bool = False  # the prompt before the completion, with its log-probabilities if those of tokens are shown
    usage: bool = False  # at the end of a stream
    usage_so_far: bool = False  # in each event of a stream
    special_tokens: bool = False  # in its texts
    reasoning: bool = True  # beside the answer, where the model reasons


class Form(ABC):
    """The id of a response, and the JSON of all that it says.

    Args:
        fingerprint: of the engine; where it and the release are the same, the same seed gives the same answer.
    """

    id_prefix: ClassVar[str]
    prompt_key: ClassVar[str]  # of a body, for errors
    renames: ClassVar[Mapping[str, str]] = {}  # what this API calls keys of a chat; regular expressions

    def __init__(self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, include: Include) -> None:
        self.id, self.model, self.include = id, model, include
        self.created, self.fingerprint = int(time.time()), fingerprint
        self._tokenizer = tokenizer

    def prompt_part(
        self, prompt: Prompt, token_ids: Sequence[int], logprobs: Sequence[SampledToken | None]
    ) -> PromptPart:
        """A prompt as completions repeat it: the client's own text, or that of its token ids."""
        text = text_of(prompt)
        if text is None:
            text = self._tokenizer.decode(token_ids) if self.include.echo else ""
        return PromptPart(text, token_ids, logprobs)

    @abstractmethod
    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """The events before a choice's first piece; empty if there are none.

        Args:
            cached_tokens: of its prompt, that were in the prefix cache.
        """

    @abstractmethod
    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The events of what was added to a choice; empty if nobody could see a difference."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The events at the end of a stream."""

    @abstractmethod
    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """All choices at once."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return b"data: " + error.body + b"\n\n"

    def ended(self) -> None:
        """Called in the event loop's thread once the response is whole, before its last bytes are sent."""
        return

    def _scored(self, sampled: SampledToken) -> dict[str, Any]:
        """A token with its log-probability, and the likeliest ones with theirs."""
        top = [self._entry(token, logprob) for token, logprob in sampled.top_logprobs]
        return {**self._entry(sampled.token, sampled.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """The bytes of tokens that are parts of a character make it, where their texts do not."""
        text = self._token_text(token)
        own = self._tokenizer.token_bytes(token) if REPLACEMENT in text else text.encode()
        return {"token": text, "logprob": shown(logprob), "bytes": list(own)}

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


class ChoicesForm(Form):
    """A response of several choices, each with its log-probabilities.

    A chunk of a stream is assembled around what was encoded once.
    """

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, include: Include) -> None:
        super().__init__(id, model, fingerprint, tokenizer, include)
        self._about = {"id": id, "created": self.created, "model": model, "system_fingerprint": fingerprint}
        head = encode({"object": self.chunk_object, **self._about})[:-1]
        self._head = b"data: " + head + b',"choices":[{"index":'
        self._tail = b'}],"usage":null}\n\n' if include.usage else b"}]}\n\n"

    @abstractmethod
    def _piece(self, text: str) -> bytes:
        """Keys of a choice that hold what was added to it."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Keys of a choice that hold all of it."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Of tokens that follow those of the calls before."""

    def _response_keys(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Keys of a response beside its choices."""
        return {}

    def _usage(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The usage at the end, when all deltas were pushed."""
        return usage.to_dict()

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        if not delta.text and delta.finish_reason is None and not self.include.logprobs:
            return b""
        return self._chunk(choice, delta, self._piece(delta.text))

    def _chunk(self, choice: Choice, delta: Delta, piece: bytes) -> bytes:
        logprobs = encode(self.logprobs(choice, delta.tokens)) if self.include.logprobs else b"null"
        end = b',"finish_reason":null'
        if delta.finish_reason is not None:
            reasons = {"finish_reason": self.finish_reason(choice), "stop_reason": delta.stop_reason}
            end = b"," + encode(reasons)[1:-1]
        return self._event(choice, piece + b',"logprobs":' + logprobs + end)

    def finish_reason(self, choice: Choice) -> str | None:
        """Of a choice that has ended, as the API calls it."""
        return choice.finish_reason

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        if not self.include.usage:
            return DONE
        end = {"object": self.chunk_object, **self._about, "choices": [], "usage": self._usage(choices, usage)}
        return event(end) + DONE

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        whole = [
            {
                "index": choice.index,
                **self._whole(choice),
                "logprobs": self.logprobs(choice, choice.tokens) if self.include.logprobs else None,
                "finish_reason": self.finish_reason(choice),
                "stop_reason": choice.stop_reason,
            }
            for choice in choices
        ]
        response = {"object": self.object, **self._about, "choices": whole, "usage": self._usage(choices, usage)}
        return encode(response | self._response_keys(choices))

    def prompt_logprobs(self, prompt: PromptPart) -> list[dict[str, Any] | None]:
        """vLLM's form: for each position the named tokens by id; None for the first, which nothing comes before."""
        return [None if token is None else self._named(token) for token in prompt.logprobs]

    def _named(self, scored: SampledToken) -> dict[str, Any]:
        ranks = {token: (logprob, rank) for rank, (token, logprob) in enumerate(scored.top_logprobs, start=1)}
        ranks.setdefault(scored.token, (scored.logprob or 0.0, None))  # type: ignore[arg-type]
        return {
            str(token): {"logprob": shown(logprob), "rank": rank, "decoded_token": self._token_text(token)}
            for token, (logprob, rank) in ranks.items()
        }

    def _event(self, choice: Choice, keys: bytes) -> bytes:
        tail = self._tail
        if self.include.usage_so_far:
            count, written = len(choice.prompt.token_ids), choice.num_tokens
            usage = {"prompt_tokens": count, "completion_tokens": written, "total_tokens": count + written}
            tail = b'}],"usage":' + encode(usage) + b"}\n\n"
        return b"".join((self._head, b"%d" % choice.index, keys, tail))


DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def new_call_id() -> str:
    """Of nine letters and digits: Mistral's templates take no others."""
    return token_hex(5)[:9]


def typed_event(type: str, **keys: Any) -> bytes:
    """A server-sent event that says its type, as clients of the newer APIs want it."""
    return b"event: " + type.encode() + b"\n" + event({"type": type, **keys})


def shown(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else max(logprob, LEAST_LOGPROB)
