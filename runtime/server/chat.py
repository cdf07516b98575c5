"""POST /v1/chat/completions: bodies and responses of chats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

import msgspec

from enginewright.runtime.core.outputs import Delta
from enginewright.runtime.core.prompts import ROLES, Conversation, Prompt
from enginewright.runtime.sampling.parameters import MAX_LOGPROBS
from enginewright.runtime.sampling.sampler import SampledToken
from enginewright.runtime.sampling.structured_outputs import StructuredOutputsParams
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import Choice, ChoicesForm, Include, Usage, encode, new_call_id
from enginewright.runtime.server.keys import NOTHING, Kinds, Unread, ignored, known_keys, not_implemented, refused
from enginewright.runtime.server.protocol import (
    TOOL_UNREAD,
    UNREAD,
    Body,
    convert,
    read_kind,
)
from enginewright.runtime.server.tools import AllowedChoice, CalledFunction, Function, NamedTool, Tool, ToolCall, Tools
from enginewright.runtime.text.messages.calls import ArgumentsPiece, CallPiece, whole_calls
from enginewright.runtime.text.messages.formats import Parser, new_parser, reasons
from enginewright.runtime.text.messages.grammar import before_answer
from enginewright.runtime.text.messages.parser import Piece, ReasoningPiece, TextPiece
from enginewright.runtime.text.tokenizer import Tokenizer

THINKING = ("enable_thinking", "thinking")  # names of the template variable that turns reasoning off; both are in use
MAX_TOKENS = 2**31 - 1
KEPT_BY_CLIENTS = ignored(
    "clients copy it from earlier answers, or keep it for themselves",
    "annotations",
    "cache_control",
    "extra_content",
    "id",
    "index",
    "metadata",
    "parsed",
    "parsed_arguments",
    "provider_specific_fields",
    "status",
    "thinking_blocks",
    "timestamp",
    "type",
    "weight",
)


class TextPart(msgspec.Struct):
    """Text part of a message's content; other kinds of parts are refused, and no URL is ever fetched."""

    text: str  # text of the part


class RefusalPart(msgspec.Struct):
    """Refusal of an assistant in an earlier answer."""

    refusal: str  # text of the refusal

    @property
    def text(self) -> str:
        """Text of the refusal, under the name that text parts use."""
        return self.refusal


PARTS: Mapping[str, type[TextPart | RefusalPart]] = {"text": TextPart, "refusal": RefusalPart}


class Message(msgspec.Struct):
    """Message of the conversation."""

    role: str  # author of the message, one of ROLES
    content: str | list[dict[str, Any]] | None = None  # text or content parts
    name: str | None = None  # name of the author or the tool
    reasoning: str | None = None  # reasoning of an earlier answer
    reasoning_content: str | None = None  # reasoning of an earlier answer, under its other name
    refusal: str | None = None  # refusal of an assistant in an earlier answer
    tool_call_id: str | None = None  # id of the call whose result a tool's message holds
    tool_calls: list[ToolCall] | None = None  # calls of an assistant's message

    @classmethod
    def read(cls, value: dict[str, Any], where: str) -> "Message":
        """Reads a message of a body.

        Args:
            value: the message, decoded from JSON.
            where: its path in the body, "messages[0]".

        Raises:
            ApiError: a value has a wrong type, or the role is unknown.
        """
        message = convert(value, cls, where)
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            why = f"{where}.role is {message.role[:20]!r}: there are {known}"
            raise ApiError(400, why, param=f"{where}.role", code="invalid_value")
        return message

    def for_template(self, where: str) -> dict[str, Any]:
        """The message in the form that chat templates take.

        Args:
            where: its path in the body.

        Raises:
            ApiError: the content cannot be shown to the model.
        """
        message: dict[str, Any] = {"role": ROLES[self.role], "content": self._text(f"{where}.content")}
        if self.refusal:
            message["content"] = "\n".join(filter(None, (message["content"], self.refusal)))
        others = {name: getattr(self, name) for name in ("name", "reasoning", "reasoning_content", "tool_call_id")}
        message |= {name: value for name, value in others.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message

    def _text(self, where: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":  # an answer that was empty
                return ""
            raise ApiError(400, f"{where}: expected a text or a list of parts", param=where, code="invalid_type")
        parts = [read_kind(value, PARTS, f"{where}[{place}]") for place, value in enumerate(self.content)]
        return "\n".join(part.text for part in parts)


class ChatBody(Body, kw_only=True):
    """Body of a chat completion request."""

    messages: list[dict[str, Any]]  # conversation, oldest message first
    tools: list[Any] | None = None  # tools that the model may call
    tool_choice: str | dict[str, Any] | None = None  # constraint on the tools that are called
    parallel_tool_calls: bool | None = None  # false allows at most one call
    include_reasoning: bool | None = None  # false leaves the reasoning out of the response
    # reasoning effort, for chat templates that have such a variable
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    max_completion_tokens: int | None = None  # maximum number of tokens of the answer, another name of max_tokens
    logprobs: bool | None = None  # true if the response has log-probabilities of the answer's tokens
    top_logprobs: int | None = None  # number of likeliest tokens at each position of the answer
    add_generation_prompt: bool | None = None  # false ends the prompt with the last message
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the chat template

    def prompts(self) -> list[Prompt]:
        """The conversation as the only prompt. Raises ApiError for messages that cannot be shown to the model."""
        if not self.messages:
            raise ApiError(400, "messages is empty", param="messages")
        messages = []
        for place, value in enumerate(self.messages):
            where = f"messages[{place}]"
            messages.append(Message.read(value, where).for_template(where))
        tools, turn = self._tools, self.add_generation_prompt is not False
        return [Conversation(messages, turn, self._template_kwargs(), tools.shown, bool(tools.forced))]

    @cached_property
    def _tools(self) -> Tools:
        return Tools(self.tools, self.tool_choice)

    def _template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template. Raises ApiError if they contradict the reasoning effort."""
        kwargs: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            kwargs = {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            kwargs = dict.fromkeys(THINKING, False)
        given = self.chat_template_kwargs or {}
        refuse_contradiction("reasoning_effort", kwargs, given)
        return kwargs | given

    def params_for(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Arguments of default_params. Raises ApiError for what this model cannot do."""
        tools, params = self._tools, self.params()
        tools.check(tokenizer)
        can_stop_thinking = any(map(tokenizer.template_reads, THINKING))
        if self.reasoning_effort == "none" and reasons(tokenizer.message_format) and not can_stop_thinking:
            raise not_implemented("reasoning_effort", "'none': the model's chat template always lets it think")
        if tools.forced and self.use_beam_search:
            raise ApiError(400, "tool_choice cannot be combined with use_beam_search", param="tool_choice")
        return params

    def unused(self, tokenizer: Tokenizer) -> Sequence[ApiError]:
        """Keys that this model has no use for, each as an ApiError."""
        unused = [*super().unused(tokenizer), *self._tools.unenforced]
        if self.reasoning_effort not in (None, "none") and not tokenizer.template_reads("reasoning_effort"):
            unused.append(not_implemented("reasoning_effort", "the model's chat template knows none"))
        return unused

    @property
    def structure_key(self) -> str:
        """The key that defines the structure of the answer."""
        return super().structure_key if self._structures() and not self._tools.forced else "tools"

    def structure(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> StructuredOutputsParams | None:
        """Structure of the message: the answer's, which applies where the reasoning ends, or that of tool calls."""
        tools, answer, place = self._tools, self._structure(), tokenizer.reasoning_place(prompt)
        if tools.may_be_called is not None:
            return tools.structure(tokenizer, place, answer, several=self.parallel_tool_calls is not False)
        if answer is None or answer.is_whole:
            return answer
        before = before_answer(tokenizer.message_format, tokenizer.mark_ids, place)
        return answer if before is None else replace(answer, before=before)

    def include(self) -> Include:
        """Optional parts of the response."""
        return replace(super().include(), reasoning=self.include_reasoning is not False)

    def parsers(self, tokenizer: Tokenizer, prompt: Sequence[int], count: int) -> Sequence[Parser | None]:
        """One parser per answer, for reasoning, text and tool calls."""
        tools = self._tools
        answer = None if tools.forced else self._structure()
        is_json = answer is not None and answer.is_json
        is_whole = answer is not None and answer.is_whole  # the structure covers the whole message, reasoning included
        return [
            new_parser(
                tools.form(tokenizer),
                None if is_json and is_whole else tools.may_be_called,
                in_reasoning=not is_whole and tokenizer.ends_in_reasoning(prompt),
                several=self.parallel_tool_calls is not False,
                only_first=is_json
                or (answer is not None and not is_whole),  # marks within its strings are ordinary text
            )
            for _ in range(count)
        ]

    def params(self) -> dict[str, Any]:
        """Arguments of default_params, without what depends on the model."""
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set it to true", param="top_logprobs")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise ApiError(400, f"top_logprobs must be between 0 and {MAX_LOGPROBS}", param="top_logprobs")
        tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.max_tokens not in (None, tokens):
            why = "max_tokens and max_completion_tokens differ: they are two names of one limit"
            raise ApiError(400, why, param="max_tokens")
        if tokens is not None and tokens == self.max_completion_tokens and not 0 <= tokens <= MAX_TOKENS:
            why = f"max_completion_tokens must be between 0 and {MAX_TOKENS}, not {tokens}"
            raise ApiError(400, why, param="max_completion_tokens")
        return {
            **self.sampling(),
            "max_tokens": tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


MESSAGE = known_keys(
    Message,
    {
        **KEPT_BY_CLIENTS,
        **refused("messages are text", "audio", "images", harmless=NOTHING),
        **refused("tool_calls replaces it", "function_call", harmless=NOTHING),
        **refused("tools are the request's", "tools", harmless=NOTHING),
    },
    content=Kinds(
        {
            "text": known_keys(
                TextPart,
                {
                    **KEPT_BY_CLIENTS,
                    **refused("parts are text", "audio_url", "file", "image_url", "input_audio", "refusal", "video_url",
                              harmless=NOTHING),
                },
            ),
            "refusal": known_keys(RefusalPart, KEPT_BY_CLIENTS),
        }
    ),
    tool_calls=known_keys(ToolCall, KEPT_BY_CLIENTS, function=known_keys(CalledFunction, KEPT_BY_CLIENTS)),
)  # fmt: skip
CHAT_KEYS = known_keys(
    ChatBody,
    UNREAD,
    messages=MESSAGE,
    tools=Kinds(
        {"function": known_keys(Tool, TOOL_UNREAD, function=known_keys(Function, TOOL_UNREAD))},
        may_skip=True,
    ),
    tool_choice=Kinds({"function": known_keys(NamedTool), "allowed_tools": known_keys(AllowedChoice)}),
)
# Keys that the APIs built on chats do not read, unless such an API reads a key itself.
UNREAD_IN_CHAT_APIS: Mapping[str, Unread] = {
    **refused("it is a key of chat completions", *ChatBody.__struct_fields__, harmless=NOTHING),
    **refused("there is one answer in this API", "n", "best_of", harmless=(1,)),
    **refused("this API has another key for it", "parallel_tool_calls", "include_reasoning", harmless=(True,)),
    **UNREAD,
}


def refuse_contradiction(key: str, names: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses template variables that contradict the key that sets them.

    Args:
        key: the key of the body.
        names: the template variables that it sets.
        given: chat_template_kwargs of the body.

    Raises:
        ApiError: a variable has two different values.
    """
    for name, value in names.items():
        if given.get(name, value) != value:
            raise ApiError(400, f"{key} and chat_template_kwargs set different values of {name}", param=key)


def _called(pieces: Sequence[Piece], first: int) -> list[dict[str, Any]]:
    """Tool calls, or parts of them, each with its number.

    Args:
        pieces: pieces of a message.
        first: the number of the first call that starts in them; arguments before it belong to the call before.
    """
    calls: list[dict[str, Any]] = []
    for piece in whole_calls([piece for piece in pieces if isinstance(piece, CallPiece | ArgumentsPiece)]):
        if isinstance(piece, CallPiece):
            function = {"name": piece.name, "arguments": piece.arguments}
            calls.append({"index": first, "id": new_call_id(), "type": "function", "function": function})
            first += 1
        else:
            calls.append({"index": first - 1, "function": {"arguments": piece.text}})
    return calls


class ChatForm(ChoicesForm):
    """Response of a chat completion."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_key = "messages"

    def opening(self, choice: Choice, cached_tokens: int) -> bytes:
        """The event with the role, before the first text."""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._event(choice, role)

    def _piece(self, text: str) -> bytes:
        return b',"delta":{"content":' + encode(text) + b"}"

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """The event of a delta: content, reasoning and calls."""
        if choice.parser is None:
            return super().chunk(choice, delta)
        pieces = choice.push(delta)
        first = choice.parser.num_calls - sum(isinstance(piece, CallPiece) for piece in pieces)
        message = self._message(pieces, first)
        if not message and delta.finish_reason is None and not self.include.logprobs:
            return b""
        return self._chunk(choice, delta, b',"delta":' + encode(message))

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        if choice.parser is not None:
            pieces = [piece for delta in choice.deltas for piece in choice.push(delta)]
            message = {"role": "assistant", "content": None} | self._message(pieces, 0)
            for call in message.get("tool_calls", ()):
                del call["index"]
            if "tool_calls" not in message:
                message["content"] = message["content"] or ""
        return {"message": message}

    def _message(self, pieces: Sequence[Piece], first: int) -> dict[str, Any]:
        """Keys of a message, or of a part of one.

        Args:
            pieces: pieces of the message.
            first: the number of the first call that starts in them.
        """
        text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
        message: dict[str, Any] = {"content": text} if text else {}
        if reasoning and self.include.reasoning:  # clients read either of the two names
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        calls = _called(pieces, first)
        return message | ({"tool_calls": calls} if calls else {})

    def finish_reason(self, choice: Choice) -> str | None:
        """Finish reason of a choice, "tool_calls" if it ended with calls."""
        calls = choice.parser is not None and choice.parser.num_calls > 0
        return "tool_calls" if calls and choice.finish_reason == "stop" else choice.finish_reason

    def _usage(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        whole = usage.to_dict()
        reasoning = {"reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices)}
        return whole | {"completion_tokens_details": reasoning | whole.get("completion_tokens_details", {})}

    def _response_keys(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Log-probabilities of the prompt, which is the same for all choices."""
        keys = super()._response_keys(choices)
        return keys | (
            {"prompt_logprobs": self.prompt_logprobs(choices[0].prompt)} if self.include.prompt_logprobs else {}
        )

    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        """Log-probabilities of tokens, in OpenAI's format."""
        return {"content": [self._scored(sampled) for sampled in tokens], "refusal": None}
