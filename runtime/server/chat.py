"""POST /v1/chat/completions: a conversation goes on."""

from collections.abc import Sequence
from typing import Any

import msgspec

from enginewright.runtime.prompts import Prompt
from enginewright.runtime.sampling import MAX_LOGPROBS, SampledToken
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.form import REPLACEMENT, Choice, Form, encode, shown
from enginewright.runtime.server.protocol import Body, is_off, not_implemented

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MESSAGE_OFF = ("annotations", "audio", "function_call", "refusal", "tool_call_id", "tool_calls")
NULL = msgspec.Raw(b"null")


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of a content. Those that are no text are known, to be refused by name; no address is ever fetched."""

    type: str
    text: str | None = None
    image_url: msgspec.Raw = NULL
    input_audio: msgspec.Raw = NULL
    audio_url: msgspec.Raw = NULL
    video_url: msgspec.Raw = NULL
    file: msgspec.Raw = NULL
    refusal: msgspec.Raw = NULL


class Message(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    annotations: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    refusal: msgspec.Raw = NULL
    tool_calls: msgspec.Raw = NULL
    tool_call_id: msgspec.Raw = NULL

    def for_template(self, where: str) -> dict[str, str]:
        """What the model's chat template sees. Raises ApiError for what it would not see."""
        if self.role not in ROLES:
            known = ", ".join(ROLES)
            why = "tools are not implemented" if self.role in ("tool", "function") else f"there are {known}"
            raise ApiError(
                400, f"{where}.role is {self.role[:20]!r}: {why}", param=f"{where}.role", code="invalid_value"
            )
        for key in MESSAGE_OFF:
            if not is_off(getattr(self, key), ([],)):
                raise not_implemented(f"{where}.{key}")
        message = {"role": ROLES[self.role], "content": self._text(f"{where}.content")}
        return message if self.name is None else {**message, "name": self.name}

    def _text(self, where: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            raise ApiError(400, f"{where}: expected a text or a list of parts", param=where, code="invalid_type")
        texts = []
        for place, part in enumerate(self.content):
            if part.type != "text":
                kind = part.type[:40]
                raise not_implemented(f"{where}[{place}].type", f"{kind!r}; the model reads parts of the type 'text'")
            if part.text is None:
                raise ApiError(400, f"{where}[{place}] has no text", param=f"{where}[{place}].text")
            texts.append(part.text)
        return "\n".join(texts)


class ChatBody(Body, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """Raises ApiError for messages that cannot be shown to the model."""
        if not self.messages:
            raise ApiError(400, "messages is empty", param="messages")
        return [[message.for_template(f"messages[{place}]") for place, message in enumerate(self.messages)]]

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

    def _whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def logprobs(self, choice: Choice, tokens: Sequence[SampledToken]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._entry(drawn.token, drawn.logprob),
                    "top_logprobs": [self._entry(token, logprob) for token, logprob in drawn.top_logprobs],
                }
                for drawn in tokens
            ],
            "refusal": None,
        }

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        """bytes is null for a token that is a part of a character, whose bytes cannot be told from its text."""
        text = self._token_text(token)
        whole = REPLACEMENT not in text
        return {"token": text, "logprob": shown(logprob), "bytes": list(text.encode()) if whole else None}
