"""Writes completions as JSON: base classes of the responses of all APIs, and of those whose responses have choices."""

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
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.text_offsets import TextOffsets
from enginewright.runtime.server.token_aligner import TokenAligner
from enginewright.runtime.text.messages.formats import Parser
from enginewright.runtime.text.messages.parser import Piece, TextPiece, joined
from enginewright.runtime.text.tokenizer import REPLACEMENT, Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class PromptPart:
    """A prompt, as far as the response repeats it."""

    text: str  # text of the prompt
    token_ids: Sequence[int]  # token ids of the prompt
    # log-probabilities by position, if requested; complete before the first token of the answer
    logprobs: Sequence[SampledToken | None]


@dataclass(eq=False)
class Choice:
    """One completion while it is generated."""

    index: int  # number of the completion in the response
    prompt: PromptPart  # prompt of the completion
    num_tokens: int = 0  # number of generated tokens so far
    num_reasoning_tokens: int = 0  # number of tokens in the reasoning, as far as they were parsed
    offsets: TextOffsets | None = None  # character offsets of tokens, as far as log-probabilities have been written
    echoed: bool = False  # True once the log-probabilities of the prompt have been written
    last_s: float | None = None  # time of the last delta, by time.perf_counter
    finish_reason: str | None = None  # "stop", "length", "abort" or "error" once the completion has ended
    stop_reason: int | str | None = None  # stop text or stop token that ended the completion
    deltas: list[Delta] = field(default_factory=list)  # deltas of a completion that is sent in one piece
    parser: Parser | None = None  # parser of a message with reasoning or calls; None means that everything is text

    @property
    def text(self) -> str:
        """Text of the completion, from the kept deltas."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[SampledToken]:
        """Tokens of the completion, from the kept deltas."""
        return [token for delta in self.deltas for token in delta.tokens]

    def push(self, delta: Delta, aligner: TokenAligner | None = None) -> list[Piece]:
        """Parses a delta. Each delta must be given once, in order.

        Args:
            delta: the next delta.
            aligner: assigns tokens to texts; the same one for all deltas.

        Returns:
            The pieces that the delta adds to the message.
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
            return [TextPiece(text)] if text else []
        self.num_reasoning_tokens += is_token and self.parser.in_reasoning
        return self.parser.push(text)


@dataclass(frozen=True)
class Usage:
    """Token counts and times of a request, of all its prompts and completions together."""

    prompt_tokens: int  # tokens of the prompts
    completion_tokens: int  # generated tokens
    cached_tokens: int  # prompt tokens found in the prefix cache
    draft_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # draft tokens that were accepted
    times: RequestMetrics | None = None  # times of the prompt whose completions took longest; None while they still run

    @property
    def phases(self) -> dict[str, Any]:
        """The times in a key of ours, if they are known.

        No API has such a key, and clients ignore keys that they do not know.
        """
        if self.times is None:
            return {}
        return {"phases": {name: round(getattr(self.times, name), 6) for name in ("queue_s", "prefill_s", "decode_s")}}

    def to_dict(self) -> dict[str, Any]:
        """Usage in OpenAI's format."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **self.phases,
        }
        if self.draft_tokens:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.draft_tokens - self.accepted_tokens,
            }
        return usage


@dataclass(frozen=True)
class Include:
    """Optional parts of a response."""

    logprobs: bool = False  # log-probabilities of the completion's tokens
    prompt_logprobs: bool = False  # log-probabilities of the prompt's tokens, in vLLM's format
    # prompt before the completion, with its log-probabilities if those of the completion are included
    echo: bool = False
    usage: bool = False  # usage at the end of a stream
    usage_so_far: bool = False  # usage in each event of a stream
    special_tokens: bool = False  # special tokens in texts
    reasoning: bool = True  # reasoning, of a model that reasons


class Form(ABC):
    """A response: its id, and its content as JSON.

    Args:
        id: the id of the response.
        model: the model's name in the response.
        fingerprint: identifies the engine; with the same one and the same release, a seed repeats an answer.
        tokenizer: the engine's tokenizer.
        include: optional parts of the response.
    """

    id_prefix: ClassVar[str]
    prompt_key: ClassVar[str]  # key of the body with the prompt, for errors
    renames: ClassVar[Mapping[str, str]] = {}  # regular expressions of a chat's keys, with this API's names

    def __init__(self, id: str, model: str, fingerprint: str, tokenizer: Tokenizer, include: Include) -> None:
        self.id, self.model, self.include = id, model, include
        self.created, self.fingerprint = int(time.time()), fingerprint
        # Parameters with which another server fetches the prompt's KV blocks; None: they are not leased.
        self.kv_transfer_params: dict[str, object] | None = None
        self._tokenizer = tokenizer

    def prompt_part(
        self, prompt: Prompt, token_ids: Sequence[int], logprobs: Sequence[SampledToken | None]
    ) -> PromptPart:
        """The part of a prompt that completions repeat: the client's own text, or that of its token ids.

        Args:
            prompt: the prompt as the client sent it.
            token_ids: its token ids.
            logprobs: log-probabilities of its tokens, by position.
        """
        text = text_of(prompt)
        if text is None:
            text = self._tokenizer.decode(token_ids) if self.include.echo else ""
        return PromptPart(text, token_ids, logprobs)

    @abstractmethod
    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """Events before the first piece of a choice; may be empty.

        Args:
            choice: the choice.
            cached_tokens: tokens of its prompt that were in the prefix cache.
        """

    @abstractmethod
    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """Events for a delta of a choice; empty if the delta changes nothing visible."""

    @abstractmethod
    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Events at the end of a stream."""

    @abstractmethod
    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The response in one piece."""

    def failure(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return b"data: " + error.body + b"\n\n"

    def ended(self) -> None:
        """Called in the event loop's thread once the response is complete, before its last bytes are sent."""
        return

    @property
    def _transfer_keys(self) -> dict[str, Any]:
        """The key of a response whose prompt is leased, as vLLM names it."""
        return {} if self.kv_transfer_params is None else {"kv_transfer_params": self.kv_transfer_params}

    def _scored(self, sampled: SampledToken) -> dict[str, Any]:
        """A token with its log-probability, and the likeliest tokens with theirs."""
        top = [self._entry(token, logprob) for token, logprob in sampled.top_logprobs]
        return {**self._entry(sampled.token, sampled.logprob), "top_logprobs": top}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """A token in OpenAI's format; `bytes` are those of the token, whose text may be only a part of a character."""
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
        """Keys of a choice that hold added text."""

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]:
        """Keys of a choice that hold the complete answer."""

    @abstractmethod
    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Log-probabilities of the next tokens of a choice."""

    def _response_keys(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Keys of a response in addition to its choices."""
        return self._transfer_keys

    def _usage(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """Usage at the end, once all deltas were parsed."""
        return usage.to_dict()

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The event for a delta of a choice; empty if the delta changes nothing visible."""
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
        """Finish reason of a choice that has ended, in the API's words."""
        return choice.finish_reason

    def closing(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Events at the end of a stream: the usage, if included, and DONE."""
        if not self.include.usage:
            return DONE
        end = {"object": self.chunk_object, **self._about, "choices": [], "usage": self._usage(choices, usage)}
        return event(end) + DONE

    def body(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """The response in one piece."""
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
        """Log-probabilities in vLLM's format: tokens by id at each position; None at the first."""
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
    """A server-sent event with JSON data."""
    return b"data: " + encode(value) + b"\n\n"


def new_call_id() -> str:
    """A random id of nine letters and digits, since Mistral's templates accept no others."""
    return token_hex(5)[:9]


def typed_event(type: str, **keys: Any) -> bytes:
    """A server-sent event with its type, as clients of the Responses API and Anthropic's expect it."""
    return b"event: " + type.encode() + b"\n" + event({"type": type, **keys})


def shown(logprob: float | None) -> float:
    """A log-probability as JSON can represent it, at least MIN_LOGPROB."""
    return MIN_LOGPROB if logprob is None else max(logprob, MIN_LOGPROB)
