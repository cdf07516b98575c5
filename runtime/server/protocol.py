"""Bodies of requests: read into typed structs, and refused by the name of the key that is wrong.

A key is one that we implement (a field of the struct), one that cannot change an answer (IGNORED), one that we do not
implement (OFF, which may hold the values that turn it off), or a mistake.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import msgspec

from enginewright.runtime.prompts import Prompt
from enginewright.runtime.server.errors import ApiError

COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, as in OpenAI's API
MAX_KEY_CHARS = 64
MAX_OFF_BYTES = 256  # of a value that asks for nothing

IGNORED = frozenset(
    (
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
)

# Keys that OpenAI's API or vLLM has and we do not, and what they may hold, besides null: what they do nothing with.
OFF: Mapping[str, Sequence[Any]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "early_stopping": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1.0,),
    "logits_processors": ([],),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "vllm_xargs": ({},),
    "web_search_options": (),
}

SAMPLING = (
    "allowed_token_ids",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of OpenAI's, against who can see sizes but no text
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """What both kinds of request have; SAMPLING are SamplingParams' own names."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    allowed_token_ids: list[int] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def sampling(self) -> dict[str, Any]:
        """Arguments of default_params, but for max_tokens and logprobs."""
        return {name: getattr(self, name) for name in SAMPLING}

    def prompts(self) -> list[Prompt]:
        """What is to be answered. Raises ApiError for what cannot be."""
        raise NotImplementedError

    def params(self) -> dict[str, Any]:
        """Arguments of default_params."""
        raise NotImplementedError

    def include_usage(self) -> bool:
        """Raises ApiError for options of a stream that contradict each other."""
        options = self.stream_options
        if options is None:
            return False
        if not self.stream:
            raise ApiError(400, "stream_options are for streams: set stream to true as well", param="stream_options")
        if options.continuous_usage_stats:
            raise not_implemented("stream_options.continuous_usage_stats")
        return bool(options.include_usage)


B = TypeVar("B", bound=Body)

_by_key = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode(body: bytes, decoder: msgspec.json.Decoder[B]) -> B:
    """A body, its keys and types checked.

    Raises:
        ApiError: 400, and which key is at fault.
    """
    fields = decoder.type.__struct_fields__
    try:
        _check_keys(_by_key.decode(body), fields)
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _of_type_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no valid JSON: {why}", code="invalid_json") from None


def not_implemented(key: str, why: str = "") -> ApiError:
    reason = f": {why}" if why else ""
    return ApiError(400, f"{key} is not implemented{reason}", param=key, code="unsupported_parameter")


def is_off(raw: msgspec.Raw, off: Sequence[Any] = ()) -> bool:
    """Whether the JSON of a key that we do not implement asks for nothing."""
    if len(bytes(raw)) > MAX_OFF_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in off)


def _check_keys(keys: Mapping[str, msgspec.Raw], fields: Collection[str]) -> None:
    for key, raw in keys.items():
        if key in fields or key in IGNORED:
            continue
        if key not in OFF:
            short = key if len(key) <= MAX_KEY_CHARS else key[:MAX_KEY_CHARS] + "…"
            near = get_close_matches(short, (*fields, *IGNORED, *OFF), n=1)
            hint = f": did you mean {near[0]}?" if near else ""
            raise ApiError(400, f"there is no key called {short}{hint}", param=short, code="unknown_parameter")
        if not is_off(raw, OFF[key]) and not _is_no_tool(key, keys):
            raise not_implemented(key)


def _is_no_tool(key: str, keys: Mapping[str, msgspec.Raw]) -> bool:
    """Tools that may not be called."""
    choice = {"tools": "tool_choice", "functions": "function_call"}.get(key, "")
    return choice in keys and bytes(keys[choice]).strip() == b'"none"'


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:unknown|missing required) field `(?P<name>.*?)`$", re.DOTALL)


def _of_type_error(text: str) -> ApiError:
    """msgspec says: Expected `int`, got `str` - at `$.messages[0].content`."""
    found = _PLACE.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    field = _FIELD.search(what)
    if field:
        name = field["name"][:MAX_KEY_CHARS]
        path = f"{path}.{name}" if path else name
    where = path or "the body"
    return ApiError(400, f"{where}: {what[:1].lower()}{what[1:]}", param=path or None, code="invalid_type")
