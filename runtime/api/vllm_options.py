"""Options of vLLM that have no effect here; scripts written for vLLM pass them, mostly to ask for the default.

Each is accepted at values that cannot change an answer, and refused at others.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any

from enginewright.errors import UsageError, shorten
from enginewright.runtime.config import BYTES, FLAGS, TEXTS, RuntimeConfig
from enginewright.runtime.count import parse_bytes, parse_count

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Option:
    """An option without effect."""

    why: str  # reason why the option has no effect
    is_harmless: Callable[[Any], bool]  # returns True for a value that changes nothing


def _one_of(*values: Any) -> Callable[[Any], bool]:
    """Checks for one of several values of the same type, so that 1 is not True."""
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _number(low: float, high: float = 2.0**63) -> Callable[[Any], bool]:
    return lambda given: isinstance(given, int | float) and not isinstance(given, bool) and low <= given <= high


def _or_none(is_harmless: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda given: given is None or is_harmless(given)


def _text(given: Any) -> bool:
    return isinstance(given, str)


def _settings(given: Any) -> bool:
    return isinstance(given, int | Mapping)


_FLAG = _one_of(True, False)
_NOTHING = _one_of(None, {}, "", False)
_FORMAT = "the formats of an engine are chosen by `engine build`"
_ONE_DEVICE = "an engine is one replica, which tensor_parallel_size and pipeline_parallel_size cut"
_ONE_FILE = "all that a model needs is in its engine file"
_KERNELS = "kernels are compiled by `engine build`, and no graphs are captured"

# Keyword arguments of LLM, AsyncLLM and AsyncEngineArgs.
_ENGINE_OPTIONS: Mapping[str, _Option] = {
    "async_scheduling": _Option("steps run ahead where the device can", _FLAG),
    "block_size": _Option("the sizes of KV blocks are the engine's", _or_none(_number(1))),
    "code_revision": _Option(_ONE_FILE, _NOTHING),
    "compilation_config": _Option(_KERNELS, _or_none(_settings)),
    "cpu_offload_gb": _Option("weights stay where they run", _number(0, 0)),
    "data_parallel_size": _Option(_ONE_DEVICE, _one_of(1)),
    "disable_custom_all_reduce": _Option(_ONE_DEVICE, _FLAG),
    "disable_log_requests": _Option("requests of a library are not logged", _FLAG),
    "disable_log_stats": _Option("stats() gives the statistics, and nothing logs them", _FLAG),
    "download_dir": _Option("nothing is downloaded", _or_none(_text)),
    "dtype": _Option(_FORMAT, _one_of("auto", "bfloat16")),
    "enable_chunked_prefill": _Option("long prompts are always read in chunks", _or_none(_FLAG)),
    "enable_expert_parallel": _Option("tensor_parallel_size divides layers of experts by experts", _FLAG),
    "enforce_eager": _Option(_KERNELS, _or_none(_FLAG)),
    "generation_config": _Option("sampling defaults are the model's own", _one_of("auto")),
    "gpu_memory_utilization": _Option("kv_cache_memory says how much memory the KV cache takes", _number(0, 1)),
    "hf_overrides": _Option(_ONE_FILE, _NOTHING),
    "hf_token": _Option("nothing is downloaded", _or_none(lambda given: isinstance(given, str | bool))),
    "kv_cache_dtype": _Option(_FORMAT, _one_of("auto")),
    "limit_mm_per_prompt": _Option("models read only text", _or_none(_settings)),
    "load_format": _Option(_ONE_FILE, _one_of("auto")),
    "max_logprobs": _Option("a request may ask for 20 log-probabilities a token", _number(0, 20)),
    "max_seq_len_to_capture": _Option(_KERNELS, _or_none(_number(0))),
    "node_rank": _Option("this machine is node 0, and the others run `engine worker`", _one_of(0)),
    "quantization": _Option(_FORMAT, _NOTHING),
    "revision": _Option(_ONE_FILE, _NOTHING),
    "runner": _Option("an engine is of one kind of model", _one_of("auto", "generate", "pooling")),
    "seed": _Option(
        "SamplingParams(seed=…) repeats an answer, and requests without a seed get a random one each",
        _or_none(_number(-(2.0**63), 2.0**64)),
    ),
    "served_model_name": _Option("the name of a model is its engine file", _or_none(_text)),
    "skip_tokenizer_init": _Option("the tokenizer is in the engine file", _NOTHING),
    "speculative_config": _Option("speculate and speculate_tokens configure speculative decoding", _NOTHING),
    "swap_space": _Option("sequences that are preempted are computed again", _number(0)),
    "task": _Option("an engine is of one kind of model", _one_of("auto", "generate", "embed", "score")),
    "tokenizer": _Option("the tokenizer is in the engine file", _NOTHING),
    "tokenizer_mode": _Option("the tokenizer is in the engine file", _one_of("auto")),
    "tokenizer_revision": _Option("the tokenizer is in the engine file", _NOTHING),
    "trust_remote_code": _Option("an engine file holds no code of the model's", _FLAG),
}

# Keyword arguments of generate and chat. Accepted values are not logged, since none of them asks for anything.
_CALL_OPTIONS: Mapping[str, _Option] = {
    "concurrency_limit": _Option("as many run at once as max_num_seqs allows", _or_none(_number(1))),
    "chat_template": _Option("a conversation is shown by the engine's own template", _NOTHING),
    "chat_template_content_format": _Option("text parts are joined by line breaks", _one_of("auto", "string")),
    "continue_final_message": _Option("an answer is a message of its own", _NOTHING),
    "data_parallel_rank": _Option(_ONE_DEVICE, _one_of(None, 0)),
    "mm_processor_kwargs": _Option("models read only text", _NOTHING),
    "prompt_adapter_request": _Option("adapters are those of LoRA", _NOTHING),
    "tokenization_kwargs": _Option("prompts are tokenized as the model was trained to see them", _NOTHING),
    "tools": _Option("tools are for chat, whose template shows them", _one_of(None, [], ())),
    "trace_headers": _Option("requests are not traced", _NOTHING),
}


def without_engine_options(options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Removes keyword arguments that have no effect, and notes each of them in the log.

    Args:
        options: values by name, as a script passed them.
        known: the names of those that have an effect.

    Raises:
        UsageError: a name is unknown, or its value is not implemented.
    """
    for name, value in options.items():
        if name in known:
            continue
        if name not in _ENGINE_OPTIONS:
            near = get_close_matches(name, [*known, *_ENGINE_OPTIONS], n=1)
            why = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UsageError(f"there is no limit called {name}", why)
        _check(name, value, _ENGINE_OPTIONS[name])
        logger.warning("%s=%s has no effect: %s", name, shorten(value), _ENGINE_OPTIONS[name].why)
    return {name: value for name, value in options.items() if name in known}


def check_call_options(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a keyword argument of `generate` or `chat` that is unknown or has an effect."""
    for name, value in options.items():
        if name not in _CALL_OPTIONS:
            raise UsageError(f"there is no argument called {name}", fix="SamplingParams takes sampling parameters.")
        _check(name, value, _CALL_OPTIONS[name])


def _check(name: str, value: Any, option: _Option) -> None:
    if not option.is_harmless(value):
        raise UsageError(f"{name}={shorten(value)} is not implemented", option.why)


def runtime_config(**limits: Any) -> RuntimeConfig:
    """Creates a RuntimeConfig from keyword arguments; a number may be a text such as "1g", and None is the default.

    Options of vLLM that have no effect here are accepted as well.

    Raises:
        UsageError: a name is unknown, or a value is not valid.
    """
    options = without_engine_options(limits, RuntimeConfig.__dataclass_fields__)
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in given.items():
        if name in TEXTS or name in FLAGS:
            continue
        if isinstance(value, str):
            given[name] = _parse_limit(name, value)
        elif isinstance(value, Integral) and not isinstance(value, bool):
            given[name] = int(value)  # numpy's, too
    return RuntimeConfig(**given)


def _parse_limit(name: str, text: str) -> int:
    try:
        return parse_bytes(text) if name in BYTES else parse_count(text)
    except UsageError as error:
        raise UsageError(name, str(error)) from error
