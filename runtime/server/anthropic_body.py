"""POST /v1/messages: reads a request of Anthropic's API into the chat completion request that it corresponds to."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import msgspec

from enginewright.runtime.server.chat import THINKING, UNREAD_IN_CHAT_APIS, ChatBody, refuse_contradiction
from enginewright.runtime.server.errors import ApiError, error_context
from enginewright.runtime.server.keys import Kinds, UnusedKeys, ignored, known_keys, not_implemented, refused
from enginewright.runtime.server.protocol import EXTRAS, TOOL_UNREAD, body_of, convert, read_keys, read_kind
from enginewright.runtime.text.messages.formats import reasons
from enginewright.runtime.text.messages.history import INVALID_JSON
from enginewright.runtime.text.tokenizer import Tokenizer

SHARED_KEYS = ("max_tokens", "model", "stream", *EXTRAS)  # keys with the same meaning in a chat completion
RENAMES = {
    r"stop\b": "stop_sequences",
    r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
    r"tools\[(\d+)\]\.function": r"tools[\1]",
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
}
BILLING = "x-anthropic-billing-header:"  # prefix of a line that Claude Code adds, and that changes in each turn


class TextBlock(msgspec.Struct):
    """Text block of a message."""

    text: str  # text of the block


class Thinking(msgspec.Struct):
    """Reasoning of an earlier answer, sent back by the client."""

    thinking: str  # text of the reasoning


class RedactedThinking(msgspec.Struct):
    """Encrypted reasoning that only Anthropic can read."""

    data: str  # encrypted reasoning


class ToolUse(msgspec.Struct):
    """Tool call of the assistant."""

    id: str  # id of the call
    name: str  # name of the tool
    input: dict[str, Any]  # arguments of the call


class ToolResult(msgspec.Struct):
    """Result of a tool call."""

    tool_use_id: str  # id of the call
    content: str | list[dict[str, Any]] | None = None  # text or text blocks that the tool returned
    is_error: bool | None = None  # true if the call failed


class AnthropicMessage(msgspec.Struct):
    """Message of the conversation."""

    role: Literal["user", "assistant", "system"]  # author of the message
    content: str | list[dict[str, Any]]  # text or content blocks


class AnthropicTool(msgspec.Struct):
    """Tool that the model may call."""

    name: str  # name of the tool
    input_schema: dict[str, Any]  # JSON schema of the arguments
    description: str | None = None  # description for the model
    strict: bool | None = None  # true if arguments always follow the schema
    type: str | None = None  # kind of the tool; only custom ones are read


class ToolChoice(msgspec.Struct):
    """Constraint on the tools that are called."""

    type: Literal["auto", "any", "tool", "none"]  # kind of the constraint
    name: str | None = None  # name of the tool that must be called
    disable_parallel_tool_use: bool | None = None  # true allows at most one call


class ThinkingConfig(msgspec.Struct):
    """Settings of the model's reasoning."""

    type: Literal["enabled", "adaptive", "disabled"]  # mode of reasoning
    budget_tokens: int | None = None  # target for the reasoning in tokens, which the model does not see
    display: Literal["summarized", "omitted"] | None = None  # "omitted" leaves the reasoning out of the response


class Format(msgspec.Struct):
    """Schema that the answer follows."""

    type: Literal["json_schema"]  # kind of the format
    schema: dict[str, Any]  # JSON schema of the answer


class OutputConfig(msgspec.Struct):
    """Settings of the answer."""

    effort: str | None = None  # reasoning effort
    format: Format | None = None  # format of the answer


class MessagesBody(msgspec.Struct):
    """Keys of a request of Anthropic's API that a chat completion does not have, or that mean something else there."""

    messages: list[dict[str, Any]]  # conversation, oldest message first
    system: str | list[dict[str, Any]] | None = None  # system prompt
    stop_sequences: list[str] | None = None  # texts that end the answer
    thinking: ThinkingConfig | None = None  # settings of the model's reasoning
    tools: list[dict[str, Any]] | None = None  # tools that the model may call
    tool_choice: ToolChoice | None = None  # constraint on the tools that are called
    output_config: OutputConfig | None = None  # format and effort of the answer

    def chat(self, max_tokens: Any) -> dict[str, Any]:
        """Converts the request into keys of a ChatBody.

        Args:
            max_tokens: the value of that key, of any type.

        Raises:
            ApiError: a value is wrong or not supported.
        """
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
        for index, value in enumerate(self.messages):
            where = f"messages[{index}]"
            message = convert(value, AnthropicMessage, where)
            content = f"{where}.content"
            if message.role == "system":
                shown.append({"role": "system", "content": _text(message.content, content)})
            elif message.role == "user":
                shown += _user_messages(message.content, content)
            else:
                shown.append(_assistant_message(message.content, content))
        if shown[-1]["role"] == "assistant":
            raise not_implemented(where, "the last message is the assistant's, and an answer does not go on from it")
        return shown

    def _tools(self) -> dict[str, Any]:
        choice, tools = self.tool_choice or ToolChoice("auto"), list[dict[str, Any]]()
        for index, value in enumerate(self.tools or ()):
            where = f"tools[{index}]"
            tool = convert(value, AnthropicTool, where)
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
            raise ApiError(400, "tool_choice.name is only for the type tool", param="tool_choice.name")
        if choice.type in ("any", "tool") and not any(choice.name in (None, name) for name in names):
            known = ", ".join(names) or "none"
            raise ApiError(400, f"tool_choice wants one of tools: {known}", param="tool_choice", code="invalid_value")
        wanted: Any = {"any": "required"}.get(choice.type, choice.type)
        if choice.name is not None:
            wanted = {"type": "function", "function": {"name": choice.name}}
        return {"tools": tools, "tool_choice": wanted, "parallel_tool_calls": not choice.disable_parallel_tool_use}

    def _thinking(self, max_tokens: Any) -> dict[str, Any]:
        """Keys of a chat for reasoning.

        As in Anthropic's API, a model thinks only if that is enabled; "adaptive" leaves it to the template.
        """
        config = self.thinking or ThinkingConfig("disabled")
        if config.type != "enabled" and config.budget_tokens is not None:
            raise ApiError(400, "thinking.budget_tokens is only for the type enabled", param="thinking.budget_tokens")
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


BLOCK_UNREAD = ignored(
    "it is for a cache of Anthropic's, or a copy of what clients received",
    "cache_control",
    "caller",
    "citations",
    "parsed_output",
    "signature",
    "toolset_name",
)
TEXTS = Kinds({"text": known_keys(TextBlock, BLOCK_UNREAD)})
BLOCKS = Kinds(
    {
        "text": known_keys(TextBlock, BLOCK_UNREAD),
        "thinking": known_keys(Thinking, BLOCK_UNREAD),
        "redacted_thinking": known_keys(RedactedThinking, BLOCK_UNREAD),
        "tool_use": known_keys(ToolUse, BLOCK_UNREAD),
        "tool_result": known_keys(ToolResult, BLOCK_UNREAD, content=TEXTS),
    }
)
MESSAGES_KEYS = known_keys(
    MessagesBody,
    {
        **UNREAD_IN_CHAT_APIS,
        **ignored(
            "it is about Anthropic's own prices and releases",
            "anthropic_beta",
            "anthropic_version",
            "betas",
            "billing_policy",
            "fallback_credit_token",
        ),
        **ignored("it names models for when this one declines", "fallbacks"),
        **ignored("the usage is always in a stream", "stream_options"),
        **refused("this server runs no code", "container"),
        **refused("this server calls no tools", "mcp_servers", harmless=([],)),
        **refused("each request contains the whole conversation", "thread"),
        **refused("this server summarizes no conversations", "compaction"),
    },
    also=SHARED_KEYS,
    messages=known_keys(AnthropicMessage, BLOCK_UNREAD, content=BLOCKS),
    system=TEXTS,
    tools=Kinds({"custom": known_keys(AnthropicTool, TOOL_UNREAD)}, default="custom", may_skip=True),
    output_config=known_keys(OutputConfig, ignored("it is a target that the model is not shown", "task_budget")),
)


@dataclass(frozen=True)
class MessagesRequest:
    """Request of Anthropic's API."""

    chat: ChatBody  # chat completion request that it corresponds to
    thinks: bool  # true if the model is to think

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises ApiError if the model is to think, and its chat template has no reasoning."""
        if self.thinks and not reasons(tokenizer.message_format):
            raise not_implemented("thinking.type", "the model's chat template has no reasoning")


def read_messages(data: bytes, vocab_size: int, unused: UnusedKeys, *, counted: bool = False) -> MessagesRequest:
    """Reads the body of a request of Anthropic's API.

    Args:
        data: the body, JSON.
        vocab_size: the largest vocabulary of the engines, the limit of lists of tokens.
        unused: collects the keys that are not used.
        counted: True if the tokens of the request are only counted, so that max_tokens may be missing.

    Raises:
        ApiError: 400, with the key that is wrong.
    """
    keys = read_keys(data, MESSAGES_KEYS, unused)
    if keys.get("max_tokens") is None and not counted:
        raise ApiError(400, "max_tokens is missing", param="max_tokens")
    chat = {name: keys[name] for name in SHARED_KEYS if keys.get(name) is not None}
    body = convert(keys, MessagesBody)
    translated = body.chat(keys.get("max_tokens"))
    names = translated.get("chat_template_kwargs", {})
    given = convert(chat.get("chat_template_kwargs", {}), dict[str, Any], "chat_template_kwargs")
    if body.thinking is not None:
        refuse_contradiction("thinking", names, given)
    translated["chat_template_kwargs"] = names | given
    with error_context("messages", RENAMES):
        read = body_of(chat | translated, ChatBody, vocab_size)
    return MessagesRequest(read, body.thinking is not None and body.thinking.type == "enabled")


def _reaches(budget: int, max_tokens: Any) -> bool:
    return isinstance(max_tokens, int) and budget >= max_tokens


def _text(content: str | list[dict[str, Any]] | None, where: str) -> str:
    """Text of blocks that are all text."""
    if content is None or isinstance(content, str):
        return content or ""
    blocks = [read_kind(value, {"text": TextBlock}, f"{where}[{index}]") for index, value in enumerate(content)]
    return "\n".join(block.text for block in blocks)


def _without_billing(system: str) -> str:
    """The system prompt without the billing line, which would invalidate the prefix cache in each turn."""
    return system.partition("\n")[2] if system.startswith(BILLING) else system


def _user_messages(content: str | list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Messages of a chat for a user's texts and tool results, in their order."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    if not content:
        raise ApiError(400, f"{where} is empty", param=where)
    kinds: Mapping[str, type[Any]] = {"text": TextBlock, "tool_result": ToolResult}
    blocks = [(read_kind(value, kinds, f"{where}[{index}]"), index) for index, value in enumerate(content)]
    messages: list[dict[str, Any]] = []
    for kind, group in groupby(blocks, key=lambda one: type(one[0])):
        if kind is TextBlock:
            messages.append({"role": "user", "content": "\n".join(block.text for block, _ in group)})
        else:
            messages += [_tool_message(block, f"{where}[{index}].content") for block, index in group]
    return messages


def _tool_message(result: ToolResult, where: str) -> dict[str, Any]:
    """Message of a tool; an error is marked in its text, since a chat has no key for it."""
    text = _text(result.content, where)
    text = f"Error: {text}" if result.is_error else text
    return {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}


def _assistant_message(content: str | list[dict[str, Any]], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    kinds: Mapping[str, type[Any]] = {
        "text": TextBlock,
        "thinking": Thinking,
        "redacted_thinking": RedactedThinking,
        "tool_use": ToolUse,
    }
    for index, value in enumerate(content):
        match read_kind(value, kinds, f"{where}[{index}]"):
            case TextBlock(text=text):
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
