"""POST /v1/chat/completions: a conversation goes on."""

from collections.abc import Sequence
from typing import Any

import msgspec

from enginewright.runtime.prompts import ROLES, Conversation, Prompt
from enginewright.runtime.sampling import MAX_LOGPROBS, SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import REPLACEMENT, Choice, Form, encode, shown
from enginewright.runtime.server.protocol import Body, check_keys, convert, is_off, not_implemented

# What clients send back of the answers that they got, or keep for themselves: templates do not see it.
KEPT_BY_CLIENTS = frozenset(
    (
        "annotations",
        "cache_control",
        "id",
        "index",
        "metadata",
        "parsed",
        "provider_specific_fields",
        "status",
        "thinking_blocks",
        "timestamp",
        "type",
    )
)
NOTHING: Sequence[Any] = ([], {}, "", False)
# Keys that would change what the model sees, and are not implemented.
MESSAGE_OFF = dict.fromkeys(
    ("audio", "function_call", "images", "refusal", "tool_call_id", "tool_calls", "tools", "weight"), NOTHING
)
PART_OFF = dict.fromkeys(("audio_url", "file", "image_url", "input_audio", "refusal", "video_url"), NOTHING)


class Part(msgspec.Struct):
    """A piece of a content. Those that are no text are refused by name; no address is ever fetched."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @classmethod
    def read(cls, value: dict[str, Any], where: str) -> "Message":
        """A message of a body.

        Args:
            where: its path, "messages[0]".

        Raises:
            ApiError: a type is wrong, or a key would change what the model sees and is not implemented.
        """
        message = convert(value, cls, where)
        if message.role not in ROLES:
            known = ", ".join(ROLES)
            why = "tools are not implemented" if message.role in ("tool", "function") else f"there are {known}"
            raise ApiError(
                400, f"{where}.role is {message.role[:20]!r}: {why}", param=f"{where}.role", code="invalid_value"
            )
        check_keys(_without_nothing(value), cls.__struct_fields__, KEPT_BY_CLIENTS, MESSAGE_OFF, where)
        return message

    def for_template(self, where: str) -> dict[str, str]:
        """What the model's chat template sees. Raises ApiError for a content that is no text."""
        message = {"role": ROLES[self.role], "content": self._text(f"{where}.content")}
        others = {name: getattr(self, name) for name in ("name", "reasoning", "reasoning_content")}
        return message | {name: value for name, value in others.items() if value is not None}

    def _text(self, where: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            if self.role == "assistant":  # an answer that was empty
                return ""
            raise ApiError(400, f"{where}: expected a text or a list of parts", param=where, code="invalid_type")
        return "\n".join(_text_of(value, f"{where}[{place}]") for place, value in enumerate(self.content))


def _text_of(value: dict[str, Any], where: str) -> str:
    """The text of a part of a content."""
    part = convert(value, Part, where)
    if part.type != "text":
        raise not_implemented(f"{where}.type", f"{part.type[:40]!r}; the model reads parts of the type 'text'")
    check_keys(_without_nothing(value), Part.__struct_fields__, KEPT_BY_CLIENTS, PART_OFF, where)
    if part.text is None:
        raise ApiError(400, f"{where} has no text", param=f"{where}.text")
    return part.text


def _without_nothing(value: dict[str, Any]) -> dict[str, Any]:
    """Without keys, known or not, that ask for nothing."""
    return {key: entry for key, entry in value.items() if not is_off(entry, NOTHING)}


class ChatBody(Body, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def prompts(self) -> list[Prompt]:
        """Raises ApiError for messages that cannot be shown to the model."""
        if not self.messages:
            raise ApiError(400, "messages is empty", param="messages")
        messages = []
        for place, value in enumerate(self.messages):
            where = f"messages[{place}]"
            messages.append(Message.read(value, where).for_template(where))
        return [Conversation(messages, self.add_generation_prompt is not False, self.chat_template_kwargs or {})]

    def params(self) -> dict[str, Any]:
        if self.top_logprobs is not None and not (self.logprobs and 0 <= self.top_logprobs <= MAX_LOGPROBS):
            rule = f"must be between 0 and {MAX_LOGPROBS}, with logprobs true"
            raise ApiError(400, f"top_logprobs {rule}", param="top_logprobs")
        tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {
            **self.sampling(),
            "max_tokens": tokens,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }


class ChatForm(Form):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl-"
    prompt_key = "messages"

    def opening(self, choice: Choice) -> bytes:
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._event(choice, role)

    def _piece(self, text: str) -> bytes:
        return b',"delta":{"content":' + encode(text) + b"}"

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text}}

    def _response_keys(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All choices have the same prompt."""
        return {"prompt_logprobs": self.prompt_logprobs(choices[0].prompt)} if self.include.prompt_logprobs else {}

    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(sampled.token, sampled.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in sampled.top_logprobs],
                }
                for sampled in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """bytes is null for a token that is a part of a character, whose bytes its text does not give."""
        text = self._token_text(token)
        whole = REPLACEMENT not in text
        return {"token": text, "logprob": shown(logprob), "bytes": list(text.encode()) if whole else None}
