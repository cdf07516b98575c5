"""What comes out: pieces of answers while they are written, and whole answers under vLLM's names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from enginewright.runtime.sampling.sampler import SampledToken

NAN_LOGITS = "nan_logits"  # the model's logits are not numbers
GRAMMAR = "grammar"  # to follow the grammar takes more than its limits allow
DETOKENIZER = "detokenizer"  # a token could not be turned into text; the log says why


class Delta(msgspec.Struct, frozen=True, gc=False):
    """What came to one choice of a request."""

    index: int  # which of the n choices
    text: str  # what the tokens add to the text
    tokens: tuple[SampledToken, ...]  # the sampled ones, a stop token included
    finish_reason: str | None = None  # "stop", "length", "error" or "abort" with the last delta; else None
    # the stop string or token that ended it; of an error, NAN_LOGITS, GRAMMAR or DETOKENIZER
    stop_reason: int | str | None = None
    ends: tuple[int, ...] = ()  # where in `text` that of each token but the last ends; empty where nobody knows

    @property
    def is_cut(self) -> bool:
        """True if a limit or a stop string has ended the choice, not the model."""
        return self.finish_reason not in (None, "stop") or isinstance(self.stop_reason, str)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta per choice, in the order of choices."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [_joined(by_index[index]) for index in sorted(by_index)]


def _joined(deltas: Sequence[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    last, text = deltas[-1], ""
    ends: list[int] = []
    for delta in deltas:
        ends += [len(text) + end for end in delta.ends]
        text += delta.text
        ends += [len(text)] if delta.tokens else []
    tokens = tuple(token for delta in deltas for token in delta.tokens)
    return Delta(last.index, text, tokens, last.finish_reason, last.stop_reason, tuple(ends[:-1]))


def ends_of(texts: Sequence[str]) -> tuple[int, ...]:
    """Where each text but the last ends in all of them together."""
    return tuple(accumulate(map(len, texts[:-1])))


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float
    rank: int | None  # among all tokens, 1 is the likeliest; None: it is not among those asked for
    decoded_token: str  # its text


@dataclass
class CompletionOutput:
    """One choice of a request: a completion."""

    index: int  # which of the n choices
    text: str = ""  # without the stop string, unless that is asked for
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # of all tokens; None if not asked for
    # for each token, by token id, the sampled one and the likeliest; None if not asked for
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"
    stop_reason: int | str | None = None  # the stop string or token that ended it

    def finished(self) -> bool:
        """Whether this choice is whole; a method, as in vLLM, where `finished` of a RequestOutput is an attribute."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds since it was submitted; 0 where it has not come to that."""

    queue_s: float  # until the engine began with its prompt
    first_token_s: float  # until the first token of any choice
    total_s: float  # until the last token

    @property
    def prefill_s(self) -> float:
        """From where it was begun to the first token."""
        return max(0.0, self.first_token_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        """From there to the last token."""
        return max(0.0, self.total_s - self.first_token_s)


@dataclass
class RequestOutput:
    """What came of one request."""

    request_id: str
    prompt: str | None  # its text, if it was given as text
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # one for each of the n choices
    finished: bool
    num_cached_tokens: int  # prompt tokens that the prefix cache had
    metrics: RequestMetrics
    num_guessed_tokens: int = 0  # guesses of its tokens that were verified
    num_accepted_tokens: int = 0  # of these, those that were right
    # for each prompt token as in CompletionOutput, None for the first; None if not asked for
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def to_dicts(output: RequestOutput) -> list[dict[str, Any]]:
    """An output as JSON would hold it, one dict per choice; log-probabilities only where they were asked for."""
    return [_to_dict(output, choice) for choice in output.outputs]


def _to_dict(output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {"index": choice.index} if len(output.outputs) > 1 else {}
    fields |= {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "queue_s": output.metrics.queue_s,
        "first_token_s": output.metrics.first_token_s,
        "total_s": output.metrics.total_s,
    }
    if output.num_guessed_tokens:
        fields |= {name: getattr(output, name) for name in ("num_guessed_tokens", "num_accepted_tokens")}
    if choice.logprobs is not None:
        fields["logprobs"] = [
            {"token_id": token, "logprob": named[token].logprob, "top": _top(named)}
            for token, named in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
    return fields


def _top(named: Mapping[int, Logprob]) -> dict[int, float]:
    """The likeliest tokens, most likely first."""
    return {token: entry.logprob for token, entry in named.items() if entry.rank is not None}
