"""POST /v1/messages: Anthropic's form of a chat, read as the chat of OpenAI's API that it stands for."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import msgspec

from enginewright.runtime.server.chat import OF_CHATS, THINKING, ChatBody, refuse_contradiction
from enginewright.runtime.server.errors import ApiError, speaking_of
from enginewright.runtime.server.keys import Kinds, UnusedKeys, known_of, not_implemented, refused, taken
from enginewright.runtime.server.protocol import EXTRAS, TOOL_UNREAD, convert, of_keys, read_keys, read_kind
from enginewright.runtime.text.messages.formats import reasons
from enginewright.runtime.text.messages.history import INVALID_JSON
from enginewright.runtime.text.tokenizer import Tokenizer

SAME = ("max_tokens", "model", "stream", *EXTRAS)  # keys that mean the same in a chat
RENAMES = {
    r"stop\b": "stop_sequences",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
}
BILLING = "x-anthropic-billing-header:"  # begins a line that Claude Code writes for Anthropic, other in each turn


class Text(msgspec.Struct):
    text: str


class Thinking(msgspec.Struct):
    thinking: str


class RedactedThinking(msgspec.Struct):
    """Thoughts that only Anthropic can read."""

    data: str


class ToolUse(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class Message(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of the tool to be called
    disable_parallel_tool_use: bool | None = None  # one call at most


class ThinkingConfig(msgspec.Struct):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None  # a target that the model is not shown
    display: Literal["summarized", "omitted"] | None = None  # omitted: the response has no thinking


class Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: Format | None = None


class MessagesBody(msgspec.Struct):
    """Keys that mean something else in a chat, or nothing."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    thinking: ThinkingConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None

    def chat(self, max_tokens: Any) -> dict[str, Any]:
        """Keys of a ChatBody. Raises ApiError for what cannot be."""
        keys: dict[str, Any] = {"messages": self._messages(), "stop": self.stop_sequences}
        keys |= self._tools() | self._thinking(max_tokens)
        if self.output_config is not None:
            keys["reasoning_effort"] = self.output_config.effort
            if self.output_config.format is not None:
                schema = {"schema": self.output_config.format.schema}
                keys["response_format"] = {"type": "json_schema", "json_schema": schema}
        return keys

    def _messages(self) -> list[dict[str, Any]]:
        if not self.messages:
            raise ApiError(400, "messages is empty", param="messages")
        system = _without_billing(_text(self.system, "system"))
        shown = [{"role": "system", "content": system}] if system else []
        for place, value in enumerate(self.messages):
            where = f"messages[{place}]"
            message = convert(value, Message, where)
            content = f"{where}.content"
            if message.role == "system":
                shown.append({"role": "system", "content": _text(message.content, content)})
            elif message.role == "user":
                shown += _of_user(message.content, content)
            else:
                shown.append(_of_assistant(message.content, content))
        if shown[-1]["role"] == "assistant":
            raise not_implemented(where, "the last message is the assistant's, and an answer does not go on from it")
        return shown

    def _tools(self) -> dict[str, Any]:
        choice, tools = self.tool_choice or ToolChoice("auto"), list[dict[str, Any]]()
        for place, value in enumerate(self.tools or ()):
            where = f"tools[{place}]"
            tool = convert(value, Tool, where)
            function: dict[str, Any] = {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            }
            function = {name: entry for name, entry in function.items() if entry is not None}
            tools.append({"type": "function", "function": function})
        names = [tool["function"]["name"] for tool in tools]
        if (choice.type == "tool") != (choice.name is not None):
            raise ApiError(400, "tool_choice.name goes with the type tool", param="tool_choice.name")
        if choice.type in ("any", "tool") and not any(choice.name in (None, name) for name in names):
            known = ", ".join(names) or "none"
            raise ApiError(400, f"tool_choice wants one of tools: {known}", param="tool_choice", code="invalid_value")
        wanted: Any = {"any": "required"}.get(choice.type, choice.type)
        if choice.name is not None:
            wanted = {"type": "function", "function": {"name": choice.name}}
        return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}

    def _thinking(self, max_tokens: Any) -> dict[str, Any]:
        """As in Anthropic's API, a model that is not asked to does not think."""
        config = self.thinking or ThinkingConfig("disabled")
        if config.type != "enabled" and config.budget_tokens is not None:
            raise ApiError(400, "thinking.budget_tokens goes with the type enabled", param="thinking.budget_tokens")
        if config.budget_tokens is not None and (
            config.budget_tokens < 1 or _reaches(config.budget_tokens, max_tokens)
        ):
            rule = "must be at least 1, and less than max_tokens"
            raise ApiError(400, f"thinking.budget_tokens {rule}", param="thinking.budget_tokens", code="invalid_value")
        shown = config.type != "disabled" and config.display != "omitted"
        if config.type == "adaptive":
            return {"include_reasoning": shown}
        names = dict.fromkeys(THINKING, config.type == "enabled")
        return {"include_reasoning": shown, "chat_template_kwargs": names}


BLOCK_UNREAD = taken(
    "it is for a cache of Anthropic's, or comes back with what clients got",
    "cache_control",
    "caller",
    "citations",
    "parsed_output",
    "signature",
    "toolset_name",
)
TEXTS = Kinds({"text": known_of(Text, BLOCK_UNREAD)})
BLOCKS = Kinds(
    {
        "text": known_of(Text, BLOCK_UNREAD),
        "thinking": known_of(Thinking, BLOCK_UNREAD),
        "redacted_thinking": known_of(RedactedThinking, BLOCK_UNREAD),
        "tool_use": known_of(ToolUse, BLOCK_UNREAD),
        "tool_result": known_of(ToolResult, BLOCK_UNREAD, content=TEXTS),
    }
)
MESSAGES_KEYS = known_of(
    MessagesBody,
    {
        **OF_CHATS,
        **taken(
            "it is about Anthropic's own prices and releases",
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "billing_policy",
            "fallback_credit_token",
        ),
        **taken("it names models for when this one declines", "fallbacks"),
        **taken("the usage is always in a stream", "stream_options"),
        **refused("this server runs no code", "container"),
        **refused("this server calls no tools", "mcp_servers", harmless=([],)),
        **refused("a conversation comes whole with each request", "thread"),
        **refused("this server summarizes no conversations", "compaction"),
    },
    also=SAME,
    messages=known_of(Message, BLOCK_UNREAD, content=BLOCKS),
    system=TEXTS,
    tools=Kinds({"custom": known_of(Tool, TOOL_UNREAD)}, default="custom", may_skip=True),
    output_config=known_of(OutputConfig, taken("it is a target that the model is not shown", "task_budget")),
)


@dataclass(frozen=True)
class Messages:
    """A request of Anthropic's API."""

    chat: ChatBody  # the same as a chat
    thinks: bool  # whether the model is to think

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ApiError where it is to think, and cannot."""
        if self.thinks and not reasons(tokenizer.message_format):
            raise not_implemented("thinking.type", "the model's chat template knows no reasoning")


def read_messages(data: bytes, vocab_size: int, unused: UnusedKeys, *, counted: bool = False) -> Messages:
    """A body of Anthropic's form.

    Args:
        unused: notes what is not used.
        counted: its tokens are to be counted, and it need not say how many the answer may have.

    Raises:
        ApiError: 400, and which key is at fault.
    """
    keys = read_keys(data, MESSAGES_KEYS, unused)
    if keys.get("max_tokens") is None and not counted:
        raise ApiError(400, "max_tokens is missing", param="max_tokens")
    chat = {name: keys[name] for name in SAME if keys.get(name) is not None}
    body = convert(keys, MessagesBody)
    translated = body.chat(keys.get("max_tokens"))
    names = translated.get("chat_template_kwargs", {})
    given = convert(chat.get("chat_template_kwargs", {}), dict[str, Any], "chat_template_kwargs")
    if body.thinking is not None:
        refuse_contradiction("thinking", names, given)
    translated["chat_template_kwargs"] = names | given
    with speaking_of("messages", RENAMES):
        read = of_keys(chat | translated, ChatBody, vocab_size)
    return Messages(read, body.thinking is not None and body.thinking.type == "enabled")


def _reaches(budget: int, max_tokens: Any) -> bool:
    return isinstance(max_tokens, int) and budget >= max_tokens


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """The text of blocks that hold nothing else."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [read_kind(value, {"text": Text}, f"{where}[{place}]") for place, value in enumerate(content)]
    return "\n".join(block.text for block in blocks)


def _without_billing(system: str) -> str:
    """The system's text without the line that would spoil the prefix cache in each turn."""
    return system.partition("\n")[2] if system.startswith(BILLING) else system


def _of_user(content: str | list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Messages of a chat for what the user says and what tools have returned, in its order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not content:
        raise ApiError(400, f"{where} is empty", param=where)
    kinds: Mapping[str, type[Any]] = {"text": Text, "tool_result": ToolResult}
    blocks = [(read_kind(value, kinds, f"{where}[{place}]"), place) for place, value in enumerate(content)]
    messages: list[dict[str, Any]] = []
    for kind, group in groupby(blocks, key=lambda one: type(one[0])):
        if kind is Text:
            messages.append({"role": "user", "content": "\n".join(block.text for block, _ in group)})
        else:
            messages += [_of_result(block, f"{where}[{place}].content") for block, place in group]
    return messages


def _of_result(result: ToolResult, where: str) -> dict[str, Any]:
    """A chat has no other way to say that a tool has failed than its text."""
    text = _text(result.content, where)
    text = f"Error: {text}" if result.is_error else text
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}


def _of_assistant(content: str | list[dict[str, Any]], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    kinds: Mapping[str, type[Any]] = {
        "text": Text,
        "thinking": Thinking,
        "redacted_thinking": RedactedThinking,
        "tool_use": ToolUse,
    }
    for place, value in enumerate(content):
        match read_kind(value, kinds, f"{where}[{place}]"):
            case Text(text=text):
                texts.append(text)
            case Thinking(thinking=thought):
                thoughts.append(thought)
            case ToolUse(id=id, name=name, input=given):
                cut = given.get(INVALID_JSON) if len(given) == 1 else None
                function = {"name": name, "arguments": cut if isinstance(cut, str) else given}
                calls.append({"id": id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})
