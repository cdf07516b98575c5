"""POST /tokenize and /detokenize: what a text or a conversation is to the model, in vLLM's form."""

from typing import Any

import msgspec

from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.server.chat import MESSAGE, ChatBody
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.keys import known_of
from enginewright.runtime.server.protocol import UNREAD


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Of a prompt, or of messages."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None  # those that begin a text; the default is yes
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def text(self) -> Prompt:
        """Raises ApiError for both, neither, and messages that cannot be shown to the model."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ApiError(400, f"{name} goes with messages alone: it is for their template", param=name)
            return self.prompt
        if self.add_special_tokens is not None:
            why = "the chat template writes them"
            raise ApiError(400, f"add_special_tokens goes with prompt alone: {why}", param="add_special_tokens")
        turn, names = self.add_generation_prompt, self.chat_template_kwargs
        (prompt,) = ChatBody(messages=self.messages, add_generation_prompt=turn, chat_template_kwargs=names).prompts()
        return prompt


class DetokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]

    def check(self, vocab_size: int, most: int) -> None:
        """Raises ApiError for ids that are none, and for more than the longest sequence has."""
        if len(self.tokens) > most:
            raise ApiError(400, f"tokens must not hold more than {most} entries", param="tokens")
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            raise ApiError(400, f"tokens must be ids from 0 to {vocab_size - 1}", param="tokens")


TOKENIZE_KEYS = known_of(TokenizeBody, UNREAD, messages=MESSAGE)
DETOKENIZE_KEYS = known_of(DetokenizeBody, UNREAD)
