"""Reads the bodies of requests into typed structs; errors name the key that is wrong.

A body is decoded once and completely. keys.py sorts its keys into used, ignored and refused ones; UNREAD has those that
are known in all APIs, and not used in any.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.cache.eviction import MAX_TTL_S
from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.grammar.json_schema import held
from enginewright.runtime.sampling.parameters import MAX_BIASED_TOKENS, MAX_STOPS
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Include
from enginewright.runtime.server.keys import Known, Unread, UnusedKeys, ignored, not_implemented, refused, used_keys
from enginewright.runtime.server.retention import (
    DEFAULT_TTL_S,
    CacheControl,
    PromptCacheOptions,
    RetentionDirective,
    cache_controls,
    seconds_of,
)
from enginewright.runtime.text.messages.formats import Parser
from enginewright.runtime.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # default of max_tokens in text completions, as in OpenAI's API
MAX_KEY_CHARS = 64
MAX_CONTAINERS = 100_000  # lists and objects in a body: reading one takes a hundred times as long as a character
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)

_ALWAYS = "answers always have the default form"
_SAMPLERS = "there is no such sampler"
_STRUCTURES = "structured_outputs and response_format define the structure of an answer"
_TEXT_ONLY = "prompts and answers are text"

# Keys of OpenAI's, Anthropic's, vLLM's, SGLang's and llama.cpp's requests that no API here uses.
UNREAD: Mapping[str, Unread] = {
    **ignored(
        "it names the client, its user or its request",
        "client_metadata",
        "metadata",
        "request_id",
        "retention_scope",
        "safety_identifier",
        "session_id",
        "user",
        "user_profile_id",
        "workspace_id",
    ),
    **ignored(
        "it is about a provider's own machines, prices and caches",
        "access_programs",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "retention_directives",
        "service_tier",
        "speed",
        "store",
    ),
    **ignored("it lets a server shorten a conversation, which is always shown completely", "context_management"),
    **ignored("it lets a server answer faster, and changes no answer", "prediction"),
    **ignored("it asks for shorter or longer answers, and no chat template has a variable for that", "verbosity"),
    **refused(_ALWAYS, "add_generation_prompt", "separate_reasoning", "stream_reasoning", harmless=(True,)),
    **refused(_ALWAYS, "detokenize", "spaces_between_special_tokens", harmless=(True,)),
    **refused(_ALWAYS, "no_stop_trim", "return_hidden_states", "continue_final_message", harmless=(False,)),
    **refused(_ALWAYS, "echo", "return_token_ids", "return_tokens_as_token_ids", harmless=(False,)),
    **refused("the model's chat template comes with the engine", "chat_template"),
    **refused("there is no chat template in this API", "chat_template_kwargs", harmless=({},)),
    **refused("the tokenizer's own are added", "add_special_tokens"),
    **refused("conversations have only messages", "documents", harmless=([],)),
    **refused("the model cannot see text after the prompt", "suffix", harmless=("",)),
    **refused(_TEXT_ONLY, "audio", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds"),
    **refused(_TEXT_ONLY, "image", "image_data", "images", "audio_data", "video_data", harmless=([],)),
    **refused(_TEXT_ONLY, "modalities", harmless=(["text"],)),
    **refused("a prompt is never shortened", "truncate_prompt_tokens", "truncate", "transforms", harmless=([], False)),
    **refused("tools and tool_choice replace it", "function_call", harmless=("none", "auto")),
    **refused("tools replaces it", "functions", harmless=([],), off_by=("function_call", "none")),
    **refused("this API has no tools", "tools", harmless=([],), off_by=("tool_choice", "none")),
    **refused("this API has no tools", "tool_choice", harmless=("none", "auto")),
    **refused("this API has no reasoning", "reasoning_effort", harmless=("none",)),
    **refused("this server searches nothing", "web_search_options"),
    **refused("this server judges no texts", "moderation", "guardrails"),
    **refused("no code comes from a request", "custom_logit_processor", "logits_processors", harmless=([], "")),
    **refused("no adapters are served", "lora", "lora_path", "lora_request", harmless=([], "")),
    **refused("no KV blocks come from elsewhere", "bootstrap_host", "bootstrap_room"),
    **refused("there is no such option", "vllm_xargs", "session_params", harmless=({},)),
    **refused("logit_bias or stop can do it", "bad_words", harmless=([],)),
    **refused(_STRUCTURES, "ebnf", "grammar", "json_schema", "regex", "structural_tag", "guided_whitespace_pattern"),
    **refused(_SAMPLERS, "mirostat", harmless=(0,)),
    **ignored("it is for a sampler that is refused", "mirostat_eta", "mirostat_tau"),
    **refused(_SAMPLERS, "dynatemp_exponent", "encoder_repetition_penalty", "tfs_z", "typical_p", harmless=(1,)),
    **refused(_SAMPLERS, "dry_multiplier", "dynatemp_range", "no_repeat_ngram_size", "top_a", harmless=(0,)),
    **refused(_SAMPLERS, "epsilon_cutoff", "eta_cutoff", "smoothing_factor", "xtc_probability", harmless=(0,)),
    **refused(_SAMPLERS, "top_n_sigma", harmless=(0, -1)),
    **refused(_SAMPLERS, "samplers", "sampler_seq", "typical"),
    **refused("repetition_penalty is its name here", "repeat_penalty", "rep_pen", harmless=(1,)),
    **refused(
        "another key limits the tokens of an answer here",
        "max_completion_tokens",
        "max_length",
        "max_new_tokens",
        "n_predict",
        "num_predict",
    ),
    **refused("truncate_prompt_tokens replaces it", "max_chunks_per_doc", "max_tokens_per_doc"),
    **refused("prompt_name chooses the model's prompt before the texts", "input_type", "instruction"),
    **refused("min_tokens is its name here", "min_new_tokens", harmless=(0,)),
    **refused("chat_template_kwargs switches reasoning on and off", "enable_thinking", "thinking", "reasoning"),
    **refused("a model thinks as long as it likes", "reasoning_budget", "thinking_budget", "thinking_token_budget"),
}

# Keys of a tool that no API here uses.
TOOL_UNREAD: Mapping[str, Unread] = {
    **ignored("it is for a cache of Anthropic's", "cache_control"),
    **ignored("all tools are shown at once", "defer_loading"),
    **ignored("arguments are sent as the model writes them", "eager_input_streaming"),
    **ignored("chat templates show only a tool's name, description and parameters", "input_examples", "output_schema"),
    **refused("the model is the only caller", "allowed_callers", harmless=([], ["direct"])),
}

# Place of the JSON schema in a key of the body, for error messages; also response_format.json_schema.
_SCHEMA_PATHS = {"response_format": "response_format.schema", "structured_outputs": "structured_outputs.json"}

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

CANDIDATES = ("best_of", "early_stopping", "length_penalty", "use_beam_search")
SAMPLING = (
    *CANDIDATES,
    "allowed_token_ids",
    "frequency_penalty",
    "ignore_eos",
    "include_stop_str_in_output",
    "logit_bias",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "prompt_logprobs",
    "repetition_penalty",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
)


# Keys of vLLM's for chats that other APIs take as well, under the same names.
EXTRAS = (
    *(name for name in SAMPLING if name not in ("n", "prompt_logprobs", "stop", *CANDIDATES)),
    "cache_control",
    "cache_salt",
    "chat_template_kwargs",
    "kv_transfer_params",
    "priority",
    "prompt_cache_options",
    "prompt_cache_retention",
    "retention_directives",
    "session_id",
    "structured_outputs",
    "timeout",
)


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None  # true sends the usage in an event at the end
    include_obfuscation: bool | None = None  # OpenAI's padding against observers of sizes; true is refused
    continuous_usage_stats: bool | None = None  # vLLM's key; true sends the usage so far in each event


class JsonSchema(msgspec.Struct):
    """Schema of an answer, in response_format."""

    schema: dict[str, Any]  # JSON schema
    name: str | None = None  # name of the schema, not used
    description: str | None = None  # description of the schema, not used
    # true refuses schemas that cannot be enforced completely; answers always follow the schema
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]  # kind of the format
    json_schema: JsonSchema | None = None  # schema of the type json_schema
    schema: dict[str, Any] | None = None  # llama.cpp's form of a schema, with the type json_object

    def structure(self) -> dict[str, Any]:
        """Arguments of StructuredOutputsParams; empty for free text. Raises ApiError for contradicting keys."""
        if self.type != "json_schema" and self.json_schema is not None:
            why = "response_format.json_schema is only for the type json_schema"
            raise ApiError(400, why, param="response_format.json_schema")
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format has no json_schema", param="response_format.json_schema")
        if self.type != "json_object" and self.schema is not None:
            why = "response_format.schema is only for the type json_object"
            raise ApiError(400, why, param="response_format.schema")
        match self.type:
            case "json_schema" if self.json_schema is not None:
                return {"json": self.json_schema.schema}
            case "json_object":
                return {"json_object": True} if self.schema is None else {"json": self.schema}
            case _:
                return {}


class Body(msgspec.Struct, kw_only=True, dict=True):
    """Keys of chat and text completions; SAMPLING are SamplingParams' own names."""

    model: str | None = None  # name of the engine
    stream: bool | None = None  # true sends the answer as events while it is generated
    stream_options: StreamOptions | None = None  # options of the stream
    max_tokens: int | None = None  # maximum number of tokens of an answer
    cache_salt: str | None = None  # prompts with different salts share no cache blocks
    priority: int | None = None  # priority; lower values are more urgent
    session_id: str | None = None  # name of the conversation, whose next prompt continues this one
    cache_control: CacheControl | None = None  # the longest of all in the body (`read_keys`)
    prompt_cache_options: PromptCacheOptions | None = None  # OpenAI's form of that
    prompt_cache_retention: str | None = None  # OpenAI's older form: "in_memory" or "24h"
    retention_directives: list[RetentionDirective] | None = None  # llm-d's form of that
    # vLLM's key with which the prompt's KV blocks are leased to another server, or fetched from one
    kv_transfer_params: dict[str, Any] | None = None
    timeout: float | None = None  # seconds from the request's arrival after which it ends
    best_of: int | None = None  # number of answers that are generated, of which the n best are returned
    use_beam_search: bool | None = None  # true uses beam search instead of sampling
    length_penalty: float | None = None  # exponent of the length in the score of beam search
    early_stopping: bool | Literal["never"] | None = None  # condition under which beam search ends
    allowed_token_ids: list[int] | None = None  # the only tokens that may be sampled
    frequency_penalty: float | None = None  # penalty per occurrence of a token in the answer
    ignore_eos: bool | None = None  # true goes on after the model's end-of-text tokens
    include_stop_str_in_output: bool | None = None  # true keeps the stop text in the answer
    logit_bias: dict[int, float] | None = None  # values added to the logits, by token id
    min_p: float | None = None  # minimum probability of a token, relative to the likeliest one
    min_tokens: int | None = None  # minimum number of tokens of an answer
    n: int | None = None  # number of answers
    presence_penalty: float | None = None  # penalty for tokens that occur in the answer
    prompt_logprobs: int | None = None  # number of likeliest tokens at each position of the prompt
    repetition_penalty: float | None = None  # factor on logits of tokens that occur in prompt or answer
    seed: int | None = None  # seed that makes the answer repeatable
    skip_special_tokens: bool | None = None  # false keeps special tokens in the text
    stop: str | list[str] | None = None  # texts that end the answer
    stop_token_ids: list[int] | None = None  # tokens that end the answer
    temperature: float | None = None  # temperature of sampling; 0 is greedy
    top_k: int | None = None  # number of likeliest tokens to sample from
    top_p: float | None = None  # cumulative probability of the likeliest tokens to sample from
    response_format: ResponseFormat | None = None  # format of the answer, as in OpenAI's API
    structured_outputs: dict[str, Any] | None = None  # fields of StructuredOutputsParams
    guided_choice: list[str] | None = None  # vLLM's older name of structured_outputs.choice
    guided_grammar: str | None = None  # vLLM's older name of structured_outputs.grammar
    guided_json: dict[str, Any] | str | None = None  # vLLM's older name of structured_outputs.json
    guided_regex: str | None = None  # vLLM's older name of structured_outputs.regex

    @property
    def leases_prompt(self) -> bool:
        """True if another server fetches the prompt's KV blocks, and writes the answer."""
        return bool((self.kv_transfer_params or {}).get("do_remote_decode"))

    def sampling(self) -> dict[str, Any]:
        """Arguments of default_params, except for max_tokens and logprobs."""
        return {name: getattr(self, name) for name in SAMPLING} | {"structured_outputs": self._structure()}

    @property
    def ttl_s(self) -> float:
        """Seconds within which the client expects to continue the prompt; 0: it gives no hint. Raises ApiError."""
        found = [0.0]
        if self.cache_control is not None:
            ttl = self.cache_control.ttl
            found.append(DEFAULT_TTL_S if ttl is None else seconds_of(ttl, "cache_control.ttl"))
        if self.prompt_cache_options is not None and self.prompt_cache_options.ttl is not None:
            found.append(seconds_of(self.prompt_cache_options.ttl, "prompt_cache_options.ttl"))
        if self.prompt_cache_retention not in (None, "in_memory", "in-memory"):
            found.append(seconds_of(self.prompt_cache_retention, "prompt_cache_retention"))
        for place, one in enumerate(self.retention_directives or ()):
            where = f"retention_directives[{place}].duration"
            found.append(MAX_TTL_S if one.duration is None else seconds_of(one.duration, where))
        return max(found)

    @property
    def structure_key(self) -> str:
        """The key that defines the structure of the answer, if one does."""
        return next(iter(self._structures()), "structured_outputs")

    def _structures(self) -> dict[str, dict[str, Any]]:
        """Arguments of StructuredOutputsParams, by the keys that give some. Raises ApiError for contradictions."""
        given = {} if self.response_format is None else {"response_format": self.response_format.structure()}
        given["structured_outputs"] = self.structured_outputs or {}
        for kind in ("choice", "grammar", "json", "regex"):
            value = getattr(self, f"guided_{kind}")
            given[f"guided_{kind}"] = {} if value is None else {kind: value}
        return {key: arguments for key, arguments in given.items() if arguments}

    def _structure(self) -> StructuredOutputsParams | None:
        """Structure of the answer. Raises ApiError if several keys define one, or it is not valid."""
        return self._enforced_structure[0]

    @cached_property
    def _enforced_structure(self) -> tuple[StructuredOutputsParams | None, list[ApiError]]:
        """The structure of the answer, and errors for keywords of its schema that are not enforced.

        Raises:
            ApiError: as `_structure`, or a strict schema cannot be enforced.
        """
        given = self._structures()
        if len(given) > 1:
            first, second, *_ = given
            raise ApiError(400, f"{first} and {second} cannot be combined", param=second)
        for key, arguments in given.items():
            try:
                structure = StructuredOutputsParams(**arguments)
            except UsageError as error:
                raise ApiError(400, f"{key}: {error}", param=key, code="invalid_value") from None
            if structure.json is None:
                return structure, []
            form, where = self.response_format, _SCHEMA_PATHS.get(key, key)
            if form is not None and form.json_schema is not None:
                where = f"{key}.json_schema.schema"
            is_strict = form is not None and form.json_schema is not None and bool(form.json_schema.strict)
            schema, left_out = enforceable_schema(structure.json, where, is_strict=is_strict)
            return replace(structure, json=schema), left_out
        return None, []

    def prompts(self) -> list[Prompt]:
        """The prompts to complete. Raises ApiError if they are not valid."""
        raise NotImplementedError

    def params(self) -> dict[str, Any]:
        """Arguments of default_params, without what depends on the model."""
        raise NotImplementedError

    def params_for(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Arguments of default_params for a model. Raises ApiError for what this model cannot do."""
        return self.params()

    def unused(self, tokenizer: Tokenizer) -> Sequence[ApiError]:
        """Keys that this model has no use for, and keywords of schemas that no grammar enforces.

        Returns:
            For each the error that it would be with strict keys.
        """
        return self._enforced_structure[1]

    def structure(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> StructuredOutputsParams | None:
        """Structure of an answer to a prompt; None means free text. Raises ApiError if it is not valid."""
        return self._structure()

    def parsers(self, tokenizer: Tokenizer, prompt: Sequence[int], count: int) -> Sequence[Parser | None]:
        """Parsers of `count` answers to a prompt; None if all of an answer is text."""
        return [None] * count

    def include(self) -> Include:
        """Optional parts of the response.

        Raises:
            ApiError: a part is only possible in a stream, or only without one.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options are for streams: set stream to true as well", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs are not sent in a stream; echo sends them", param="prompt_logprobs")
        if self.stream and self.use_beam_search:
            why = "use_beam_search cannot be streamed: the likeliest answers are known only at the end"
            raise ApiError(400, why, param="use_beam_search")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            why = "best_of above n cannot be streamed: the best answers are known only at the end"
            raise ApiError(400, why, param="best_of")
        if self.stream and self.leases_prompt:
            why = "kv_transfer_params.do_remote_decode cannot be streamed: the response says where the blocks wait"
            raise ApiError(400, why, param="kv_transfer_params")
        options = self.stream_options or StreamOptions()
        if options.include_obfuscation:
            raise not_implemented("stream_options.include_obfuscation", "no event is padded")
        return Include(
            logprobs=self.params()["logprobs"] is not None,
            prompt_logprobs=self.prompt_logprobs is not None,
            usage=bool(options.include_usage),
            usage_so_far=bool(options.continuous_usage_stats),
        )


def enforceable_schema(schema: Any, where: str, *, is_strict: bool) -> tuple[dict[str, Any], list[ApiError]]:
    """A copy of a schema without keywords that cannot be enforced, and errors that name these.

    Args:
        schema: the JSON schema.
        where: its path in the body.
        is_strict: whether such a keyword is an error.

    Raises:
        ApiError: the schema is strict and has such keywords, or its integers cannot be enforced exactly.
    """
    try:
        copy, left_out = held(schema)
    except UsageError as error:
        raise ApiError(400, f"{where}: {error}", param=where, code="invalid_value") from None
    errors = [ApiError(400, f"{where}: {one}", param=where, code="unsupported_parameter") for one in left_out]
    if errors and is_strict:
        raise errors[0]
    return copy, errors


def prompts_of(value: str | list[int | str | list[int]], key: str) -> list[Prompt]:
    """Prompts from one value: a text, token ids, or several of either.

    Args:
        value: the value.
        key: its key in the body, for errors.

    Raises:
        ApiError: text and token ids are mixed, or there is none.
    """
    if isinstance(value, str):
        return [value]
    kinds = {type(one) for one in value}
    if len(kinds) != 1:
        why = "is empty" if not kinds else "mixes texts, token ids and lists of them"
        raise ApiError(400, f"{key} {why}", param=key, code="invalid_type")
    return [value] if kinds == {int} else list(value)  # type: ignore[list-item, arg-type]


def decode(body: bytes, known: Known, vocab_size: int, unused: UnusedKeys) -> Any:
    """Reads a body into the struct of its table, and checks keys, sizes and types.

    Args:
        body: the body, JSON.
        known: the table of its keys.
        vocab_size: the size of the vocabulary, the limit of lists of tokens.
        unused: collects the keys that are not used.

    Raises:
        ApiError: 400, with the key that is wrong.
    """
    return body_of(read_keys(body, known, unused), known.kind, vocab_size)


def read_keys(body: bytes, known: Known, unused: UnusedKeys) -> dict[str, Any]:
    """The keys of a body that are used, with the longest `cache_control` of all in it as its own. Raises ApiError."""
    value = _decode(body)
    keys = used_keys(value, known, unused)
    if "cache_control" in known.read and (longest := max(_controls(value), default=None)):
        keys["cache_control"] = {"ttl": longest}
    return keys


def _controls(body: dict[str, Any]) -> Iterator[float]:
    """Seconds of each `cache_control` in a body. Raises ApiError."""
    for where, value in cache_controls(body):
        ttl = convert(value, CacheControl, where).ttl
        yield DEFAULT_TTL_S if ttl is None else seconds_of(ttl, f"{where}.ttl")


def body_of(keys: dict[str, Any], kind: type[S], vocab_size: int) -> S:
    """Converts the keys of a body to a struct, and checks sizes and types.

    Args:
        keys: the keys.
        kind: the struct.
        vocab_size: the size of the vocabulary, the limit of lists of tokens.

    Raises:
        ApiError: 400, with the key that is wrong.
    """
    limits = {"allowed_token_ids": vocab_size, "logit_bias": MAX_BIASED_TOKENS, "stop": MAX_STOPS}
    for name, count in (limits | {"stop_token_ids": MAX_STOPS}).items():  # before the entries are checked one by one
        if isinstance(keys.get(name), list | dict) and len(keys[name]) > count:
            raise ApiError(400, f"{name} must not hold more than {count} entries", param=name)
    return convert(keys, kind)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """Converts a decoded value to a type.

    Args:
        value: the value.
        kind: the type.
        where: the value's path in the body, "messages[0]".

    Raises:
        ApiError: 400, a type is wrong.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _of_type_error(str(error), where) from None


def read_kind(value: dict[str, Any], kinds: Mapping[str, type[S]], where: str) -> S:
    """Converts a value to the struct that its key `type` names.

    Args:
        value: the value.
        kinds: structs by type.
        where: the value's path in the body.

    Raises:
        ApiError: 400, there is no such type, or the value is not valid.
    """
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        raise not_implemented(f"{where}.type", f"{str(kind)[:40]!r}; there are {known}")
    return convert(value, kinds[kind], where)


def _decode(body: bytes) -> dict[str, Any]:
    """Decodes a body from JSON."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:  # first without texts, which may contain brackets
        bare = _STRING.sub(b"", body)
        if bare.count(b"[") + bare.count(b"{") > MAX_CONTAINERS:
            raise ApiError(400, f"the body holds more than {MAX_CONTAINERS} lists and objects", code="invalid_json")
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is no valid JSON: {why}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"the body: expected `object`, got `{type(value).__name__}`", code="invalid_type")
    return value


_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"missing required field `(?P<name>.*?)`$", re.DOTALL)


def _of_type_error(text: str, where: str) -> ApiError:
    """Error for the client from msgspec's text, such as: Expected `int`, got `str` - at `$.stop[0]`."""
    found = _PLACE.match(text)
    what, path = (found["what"], found["path"] or "") if found else (text, "")
    path = ".".join(name for name in (where, path) if name)
    field = _FIELD.search(what)
    if field:
        name = field["name"][:MAX_KEY_CHARS]
        path = f"{path}.{name}" if path else name
    where = path or "the body"
    why = f"{where} is missing" if what.startswith("Object missing") else f"{where}: {what[:1].lower()}{what[1:]}"
    return ApiError(400, why, param=path or None, code="invalid_type")
