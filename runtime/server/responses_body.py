"""POST /v1/responses: a conversation of items, read as the chat that it stands for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Literal

import msgspec

from enginewright.runtime.server.chat import OF_CHATS, ChatBody, RefusalPart
from enginewright.runtime.server.errors import ApiError, speaking_of
from enginewright.runtime.server.keys import Kinds, UnusedKeys, known_of, not_implemented, refused, taken
from enginewright.runtime.server.protocol import (
    EXTRAS,
    TOOL_UNREAD,
    convert,
    of_keys,
    read_keys,
    read_kind,
)

SAME = ("model", "parallel_tool_calls", "stream", *EXTRAS)  # keys that mean the same in a chat
RENAMES = {
    r"logprobs\b": "top_logprobs",
    r"max_(completion_)?tokens\b": "max_output_tokens",
    r"messages\b": "input",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?": "text.format",
    r"tool_choice\.allowed_tools\.": "tool_choice.",
}
# What clients send back of items that they got, which are kept with it.
KEPT = (
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
# What a response may include. All but the first change nothing: reasoning is there as text, and neither hosted tools
# nor images are.
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
    id: str | None = None
    status: str | None = None


class MessageItem(Item, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]


class CallItem(Item, kw_only=True):
    call_id: str
    name: str
    arguments: str | None = None  # JSON, or what a model has written in place of it


class OutputItem(Item, kw_only=True):
    """What a call has returned."""

    call_id: str
    output: str | list[dict[str, Any]]


class ReasoningItem(Item, kw_only=True):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None


class TextPart(msgspec.Struct):
    text: str


ITEMS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class AllowedTool(msgspec.Struct):
    type: Literal["function"]
    name: str


class AllowedChoice(msgspec.Struct):
    """tools are read where they are compared with those of the request."""

    type: Literal["allowed_tools"]
    mode: str
    tools: list[AllowedTool]


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # an answer always follows its schema


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # the reasoning itself comes, whole


class StreamOptions(msgspec.Struct):
    include_obfuscation: bool | None = None  # padding of OpenAI's, against who can see sizes but no text


class ResponsesBody(msgspec.Struct):
    """Keys that mean something else in a chat, or nothing."""

    input: str | list[dict[str, Any]]
    include: list[str] | None = None
    instructions: str | None = None  # before the input; those of a previous response are not shown again
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None  # with LOGPROBS in include
    truncation: Literal["auto", "disabled"] | None = None  # a conversation that does not fit is refused all the same

    def items(self) -> list[dict[str, Any]]:
        """The input, each item with its type and an id."""
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
        """Keys of a ChatBody, but for its messages. Raises ApiError for what cannot be."""
        for value in self.include or ():
            if value not in INCLUDED:
                raise not_implemented("include", f"{value[:60]!r}; there is {', '.join(INCLUDED)}")
        keys = {"max_completion_tokens": self.max_output_tokens} | self._tools()
        if self.stream_options is not None:
            keys["stream_options"] = msgspec.to_builtins(self.stream_options)
        if LOGPROBS in (self.include or ()):
            keys |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        elif self.top_logprobs:
            why = f'top_logprobs goes with include: ["{LOGPROBS}"]'
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
                    why = f"text.format.{name} goes with the type json_schema"
                    raise ApiError(400, why, param=f"text.format.{name}")
            return {"type": form.type}
        if form.schema is None:
            raise ApiError(400, "text.format has no schema", param="text.format.schema")
        return {"type": form.type, "json_schema": {"schema": form.schema, "strict": form.strict}}

    def _tools(self) -> dict[str, Any]:
        kinds = {"function": FunctionTool}
        functions = [read_kind(tool, kinds, f"tools[{place}]") for place, tool in enumerate(self.tools or ())]
        names, choice = [function.name for function in functions], self.tool_choice
        match choice:
            case None | "none" | "auto":
                pass
            case "required" if names:
                pass
            case {"type": "function", "name": str(name), **others} if name in names and not others:
                choice = {"type": "function", "function": {"name": name}}
            case {"type": "allowed_tools", "mode": mode, "tools": list(allowed), **others} if not others:
                named = [convert(one, AllowedTool, f"tool_choice.tools[{place}]") for place, one in enumerate(allowed)]
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
        """What the response repeats of its request."""
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
    **dict.fromkeys(("input_text", "output_text", "reasoning_text", "summary_text"), known_of(TextPart, also=KEPT)),
    "refusal": known_of(RefusalPart, also=KEPT),
}
CONTENT = Kinds(_PARTS)
RESPONSES_KEYS = known_of(
    ResponsesBody,
    {
        **OF_CHATS,
        **taken("it limits calls of hosted tools, and there are none", "max_tool_calls"),
        **refused("a response is sent where it is asked for", "background", harmless=(False,)),
        **refused("previous_response_id goes on from a response", "conversation"),
        **refused("this server keeps no prompts", "prompt"),
    },
    also=SAME,
    input=Kinds(
        {
            "message": known_of(MessageItem, also=KEPT, content=CONTENT),
            "function_call": known_of(CallItem, also=KEPT),
            "function_call_output": known_of(OutputItem, also=KEPT, output=CONTENT),
            "reasoning": known_of(ReasoningItem, also=KEPT, summary=CONTENT, content=CONTENT),
        },
        default="message",
    ),
    reasoning=known_of(
        ReasoningConfig,
        {
            **taken("it is an older name of summary", "generate_summary"),
            **refused("there is one mode", "mode", harmless=("standard",)),
            **refused("the chat template says what is shown of earlier reasoning", "context", harmless=("auto",)),
        },
    ),
    tools=Kinds({"function": known_of(FunctionTool, TOOL_UNREAD)}, may_skip=True),
    tool_choice=Kinds({"function": known_of(AllowedTool), "allowed_tools": known_of(AllowedChoice)}),
)


@dataclass(frozen=True)
class ResponsesRequest:
    """A request as the chat that it stands for, and what its response needs of it."""

    chat: ChatBody
    about: Mapping[str, Any]  # what the response repeats
    items: Sequence[Mapping[str, Any]]  # all of the conversation
    is_stored: bool


def read_responses(
    data: bytes,
    vocab_size: int,
    unused: UnusedKeys,
    conversation: Callable[[str], list[dict[str, Any]] | None],
    *,
    may_store: bool,
) -> ResponsesRequest:
    """A body of the Responses API.

    Args:
        unused: notes what is not used.
        conversation: all items up to the end of a response, by its id; None: there is none.
        may_store: whether responses are kept at all.

    Raises:
        ApiError: 400, and which key is at fault.
    """
    keys = read_keys(data, RESPONSES_KEYS, unused)
    body = convert(keys, ResponsesBody)
    if body.store and not may_store:
        raise not_implemented("store", "this server keeps no responses (--responses-store)")
    before: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        found = conversation(body.previous_response_id)
        if found is None:
            why = f"there is no response {body.previous_response_id[:100]!r} to go on from, or it is not kept any more"
            raise ApiError(400, why, param="previous_response_id", code="previous_response_not_found")
        before = found
    items = before + body.items()
    if len(items) == len(before):
        raise ApiError(400, "input is empty", param="input")
    chat = {name: keys[name] for name in SAME if keys.get(name) is not None} | body.chat()
    chat["messages"] = _messages(body.instructions, items, len(before))
    is_stored = may_store and body.store is not False
    with speaking_of("input", RENAMES):
        read = of_keys(chat, ChatBody, vocab_size)
    return ResponsesRequest(read, body.about(keys, is_stored=is_stored), items, is_stored)


def _messages(instructions: str | None, items: Sequence[dict[str, Any]], num_before: int) -> list[dict[str, Any]]:
    """What the assistant has thought, said and called in one go is one message."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": instructions}] if instructions else []

    def assistant(*taken: str) -> dict[str, Any]:
        """The assistant's message that goes on: a new one if the last one has one of these keys already."""
        if not messages or messages[-1]["role"] != "assistant" or any(messages[-1].get(key) for key in taken):
            messages.append({"role": "assistant", "content": ""})
        return messages[-1]

    for place, value in enumerate(items, start=-num_before):
        where = f"input[{place}]"
        match read_kind(value, ITEMS, where):
            case MessageItem(role="assistant", content=content):
                assistant("content", "tool_calls")["content"] = _text(content, f"{where}.content")
            case MessageItem(role=role, content=content):
                messages.append({"role": role, "content": _text(content, f"{where}.content")})
            case ReasoningItem(summary=summary, content=thoughts):
                named, parts = ("content", thoughts) if thoughts else ("summary", summary)
                text = _text(parts, f"{where}.{named}", ("reasoning_text", "summary_text"))
                if text:  # none where it is encrypted
                    assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text
            case CallItem(call_id=id, name=name, arguments=arguments):
                call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                assistant().setdefault("tool_calls", []).append(call)
            case OutputItem(call_id=id, output=output):
                text = _text(output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": id, "content": text})
    return messages


def _text(content: str | list[dict[str, Any]], where: str, kinds: Sequence[str] = ("input_text", "output_text")) -> str:
    """The text of parts that hold nothing else."""
    if isinstance(content, str):
        return content
    known: dict[str, type[TextPart | RefusalPart]] = dict.fromkeys(kinds, TextPart)
    return "\n".join(
        read_kind(one, known | {"refusal": RefusalPart}, f"{where}[{place}]").text for place, one in enumerate(content)
    )
