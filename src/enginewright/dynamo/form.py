"""Requests and chunks in Dynamo's form: what its frontends send to a worker, and what they get.

A request is Dynamo's PreprocessedRequest as a dict: its frontend has rendered and tokenized the prompt. A chunk is a
dict with new token ids, which the frontend turns into text.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from enginewright.errors import EngineError, UsageError
from enginewright.runtime.core.outputs import GRAMMAR, Delta
from enginewright.runtime.core.params import default_params
from enginewright.runtime.core.request import Request
from enginewright.runtime.engine import Engine
from enginewright.runtime.sampling.parameters import SamplingParams
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.step.work_class import WorkClass

# Keys that change the answer, and that no engine follows.
REFUSED = ("multi_modal_data", "mm_processor_kwargs", "mm_routing_info", "encoder_result", "prompt_embeds")
STOP_TOKENS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
OUTPUT_OPTIONS = ("logprobs", "prompt_logprobs", "skip_special_tokens")  # the frontend follows the others
CANCELLED = "cancelled"  # finish reason of a choice that its client has left


def _given(request: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The entries of a part of the request that are not null."""
    return {name: value for name, value in (request.get(key) or {}).items() if value is not None}


def sampling_params(request: Mapping[str, Any], engine: Engine) -> SamplingParams:
    """Reads the sampling parameters of a request; the model's own defaults stand for those that are not given.

    Args:
        request: the request.
        engine: the engine, which holds the defaults.

    Raises:
        UsageError: the request asks for something that the engine does not do, or a value is out of its range.
    """
    for key in REFUSED:
        if request.get(key):
            raise UsageError(f"{key} is not supported", "engines read token ids alone")
    options = _given(request, "sampling_options")
    guided = options.pop("guided_decoding", None)
    if guided is not None:
        constraint = {name: value for name, value in guided.items() if value is not None and name != "backend"}
        options["structured_outputs"] = StructuredOutputsParams(**constraint)
    stops = _given(request, "stop_conditions")
    ends = {token for name in STOP_TOKENS for token in stops.pop(name, ())}
    options["stop_token_ids"] = sorted(ends.difference(engine.eos_token_ids))
    output = _given(request, "output_options")
    options |= stops | {name: output[name] for name in OUTPUT_OPTIONS if name in output}
    params = default_params(engine, **options)
    if params.n > 1:
        raise UsageError(f"n is {params.n}", "Dynamo ends an answer with its first choice", "Send several requests.")
    return params


def cache_salt(request: Mapping[str, Any]) -> str:
    """The salt of the request's prefix cache; requests with different ones share no blocks."""
    return str(_given(request, "routing").get("cache_salt", ""))


def work_class(request: Mapping[str, Any]) -> WorkClass:
    """The priority of a request. More is more urgent in Dynamo, and less urgent here."""
    return WorkClass(-int(_given(request, "routing").get("priority", 0)))


def remote_prefix(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `kv_transfer_params` with which the prompt's blocks are fetched, if another worker has computed them."""
    handed = (request.get("prefill_result") or {}).get("disaggregated_params") or {}
    params: dict[str, Any] | None = handed.get("kv_transfer_params")
    return params


def handover(request: Request) -> dict[str, Any]:
    """The parameters for the worker that will answer, from the one that computed a prompt; None: no block is full."""
    return {"kv_transfer_params": request.kv_transfer_params}


def chunk_of(delta: Delta) -> dict[str, Any]:
    """Makes the chunk of a delta.

    Raises:
        UsageError: following the grammar of the answer takes too long.
        EngineError: the answer has failed.
    """
    if delta.finish_reason == "error":
        raise answer_error(delta)
    chunk: dict[str, Any] = {"index": delta.index, "token_ids": [token.token for token in delta.tokens]}
    if delta.tokens and delta.tokens[0].logprob is not None:
        chunk["log_probs"] = [token.logprob for token in delta.tokens]
        chunk["top_logprobs"] = [_top(token) for token in delta.tokens]
    if delta.finish_reason is not None:
        chunk["finish_reason"] = CANCELLED if delta.finish_reason == "abort" else delta.finish_reason
    return chunk


def answer_error(delta: Delta) -> EngineError:
    """The error of an answer that has failed by itself."""
    if delta.stop_reason == GRAMMAR:
        return UsageError("following the answer's grammar takes too long", fix="Make the grammar simpler.")
    return EngineError("the answer has failed", str(delta.stop_reason))


def last_part(request: Request, num_tokens: int) -> dict[str, Any]:
    """The entries of a last chunk alone.

    Args:
        request: the request.
        num_tokens: number of tokens of the answer.
    """
    part: dict[str, Any] = {
        "completion_usage": {
            "prompt_tokens": request.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": request.num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": request.num_cached_tokens},
        }
    }
    if request.prompt_logprobs:
        part["engine_data"] = {"prompt_logprobs": prompt_logprobs(request.prompt_logprobs)}
    return part


def prompt_logprobs(tokens: Sequence[SampledToken | None]) -> list[dict[str, Any] | None]:
    """The log-probabilities of a prompt's tokens: by token id, the token itself and the likeliest ones."""
    return [None if token is None else _alternatives(token) for token in tokens]


def _alternatives(token: SampledToken) -> dict[str, Any]:
    likeliest = {str(one["token_id"]): {"logprob": one["logprob"], "rank": one["rank"]} for one in _top(token)}
    return {str(token.token): {"logprob": token.logprob}} | likeliest


def _top(token: SampledToken) -> list[dict[str, Any]]:
    """The likeliest tokens at a position; the frontend adds their texts."""
    return [
        {"rank": rank, "token_id": one, "token": None, "logprob": logprob}
        for rank, (one, logprob) in enumerate(token.top_logprobs, 1)
    ]
