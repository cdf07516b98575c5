"""Outputs of the engine: deltas while an answer is generated, and complete answers under vLLM's names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from enginewright.runtime.sampling.sampler import SampledToken

NAN_LOGITS = "nan_logits"  # the model's logits are not numbers
GRAMMAR = "grammar"  # following the grammar exceeds its limits
DETOKENIZER = "detokenizer"  # a token could not be turned into text; the log says why


class Delta(msgspec.Struct, frozen=True, gc=False):
    """New tokens and text of one choice of a request."""

    index: int  # index of the choice, from 0 to n - 1
    text: str  # new text of the choice
    tokens: tuple[SampledToken, ...]  # new tokens, including a stop token
    finish_reason: str | None = None  # "stop", "length", "error" or "abort" in the last delta; else None
    # stop string or token id that has ended the choice; NAN_LOGITS, GRAMMAR or DETOKENIZER after an error
    stop_reason: int | str | None = None
    ends: tuple[int, ...] = ()  # offset in `text` after each token but the last; empty where not known

    @property
    def is_cut(self) -> bool:
        """True if the choice was ended by a limit or a stop string, and not by the model."""
        return self.finish_reason not in (None, "stop") or isinstance(self.stop_reason, str)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """Joins the deltas of each choice; returns one delta per choice, in the order of choices."""
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
    """Offset after each text but the last, in the concatenation of all texts."""
    return tuple(accumulate(map(len, texts[:-1])))


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token."""

    logprob: float  # natural logarithm of the probability
    rank: int | None  # rank among all tokens, 1 for the likeliest; None: beyond the requested number of tokens
    decoded_token: str  # text of the token


@dataclass
class CompletionOutput:
    """One choice of a request: a completion."""

    index: int  # index of the choice, from 0 to n - 1
    text: str = ""  # text so far, without the stop string unless the request includes it
    token_ids: list[int] = field(default_factory=list)  # tokens so far
    cumulative_logprob: float | None = None  # log-probability of all tokens together; None if not requested
    # for each token, the sampled token and the likeliest ones by token id; None if not requested
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length", "error" or "abort"
    stop_reason: int | str | None = None  # stop string or token id that has ended the choice

    def finished(self) -> bool:
        """True if this choice is complete. As in vLLM, it is a method, but an attribute of a RequestOutput."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds since it was submitted; 0 for events that have not happened yet."""

    queue_s: float  # seconds until the engine began with its prompt
    first_token_s: float  # seconds until the first token of any choice
    total_s: float  # seconds until the last token

    @property
    def prefill_s(self) -> float:
        """Seconds from the beginning of its prompt to the first token."""
        return max(0.0, self.first_token_s - self.queue_s)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last one."""
        return max(0.0, self.total_s - self.first_token_s)


@dataclass
class RequestOutput:
    """The output of one request."""

    request_id: str  # name of the request
    prompt: str | None  # text of the prompt; None if it was not given as text
    prompt_token_ids: list[int]  # tokens of the prompt
    outputs: list[CompletionOutput]  # one for each of the n choices
    finished: bool  # true if all choices are complete
    num_cached_tokens: int  # number of prompt tokens that were in the prefix cache
    metrics: RequestMetrics  # times of the request
    num_draft_tokens: int = 0  # number of draft tokens that were verified
    num_accepted_tokens: int = 0  # number of these that were accepted
    # for each prompt token as in CompletionOutput, None for the first; None if not requested
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def to_dicts(output: RequestOutput) -> list[dict[str, Any]]:
    """Converts an output for JSON: one dict per choice, with log-probabilities only if they were requested."""
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
    if output.num_draft_tokens:
        fields |= {name: getattr(output, name) for name in ("num_draft_tokens", "num_accepted_tokens")}
    if choice.logprobs is not None:
        fields["logprobs"] = [
            {"token_id": token, "logprob": named[token].logprob, "top": _top(named)}
            for token, named in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
    return fields


def _top(named: Mapping[int, Logprob]) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens by token id, likeliest first."""
    return {token: entry.logprob for token, entry in named.items() if entry.rank is not None}
