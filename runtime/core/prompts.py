"""Converts prompts in all their forms to token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NotRequired, TypedDict

import numpy as np

from enginewright.errors import UsageError, shorten
from enginewright.runtime.text.messages.plain import calls_as_text, describe_tools
from enginewright.runtime.text.tokenizer import Tokenizer

# Characters of the first piece of a text, for each position of the model; plain text that fits is encoded in one piece.
FIRST_PIECE_CHARS = 4
# The role that the chat template sees for each role of a message.
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_EXAMPLE = 'Give messages such as [{"role": "user", "content": "Hello"}].'


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str  # the text
    cache_salt: NotRequired[str]  # the prompt shares the KV cache only with prompts of the same salt


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]  # the token ids
    cache_salt: NotRequired[str]  # as in a TextPrompt


@dataclass(frozen=True)
class Conversation:
    """Messages, and options of the model's chat template."""

    messages: Sequence[Mapping[str, Any]]  # messages, each with a role and a content
    add_generation_prompt: bool = True  # true if the prompt ends with the header of a message of the model
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables, such as enable_thinking
    tools: Sequence[Mapping[str, Any]] = ()  # tools that the model may call, each in the form of OpenAI's API
    tools_are_described: bool = False  # true if the system message describes tools that the template does not show


# A text; token ids; messages with role and content; a Conversation; a TextPrompt; or a TokensPrompt.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | Conversation


class PromptTooLongError(UsageError):
    """A prompt leaves no tokens for an answer."""


def too_long(length: str, max_model_len: int) -> PromptTooLongError:
    """Creates the error for a prompt that is too long.

    Args:
        length: length of the prompt, with its unit.
        max_model_len: maximum number of tokens. Clients look for the words "maximum context length is N tokens".
    """
    return PromptTooLongError(
        f"the prompt has {length}",
        f"this model's maximum context length is {max_model_len} tokens, one at least of them for the answer",
        "Shorten it, or raise --max-model-len if the engine's own limit is higher (engine inspect).",
    )


def text_of(prompt: Prompt) -> str | None:
    """Text of a prompt; None if it is not given as text."""
    inner = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return inner if isinstance(inner, str) else None


def salt_of(prompt: Prompt, default: str = "") -> str:
    """Cache salt of a prompt.

    Args:
        prompt: the prompt.
        default: the salt of a prompt that has none of its own.

    Raises:
        UsageError: the salt is not a text.
    """
    given = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
    salt = default if given is None else given
    try:
        str.encode(salt)
    except (TypeError, UnicodeEncodeError) as error:
        raise UsageError(f"cache_salt is {shorten(salt)}", "it must be a text") from error
    return salt


def encode_prompt(
    prompt: Prompt, tokenizer: Tokenizer, max_model_len: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Converts a prompt to token ids.

    Args:
        prompt: the prompt.
        tokenizer: the engine's tokenizer.
        max_model_len: maximum number of tokens of prompt and answer together.
        add_special_tokens: true if a text gets the special tokens that the model was trained with, such as a
            beginning-of-text token.

    Raises:
        UsageError: the prompt has none of the forms of a prompt.
        PromptTooLongError: its text is known to be too long before all of it is encoded.
    """
    if isinstance(prompt, Mapping):
        return encode_prompt(_inside(prompt), tokenizer, max_model_len)
    if isinstance(prompt, str):
        return _encode(prompt, tokenizer, max_model_len, add_special_tokens=add_special_tokens)
    if isinstance(prompt, Conversation):
        shown: Sequence[Mapping[str, Any]] = shown_messages(prompt.messages)
        turn, names, tools = prompt.add_generation_prompt, prompt.template_kwargs, prompt.tools
        if not tokenizer.template_reads("tool"):
            shown = calls_as_text(shown)
        if tools and prompt.tools_are_described and not tokenizer.template_reads("tools"):
            shown, tools = describe_tools(shown, tools), ()
        text = tokenizer.render_chat(shown, add_generation_prompt=turn, template_kwargs=names, tools=tools)
        return _encode(text, tokenizer, max_model_len, add_special_tokens=False)  # the template has added them
    if not is_list(prompt):
        raise UsageError(
            f"the prompt is {shorten(prompt)}", "it must be a text, a list of token ids, or a list of messages"
        )
    messages = [message for message in prompt if isinstance(message, Mapping)]
    ids = [int(token) for token in prompt if isinstance(token, Integral)]  # numpy's, too
    if len(prompt) not in (len(messages), len(ids)):
        raise UsageError("the prompt is neither token ids nor messages", "all its entries must be of one kind")
    return encode_prompt(Conversation(messages), tokenizer, max_model_len) if messages else ids


def _inside(prompt: Mapping[str, Any]) -> Any:
    """The text of a TextPrompt, or the token ids of a TokensPrompt."""
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    unknown = sorted(map(str, prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}))
    if unknown or (text is None) == (ids is None):
        raise UsageError(
            "the prompt is not understood",
            f"it has the keys {', '.join(unknown)}" if unknown else "",
            'A dict must have "prompt" or "prompt_token_ids" alone, and may have "cache_salt". Messages are for chat.',
        )
    if isinstance(text, Mapping) or isinstance(ids, str | Mapping):
        raise UsageError("the prompt is not understood", '"prompt" must be a text, "prompt_token_ids" token ids')
    return text if ids is None else ids


def is_list(value: object) -> bool:
    """True if a value can hold token ids, messages or prompts: a list, a tuple or an array, but not a text."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def conversations_of(messages: Any) -> list[Sequence[Mapping[str, Any]]]:
    """Converts one conversation, or several, to a list of conversations.

    Args:
        messages: a list of messages, or a list of such lists.

    Raises:
        UsageError: it is neither of these.
    """
    if isinstance(messages, Mapping):
        raise UsageError("the messages are a single message", "a list of messages is wanted", _EXAMPLE)
    if not is_list(messages):
        raise UsageError(f"the messages are {shorten(messages)}", "a list of messages is wanted", _EXAMPLE)
    conversations = [messages] if any(isinstance(entry, Mapping) for entry in messages) else list(messages)
    for conversation in conversations:
        entries = conversation if is_list(conversation) else [conversation]
        for entry in entries:
            if not isinstance(entry, Mapping):
                raise UsageError(f"a message is {shorten(entry)}", "it must have a role and a content", _EXAMPLE)
        if not entries:
            raise UsageError("a conversation has no message", fix=_EXAMPLE)
    return conversations


def shown_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages for a chat template: the role `developer` becomes `system`, and each content one text.

    Raises:
        UsageError: a role is unknown, or a content is neither a text nor a list of text parts.
    """
    return [_shown(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _shown(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        known = ", ".join(ROLES)
        raise UsageError(f"{where}.role is {shorten(role)}", f"there are {known}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    return {**message, "role": ROLES[role], "content": _text(content, f"{where}.content")}


def _text(content: Any, where: str) -> str:
    """Content of a message as one text; text parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if not is_list(content):
        raise UsageError(f"{where} is {shorten(content)}", "it must be a text, or a list of text parts")
    texts = []
    for place, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if kind != "text" or not isinstance(text, str):
            raise UsageError(
                f"{where}[{place}] is {shorten(part)}",
                "the model reads text alone",
                'Parts must be such as {"type": "text", "text": "Hello"}.',
            )
        texts.append(text)
    return "\n".join(texts)


def _encode(text: str, tokenizer: Tokenizer, max_model_len: int, *, add_special_tokens: bool) -> list[int]:
    """Encodes a text, without encoding much more of it than can fit.

    A text that has more characters than `max_model_len` tokens of maximum length is refused without encoding it. Longer
    and longer prefixes of other texts are encoded first. If a prefix takes twice as many tokens as fit, the text cannot
    fit either, since the rest of it can change the tokens of the last word of the prefix only.

    Args:
        text: the text.
        tokenizer: the engine's tokenizer.
        max_model_len: maximum number of tokens.
        add_special_tokens: true if the tokenizer adds its special tokens.

    Raises:
        PromptTooLongError: the text cannot fit.
    """
    max_chars = tokenizer.longest_token_chars * max_model_len
    if len(text) > max_chars:
        raise too_long(f"{len(text)} characters, and {max_chars} are the most that could fit", max_model_len)
    piece = FIRST_PIECE_CHARS * max_model_len
    while piece < len(text):
        if len(tokenizer.encode(text[:piece], add_special_tokens=False)) >= 2 * max_model_len:
            raise too_long(f"more than {max_model_len} tokens", max_model_len)
        piece *= 4
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Checks the token ids of a prompt.

    Args:
        ids: token ids.
        vocab_size: number of tokens of the vocabulary.
        max_model_len: maximum number of tokens of prompt and answer together.

    Raises:
        UsageError: there is no token, or an id is not in the vocabulary.
        PromptTooLongError: the prompt leaves no tokens for an answer.
    """
    if len(ids) >= max_model_len:
        raise too_long(f"{len(ids)} tokens", max_model_len)
    check_tokens(ids, vocab_size)


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raises UsageError if there is no token, or an id is not in the vocabulary of `vocab_size` tokens."""
    if not ids:
        raise UsageError("the prompt is empty", fix="Give at least one token.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise UsageError("the prompt has a token that is none", f"token ids are 0 to {vocab_size - 1}")
