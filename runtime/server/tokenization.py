"""POST /tokenize and /detokenize: converts texts and conversations to token ids and back, in vLLM's format."""

from typing import Any

import msgspec

from enginewright.runtime.core.prompts import Prompt
from enginewright.runtime.server.chat import MESSAGE, ChatBody
from enginewright.runtime.server.errors import ApiError
from enginewright.runtime.server.keys import known_keys
from enginewright.runtime.server.protocol import UNREAD


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of a request to tokenize a prompt or messages."""

    model: str | None = None  # name of the engine
    prompt: str | None = None  # text to tokenize
    add_special_tokens: bool | None = None  # false leaves out the tokens that start a text
    messages: list[dict[str, Any]] | None = None  # conversation to render and tokenize
    add_generation_prompt: bool | None = None  # false ends the prompt with the last message
    chat_template_kwargs: dict[str, Any] | None = None  # further variables of the chat template
    return_token_strs: bool | None = None  # true adds the text of each token

    def text(self) -> Prompt:
        """The prompt. Raises ApiError for both keys, neither, and messages that cannot be shown to the model."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "one of prompt and messages is needed", param="prompt")
        if self.messages is None:
            assert self.prompt is not None
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(self, name) is not None:
                    raise ApiError(400, f"{name} is only for messages: it is for their template", param=name)
            return self.prompt
        if self.add_special_tokens is not None:
            why = "the chat template adds them"
            raise ApiError(400, f"add_special_tokens is only for prompt: {why}", param="add_special_tokens")
        turn, names = self.add_generation_prompt, self.chat_template_kwargs
        (prompt,) = ChatBody(messages=self.messages, add_generation_prompt=turn, chat_template_kwargs=names).prompts()
        return prompt


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of a request for the text of token ids."""

    model: str | None = None  # name of the engine
    tokens: list[int]  # token ids

    def check(self, vocab_size: int, max_tokens: int) -> None:
        """Checks the token ids.

        Args:
            vocab_size: the number of tokens in the vocabulary.
            max_tokens: the maximum number of token ids.

        Raises:
            ApiError: an id is not valid, or there are too many.
        """
        if len(self.tokens) > max_tokens:
            raise ApiError(400, f"tokens must not hold more than {max_tokens} entries", param="tokens")
        if self.tokens and not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            raise ApiError(400, f"tokens must be ids from 0 to {vocab_size - 1}", param="tokens")


TOKENIZE_KEYS = known_keys(TokenizeBody, UNREAD, messages=MESSAGE)
DETOKENIZE_KEYS = known_keys(DetokenizeBody, UNREAD)
