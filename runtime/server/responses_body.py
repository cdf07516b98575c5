"""POST /v1/responses: reads a conversation of items into the chat completion request that it corresponds to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal

import msgspec

from enginewright.runtime.server.chat import UNREAD_IN_CHAT_APIS, ChatBody, RefusalPart
from enginewright.runtime.server.errors import ApiError, error_context
from enginewright.runtime.server.keys import Kinds, UnusedKeys, ignored, known_keys, not_implemented, refused
from enginewright.runtime.server.protocol import (
    EXTRAS,
    TOOL_UNREAD,
    body_of,
    convert,
    read_keys,
    read_kind,
)

SHARED_KEYS = ("model", "parallel_tool_calls", "stream", *EXTRAS)  # keys with the same meaning in a chat completion
RENAMES = {
    r"logprobs\b": "top_logprobs",
    r"max_(completion_)?tokens\b": "max_output_tokens",
    r"messages\b": "input",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"tool_choice\.allowed_tools\.": "tool_choice.",
}
# Keys that clients copy from items of earlier responses; they are stored with the items.
COPIED_KEYS = (
    "annotations",
    "encrypted_content",
    "logprobs",
    "namespace",
    "parsed",
    "parsed_arguments",
    "phase",
    "prompt_cache_breakpoint",
)
LOGPROBS = "message.output_text.logprobs"
# Accepted values of `include`. All but the first change nothing: reasoning is always included as text, and there are
# neither hosted tools nor images.
INCLUDED = (
    LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


class Item(msgspec.Struct, kw_only=True):
    """Item of the conversation."""

    id: str | None = None  # id of the item
    status: str | None = None  # "completed" or "incomplete"


class MessageItem(Item, kw_only=True):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system", "developer"]  # author of the message
    content: str | list[dict[str, Any]]  # text or content parts


class CallItem(Item, kw_only=True):
    """Tool call of the assistant."""

    call_id: str  # id of the call
    name: str  # name of the tool
    arguments: str | None = None  # arguments as JSON, or the text that a model wrote instead


class OutputItem(Item, kw_only=True):
    """Result of a tool call."""

    call_id: str  # id of the call
    output: str | list[dict[str, Any]]  # text or text parts that the tool returned


class ReasoningItem(Item, kw_only=True):
    """Reasoning of an earlier answer."""

    summary: list[dict[str, Any]] = []  # parts of a summary
    content: list[dict[str, Any]] | None = None  # parts of the complete reasoning


class ResponseTextPart(msgspec.Struct):
    """Text part of a message, a result or a reasoning."""

    text: str  # text of the part


ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(msgspec.Struct):
    """Tool that the model may call."""

    name: str  # name of the tool
    description: str | None = None  # description for the model
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments
    strict: bool | None = None  # true if arguments always follow the schema


class AllowedTool(msgspec.Struct):
    """Tool in a list of allowed ones."""

    type: Literal["function"]  # kind of the tool
    name: str  # name of the tool


class AllowedToolChoice(msgspec.Struct):
    """List of the tools that may be called; it is checked where it is compared with the request's tools."""

    type: Literal["allowed_tools"]  # kind of the constraint
    mode: str  # "auto" or "required"
    tools: list[AllowedTool]  # tools that may be called


class TextFormat(msgspec.Struct):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]  # kind of the format
    schema: dict[str, Any] | None = None  # JSON schema of the answer
    name: str | None = None  # name of the schema, not used
    description: str | None = None  # description of the schema, not used
    # true refuses schemas that cannot be enforced completely; answers always follow the schema
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """Settings of the answer's text."""

    format: TextFormat | None = None  # format of the answer
    verbosity: str | None = None  # length of the answer, not used


class ReasoningConfig(msgspec.Struct):
    """Settings of the model's reasoning."""

    effort: str | None = None  # reasoning effort
    # kind of summary, not used: the reasoning is sent completely
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # OpenAI's padding against observers of sizes; true is refused


class ResponsesBody(msgspec.Struct):
    """Keys of the Responses API that a chat completion does not have, or that mean something else there."""

    input: str | list[dict[str, Any]]  # conversation as a text or as items
    include: list[str] | None = None  # optional parts of the response, of INCLUDED
    instructions: str | None = None  # system prompt; that of a previous response is not repeated
    max_output_tokens: int | None = None  # maximum number of tokens of the answer
    metadata: dict[str, str] | None = None  # the client's own keys, repeated in the response
    previous_response_id: str | None = None  # id of the response whose conversation is continued
    reasoning: ReasoningConfig | None = None  # settings of the model's reasoning
    store: bool | None = None  # false does not keep the response
    stream_options: ResponseStreamOptions | None = None  # options of a stream
    text: TextConfig | None = None  # format of the answer
    tool_choice: str | dict[str, Any] | None = None  # constraint on the tools that are called
    tools: list[dict[str, Any]] | None = None  # tools that the model may call
    top_logprobs: int | None = None  # number of likeliest tokens at each position, with LOGPROBS in include
    # accepted and not used: a conversation that does not fit is always refused
    truncation: Literal["auto", "disabled"] | None = None

    def items(self) -> list[dict[str, Any]]:
        """The items of the input, each with its type and an id."""
        given = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        items = []
        for value in given:
            typed = {"type": "message", **value}
            content = typed.get("content")
            if typed["type"] == "message" and isinstance(content, str):
                kind = "output_text" if typed.get("role") == "assistant" else "input_text"
                typed["content"] = [{"type": kind, "text": content}]
            about = {"id": f"{PREFIXES.get(str(typed['type']), '')}{token_hex(12)}", "status": "completed"}
            items.append(about | {key: entry for key, entry in typed.items() if entry is not None})
        return items

    def chat(self) -> dict[str, Any]:
        """Keys of a ChatBody, except for its messages. Raises ApiError for values that are not supported."""
        for value in self.include or ():
            if value not in INCLUDED:
                raise not_implemented("include", f"{value[:60]!r}; there is {', '.join(INCLUDED)}")
        keys = {"max_completion_tokens": self.max_output_tokens} | self._tools()
        if self.stream_options is not None:
            keys["stream_options"] = msgspec.to_builtins(self.stream_options)
        if LOGPROBS in (self.include or ()):
            keys |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        elif self.top_logprobs:
            why = f'top_logprobs needs include: ["{LOGPROBS}"]'
            raise ApiError(400, why, param="top_logprobs")
        if self.reasoning is not None:
            keys["reasoning_effort"] = self.reasoning.effort
        if self.text is not None:
            keys["response_format"] = self._format(self.text.format)
        return keys

    def _format(self, form: TextFormat | None) -> dict[str, Any] | None:
        if form is None:
            return None
        if form.type != "json_schema":
            for name in ("schema", "name", "description", "strict"):
                if getattr(form, name) is not None:
                    why = f"text.format.{name} is only for the type json_schema"
                    raise ApiError(400, why, param=f"text.format.{name}")
            return {"type": form.type}
        if form.schema is None:
            raise ApiError(400, "text.format has no schema", param="text.format.schema")
        return {"type": form.type, "json_schema": {"schema": form.schema, "strict": form.strict}}

    def _tools(self) -> dict[str, Any]:
        kinds = {"function": FunctionTool}
        functions = [read_kind(tool, kinds, f"tools[{index}]") for index, tool in enumerate(self.tools or ())]
        names, choice = [function.name for function in functions], self.tool_choice
        match choice:
            case None | "none" | "auto":
                pass
            case "required" if names:
                pass
            case {"type": "function", "name": str(name), **others} if name in names and not others:
                choice = {"type": "function", "function": {"name": name}}
            case {"type": "allowed_tools", "mode": mode, "tools": list(allowed), **others} if not others:
                named = [convert(one, AllowedTool, f"tool_choice.tools[{index}]") for index, one in enumerate(allowed)]
                wanted = [{"type": "function", "function": {"name": one.name}} for one in named]
                choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": wanted}}
            case _:
                rule = 'must be "none", "auto", "required" or {"type": "function", "name": …} of one of tools'
                why = f"tool_choice {rule}: {', '.join(names) or 'none'}"
                raise ApiError(400, why, param="tool_choice", code="invalid_value")
        given = [
            {key: entry for key, entry in msgspec.to_builtins(one).items() if entry is not None} for one in functions
        ]
        return {"tools": [{"type": "function", "function": one} for one in given], "tool_choice": choice}

    def about(self, keys: Mapping[str, Any], *, is_stored: bool) -> dict[str, Any]:
        """Keys of the request that the response repeats.

        Args:
            keys: all keys of the body.
            is_stored: whether the response is kept.
        """
        return {
            "background": False,
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": None,
            "metadata": self.metadata or {},
            "parallel_tool_calls": keys.get("parallel_tool_calls") is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": None, "summary": None} | (keys.get("reasoning") or {}),
            "store": is_stored,
            "temperature": keys.get("temperature"),
            "text": {"format": {"type": "text"}} | (keys.get("text") or {}),
            "tool_choice": self.tool_choice or "auto",
            "tools": self.tools or [],
            "top_logprobs": self.top_logprobs or 0,
            "top_p": keys.get("top_p"),
            "truncation": self.truncation or "disabled",
        }


_PARTS = {
    **dict.fromkeys(
        ("input_text", "output_text", "reasoning_text", "summary_text"), known_keys(ResponseTextPart, also=COPIED_KEYS)
    ),
    "refusal": known_keys(RefusalPart, also=COPIED_KEYS),
}
CONTENT = Kinds(_PARTS)
RESPONSES_KEYS = known_keys(
    ResponsesBody,
    {
        **UNREAD_IN_CHAT_APIS,
        **ignored("it limits calls of hosted tools, and there are none", "max_tool_calls"),
        **refused("a response is sent on the connection of its request", "background", harmless=(False,)),
        **refused("previous_response_id continues a conversation", "conversation"),
        **refused("this server keeps no prompts", "prompt"),
    },
    also=SHARED_KEYS,
    input=Kinds(
        {
            "message": known_keys(MessageItem, also=COPIED_KEYS, content=CONTENT),
            "function_call": known_keys(CallItem, also=COPIED_KEYS),
            "function_call_output": known_keys(OutputItem, also=COPIED_KEYS, output=CONTENT),
            "reasoning": known_keys(ReasoningItem, also=COPIED_KEYS, summary=CONTENT, content=CONTENT),
        },
        default="message",
    ),
    reasoning=known_keys(
        ReasoningConfig,
        {
            **ignored("it is an older name of summary", "generate_summary"),
            **refused("there is one mode", "mode", harmless=("standard",)),
            **refused("the chat template decides which earlier reasoning is shown", "context", harmless=("auto",)),
        },
    ),
    tools=Kinds({"function": known_keys(FunctionTool, TOOL_UNREAD)}, may_skip=True),
    tool_choice=Kinds({"function": known_keys(AllowedTool), "allowed_tools": known_keys(AllowedToolChoice)}),
)


@dataclass(frozen=True)
class ResponsesRequest:
    """A request as a chat completion, and what its response needs of it."""

    chat: ChatBody  # chat completion request that it corresponds to
    about: Mapping[str, Any]  # keys that the response repeats
    items: Sequence[Mapping[str, Any]]  # items of the whole conversation
    is_stored: bool  # True if the response is kept


def read_responses(
    data: bytes,
    vocab_size: int,
    unused: UnusedKeys,
    conversation: Callable[[str], list[dict[str, Any]] | None],
    *,
    may_store: bool,
) -> ResponsesRequest:
    """Reads the body of a request of the Responses API.

    Args:
        data: the body, JSON.
        vocab_size: the largest vocabulary of the engines, the limit of lists of tokens.
        unused: collects the keys that are not used.
        conversation: gives all items up to the end of a response by its id; None if it is not kept.
        may_store: whether the server keeps responses at all.

    Raises:
        ApiError: 400, with the key that is wrong.
    """
    keys = read_keys(data, RESPONSES_KEYS, unused)
    body = convert(keys, ResponsesBody)
    if body.store and not may_store:
        raise not_implemented("store", "this server keeps no responses (--responses-store)")
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = conversation(body.previous_response_id)
        if found is None:
            why = f"there is no response {body.previous_response_id[:100]!r} to continue, or it is no longer kept"
            raise ApiError(400, why, param="previous_response_id", code="previous_response_not_found")
        before = found
    items = before + body.items()
    if len(items) == len(before):
        raise ApiError(400, "input is empty", param="input")
    chat = {name: keys[name] for name in SHARED_KEYS if keys.get(name) is not None} | body.chat()
    chat["messages"] = _messages(body.instructions, items, len(before))
    with error_context("input", RENAMES):
        read = body_of(chat, ChatBody, vocab_size)
    is_stored = may_store and body.store is not False and not read.leases_prompt
    return ResponsesRequest(read, body.about(keys, is_stored=is_stored), items, is_stored)


def _messages(instructions: str | None, items: Sequence[dict[str, Any]], num_before: int) -> list[dict[str, Any]]:
    """Messages of a chat; consecutive reasoning, text and calls of the assistant form one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []

    def assistant(*used_keys: str) -> dict[str, Any]:
        """The assistant's message to extend: a new one if the last one has one of these keys already."""
        if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(key) for key in used_keys):
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for index, value in enumerate(items, start=-num_before):
        where = f"input[{index}]"
        match read_kind(value, ITEMS, where):
            case MessageItem(role="assistant", content=content):
                assistant("content", "tool_calls")["content"] = _text(content, f"{where}.content")
            case MessageItem(role=role, content=content):
                messages.append({"role": role, "content": _text(content, f"{where}.content")})
            case ReasoningItem(summary=summary, content=thoughts):
                named, parts = ("content", thoughts) if thoughts else ("summary", summary)
                text = _text(parts, f"{where}.{named}", ("reasoning_text", "summary_text"))
                if text:  # empty if the reasoning is encrypted
                    assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case CallItem(call_id=id, name=name, arguments=arguments):
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                assistant().setdefault("tool_calls", []).append(call)
            case OutputItem(call_id=id, output=output):
                text = _text(output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": id, "content": text})
    return messages


def _text(content: str | list[dict[str, Any]], where: str, kinds: Sequence[str] = ("input_text", "output_text")) -> str:
    """Text of parts that are all text."""
    if isinstance(content, str):
        return content
    known: dict[str, type[ResponseTextPart | RefusalPart]] = dict.fromkeys(kinds, ResponseTextPart)
    return "\n".join(
        read_kind(one, known | {"refusal": RefusalPart}, f"{where}[{index}]").text for index, one in enumerate(content)
    )
