"""Bodies of requests: read into typed structs, and refused by the name of the key that is wrong.

A body is decoded once, whole, before anything looks at it. Which keys are used, taken or refused is in keys.py; UNREAD
has those that are known in all APIs, and that nothing reads.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import msgspec

from enginewright.errors import UsageError
from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.grammar.json_schema import held
from enginewright.runtime.sampling.sampling import MAX_BIASED_TOKENS, MAX_STOPS
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Include
from enginewright.runtime.server.keys import Known, Unread, UnusedKeys, not_implemented, refused, taken, used_keys
from enginewright.runtime.text.messages.formats import Parser
from enginewright.runtime.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # of a completion that names no max_tokens, as in OpenAI's API
MAX_KEY_CHARS = 64
MAX_CONTAINERS = 100_000  # lists and objects of a body: each takes a hundred times as long to read as a character
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?+', re.DOTALL)

_ALWAYS = "an answer always comes so"
_SAMPLERS = "there is no such sampler"
_STRUCTURES = "structured_outputs and response_format say what an answer has to be"
_TEXT_ALONE = "prompts and answers are text"

# Keys of OpenAI's, Anthropic's, vLLM's, SGLang's and llama.cpp's requests that nothing reads, in any API.
UNREAD: Mapping[str, Unread] = {
    **taken(
        "it names the client, its user or its request",
        "client_metadata",
        "metadata",
        "request_id",
        "safety_identifier",
        "user",
        "user_profile_id",
        "workspace_id",
    ),
    **taken(
        "it is about a provider's own machines, prices and caches",
        "access_programs",
        "cache_control",
        "diagnostics",
        "inference_geo",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "speed",
        "store",
    ),
    **taken("it lets a server show the model less of a conversation, which is shown whole", "context_management"),
    **taken("it lets a server answer faster, and changes no answer", "prediction"),
    **taken("it asks for shorter or longer answers, and no chat template has a variable for that", "verbosity"),
    **refused(_ALWAYS, "add_generation_prompt", "separate_reasoning", "stream_reasoning", harmless=(True,)),
    **refused(_ALWAYS, "detokenize", "spaces_between_special_tokens", harmless=(True,)),
    **refused(_ALWAYS, "no_stop_trim", "return_hidden_states", "continue_final_message", harmless=(False,)),
    **refused(_ALWAYS, "echo", "return_token_ids", "return_tokens_as_token_ids", harmless=(False,)),
    **refused("the model's chat template comes with the engine", "chat_template"),
    **refused("there is no chat template in this API", "chat_template_kwargs", harmless=({},)),
    **refused("the tokenizer's own are added", "add_special_tokens"),
    **refused("conversations have messages alone", "documents", harmless=([],)),
    **refused("it is not shown what comes after the prompt", "suffix", harmless=("",)),
    **refused(_TEXT_ALONE, "audio", "media_io_kwargs", "mm_processor_kwargs", "prompt_embeds"),
    **refused(_TEXT_ALONE, "image", "image_data", "images", "audio_data", "video_data", harmless=([],)),
    **refused(_TEXT_ALONE, "modalities", harmless=(["text"],)),
    **refused("a prompt is read whole", "truncate_prompt_tokens", "truncate", "transforms", harmless=([], False)),
    **refused("tools and tool_choice have its place", "function_call", harmless=("none", "auto")),
    **refused("tools has its place", "functions", harmless=([],), off_by=("function_call", "none")),
    **refused("this API has no tools", "tools", harmless=([],), off_by=("tool_choice", "none")),
    **refused("this API has no tools", "tool_choice", harmless=("none", "auto")),
    **refused("this API has no reasoning", "reasoning_effort", harmless=("none",)),
    **refused("this server looks nothing up", "web_search_options"),
    **refused("this server judges no texts", "moderation", "guardrails"),
    **refused("no code comes from a request", "custom_logit_processor", "logits_processors", harmless=([], "")),
    **refused("no adapters are served", "lora", "lora_path", "lora_request", harmless=([], "")),
    **refused("no KV blocks come from elsewhere", "kv_transfer_params", "bootstrap_host", "bootstrap_room"),
    **refused("there is no such option", "vllm_xargs", "session_params", harmless=({},)),
    **refused("logit_bias or stop can do it", "bad_words", harmless=([],)),
    **refused(_STRUCTURES, "ebnf", "grammar", "json_schema", "regex", "structural_tag", "guided_whitespace_pattern"),
    **refused(_SAMPLERS, "mirostat", harmless=(0,)),
    **taken("it is for a sampler that is refused", "mirostat_eta", "mirostat_tau"),
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
    **refused("truncate_prompt_tokens has its place", "max_chunks_per_doc", "max_tokens_per_doc"),
    **refused("prompt_name says which of the model's prompts texts begin with", "input_type", "instruction"),
    **refused("min_tokens is its name here", "min_new_tokens", harmless=(0,)),
    **refused("chat_template_kwargs switches reasoning on and off", "enable_thinking", "thinking", "reasoning"),
    **refused("a model thinks as long as it likes", "reasoning_budget", "thinking_budget", "thinking_token_budget"),
}

# Of a tool, in any API.
TOOL_UNREAD: Mapping[str, Unread] = {
    **taken("it is for a cache of Anthropic's", "cache_control"),
    **taken("all tools are shown at once", "defer_loading"),
    **taken("arguments come as the model writes them", "eager_input_streaming"),
    **taken("chat templates show a tool's name, description and parameters alone", "input_examples", "output_schema"),
    **refused("the model is the only caller", "allowed_callers", harmless=([], ["direct"])),
}

# Where a key has its schema, besides response_format.json_schema.
_SCHEMA_PATHS = {"response_format": "response_format.schema", "structured_outputs": "structured_outputs.json"}

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

CANDIDATES = ("best_of", "early_stopping", "length_penalty", "use_beam_search")  # answers beside those that are given
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
    "cache_salt",
    "chat_template_kwargs",
    "priority",
    "structured_outputs",
    "timeout",
)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None  # in an event of its own, at the end
    include_obfuscation: bool | None = None  # padding of OpenAI's, against who can see sizes but no text
    continuous_usage_stats: bool | None = None  # vLLM's: the usage so far, in each event


class JsonSchema(msgspec.Struct):
    """Of a response_format."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # an answer always follows its schema


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's form of a json_schema, with the type json_object

    def structure(self) -> dict[str, Any]:
        """Arguments of StructuredOutputsParams; none if it asks for nothing. Raises ApiError for what cannot be."""
        if self.type != "json_schema" and self.json_schema is not None:
            why = "response_format.json_schema goes with the type json_schema"
            raise ApiError(400, why, param="response_format.json_schema")
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format has no json_schema", param="response_format.json_schema")
        if self.type != "json_object" and self.schema is not None:
            why = "response_format.schema goes with the type json_object"
            raise ApiError(400, why, param="response_format.schema")
        match self.type:
            case "json_schema" if self.json_schema is not None:
                return {"json": self.json_schema.schema}
            case "json_object":
                return {"json_object": True} if self.schema is None else {"json": self.schema}
            case _:
                return {}


class Body(msgspec.Struct, kw_only=True, dict=True):
    """What both kinds of request have; SAMPLING are SamplingParams' own names."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    priority: int | None = None  # the lower, the more urgent
    timeout: float | None = None  # seconds since the request's arrival, after which nobody wants its answer
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    allowed_token_ids: list[int] | None = None
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    skip_special_tokens: bool | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None  # fields of StructuredOutputsParams
    guided_choice: list[str] | None = None  # older names of vLLM's for its fields
    guided_grammar: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None

    def sampling(self) -> dict[str, Any]:
        """Arguments of default_params, but for max_tokens and logprobs."""
        return {name: getattr(self, name) for name in SAMPLING} | {"structured_outputs": self._structure()}

    @property
    def structure_key(self) -> str:
        """The key that says what the answer has to be, if one does."""
        return next(iter(self._structures()), "structured_outputs")

    def _structures(self) -> dict[str, dict[str, Any]]:
        """Arguments of StructuredOutputsParams, by the keys that give some. Raises ApiError for what cannot be."""
        asked = {} if self.response_format is None else {"response_format": self.response_format.structure()}
        asked["structured_outputs"] = self.structured_outputs or {}
        for kind in ("choice", "grammar", "json", "regex"):
            value = getattr(self, f"guided_{kind}")
            asked[f"guided_{kind}"] = {} if value is None else {kind: value}
        return {key: arguments for key, arguments in asked.items() if arguments}

    def _structure(self) -> StructuredOutputsParams | None:
        """What the answer has to be. Raises ApiError where several keys say it, or one says what cannot be."""
        return self._held_structure[0]

    @cached_property
    def _held_structure(self) -> tuple[StructuredOutputsParams | None, list[ApiError]]:
        """The same, and what is left out of its schema. Raises ApiError, also where a strict schema cannot be held."""
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
            schema, left_out = held_schema(structure.json, where, is_strict=is_strict)
            return replace(structure, json=schema), left_out
        return None, []

    def prompts(self) -> list[Prompt]:
        """What is to be answered. Raises ApiError for what cannot be."""
        raise NotImplementedError

    def params(self) -> dict[str, Any]:
        """Arguments of default_params."""
        raise NotImplementedError

    def params_for(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """As `params`, with what depends on how the model writes. Raises ApiError for what it cannot do."""
        return self.params()

    def unused(self, tokenizer: Tokenizer) -> Sequence[ApiError]:
        """Keys that this model has no use for, and parts of a schema that no grammar holds, each as the error it is
        where keys are strict.
        """
        return self._held_structure[1]

    def structure(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> StructuredOutputsParams | None:
        """What an answer to a prompt has to be; None: anything. Raises ApiError for what it cannot."""
        return self._structure()

    def parsers(self, tokenizer: Tokenizer, prompt: Sequence[int], count: int) -> Sequence[Parser | None]:
        """Of `count` answers to a prompt; None where all of it is text."""
        return [None] * count

    def include(self) -> Include:
        """What the response has beside the text of answers.

        Raises:
            ApiError: only a stream has it, or a stream does not.
        """
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options are for streams: set stream to true as well", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs are not sent in a stream; echo sends them", param="prompt_logprobs")
        if self.stream and self.use_beam_search:
            why = "use_beam_search cannot be streamed: which answers are the likeliest is known at the end"
            raise ApiError(400, why, param="use_beam_search")
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            why = "best_of above n cannot be streamed: which answers are the best is known at the end"
            raise ApiError(400, why, param="best_of")
        options = self.stream_options or StreamOptions()
        if options.include_obfuscation:
            raise not_implemented("stream_options.include_obfuscation", "no event is padded")
        return Include(
            logprobs=self.params()["logprobs"] is not None,
            prompt_logprobs=self.prompt_logprobs is not None,
            usage=bool(options.include_usage),
            usage_so_far=bool(options.continuous_usage_stats),
        )


def held_schema(schema: Any, where: str, *, is_strict: bool) -> tuple[dict[str, Any], list[ApiError]]:
    """A schema without the keywords that no answer can be held to, and errors that name those.

    Args:
        where: the schema's path in the body.

    Raises:
        ApiError: it is strict and has such keywords, or it is about integers that cannot be held exactly.
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
    """A text, token ids, or several of either.

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
    """A body as the struct of its table, its keys, sizes and types checked.

    Args:
        vocab_size: of the model; no list of tokens to choose from is longer.
        unused: notes what is not used.

    Raises:
        ApiError: 400, and which key is at fault.
    """
    return of_keys(read_keys(body, known, unused), known.kind, vocab_size)


def read_keys(body: bytes, known: Known, unused: UnusedKeys) -> dict[str, Any]:
    """The keys of a body that are used. Raises ApiError."""
    return used_keys(_decode(body), known, unused)


def of_keys(keys: dict[str, Any], kind: type[S], vocab_size: int) -> S:
    """A body whose keys are known, its sizes and types checked; arguments as of `decode`. Raises ApiError."""
    most = {"allowed_token_ids": vocab_size, "logit_bias": MAX_BIASED_TOKENS, "stop": MAX_STOPS}
    for name, count in (most | {"stop_token_ids": MAX_STOPS}).items():  # before each of the entries is looked at
        if isinstance(keys.get(name), list | dict) and len(keys[name]) > count:
            raise ApiError(400, f"{name} must not hold more than {count} entries", param=name)
    return convert(keys, kind)


def convert(value: Any, kind: type[T], where: str = "") -> T:
    """A decoded value as a struct.

    Args:
        where: the value's path in the body, "messages[0]".

    Raises:
        ApiError: 400, a type is wrong.
    """
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise _of_type_error(str(error), where) from None


def read_kind(value: dict[str, Any], kinds: Mapping[str, type[S]], where: str) -> S:
    """A struct of the kind that the value's `type` says.

    Raises:
        ApiError: 400, there is no such kind, or it is wrong.
    """
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(kinds)
        raise not_implemented(f"{where}.type", f"{str(kind)[:40]!r}; there are {known}")
    return convert(value, kinds[kind], where)


def _decode(body: bytes) -> dict[str, Any]:
    """The whole of a body as Python objects."""
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:  # texts may be full of them
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
    """msgspec says: Expected `int`, got `str` - at `$.stop[0]`."""
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
