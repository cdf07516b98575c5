"""Prompts in all the forms that they come in, as token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from enginewright.errors import UsageError
from enginewright.runtime.tokenizer import Tokenizer

# A text; token ids; messages with role and content; or one of the first two under "prompt" or "prompt_token_ids".
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]


class PromptTooLongError(UsageError):
    """A prompt leaves no room for an answer."""


def text_of(prompt: Prompt) -> str | None:
    """The text of a prompt that is given as text."""
    inner = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return inner if isinstance(inner, str) else None


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, max_model_len: int) -> list[int]:
    """Token ids of a prompt.

    Raises:
        UsageError: it is none of the forms that a prompt may have.
        PromptTooLongError: it is so long that no tokenization of it can fit; it was not tokenized then.
    """
    if isinstance(prompt, Mapping):
        known = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
        if len(known) != 1 or len(prompt) != 1:
            raise UsageError("the prompt is not understood", 'a dict must have "prompt" or "prompt_token_ids" alone')
        return encode_prompt(known[0], tokenizer, max_model_len)
    if isinstance(prompt, str):
        return tokenizer.encode(_possible(prompt, tokenizer, max_model_len))
    messages = [message for message in prompt if isinstance(message, Mapping)]
    ids = [int(token) for token in prompt if isinstance(token, Integral)]  # numpy's, too
    if len(prompt) not in (len(messages), len(ids)):
        raise UsageError("the prompt is neither token ids nor messages", "all its entries must be of one kind")
    if not messages:
        return ids
    text = _possible(tokenizer.render_chat(messages), tokenizer, max_model_len)
    return tokenizer.encode(text, add_special_tokens=False)  # the template has written them


def _possible(text: str, tokenizer: Tokenizer, max_model_len: int) -> str:
    least = tokenizer.least_tokens(text)
    if least >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has at least {least} tokens",
            f"with an answer of at least one token it does not fit the limit of {max_model_len}",
        )
    return text


def check_prompt(ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raises UsageError for no token, an id that is none, or more than fit the longest sequence."""
    if not ids:
        raise UsageError("the prompt is empty", fix="Give at least one token.")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise UsageError("the prompt has a token that is none", f"token ids are 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens",
            f"with an answer of at least one token it does not fit the limit of {max_model_len}",
            "Shorten it, or raise --max-model-len if the engine's own limit is higher (engine inspect).",
        )
