"""Text ↔ tokens: encoding, chat templates, and text that comes token by token."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from enginewright.errors import CorruptEngineError, UsageError

if TYPE_CHECKING:
    from enginewright.runtime.chat_template import ChatTemplate

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to
CONTEXT_TOKENS = 6  # of the prompt, so that the first token of the answer decodes as it would in the middle of a text
MAX_HELD_TOKENS = 4  # a character has at most four bytes, and a token at least one


class Tokenizer:
    """A model's tokenizer.

    Args:
        tokenizer_json: tokenizers' own format.
        config: the keys of tokenizer_config.json that matter (special tokens).
        chat_template: Jinja, or None.
    """

    def __init__(self, tokenizer_json: bytes, config: Mapping[str, Any], chat_template: str | None) -> None:
        self.config = config
        self._source = chat_template
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises no narrower class
            raise CorruptEngineError("the tokenizer cannot be read", str(error), "Build the engine again.") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A rendered chat already has its special tokens: encode it without adding any."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the model answers."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A conversation as the model was trained to see it.

        Raises:
            UsageError: the model has no chat template, or it refuses the messages.
        """
        names = {name: self.config.get(name) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return self._template.render(messages, names)

    @cached_property
    def _template(self) -> "ChatTemplate":
        from enginewright.runtime.chat_template import ChatTemplate  # jinja2 takes a while to import

        if self._source is None:
            raise UsageError("this model has no chat template", fix="Give the whole text with --prompt.")
        return ChatTemplate(self._source)


class Detokenizer:
    """Text of an answer, as its tokens come; a character comes whole.

    What a token adds is the difference of two decodings that begin at the same place, since decoders treat the
    beginning of a text specially.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-CONTEXT_TOKENS:])
        self._start, self._done = 0, len(self._ids)  # ids[:done] have been given as text

    def push(self, token: int) -> str:
        """The text that is complete with this token; empty in the middle of a character."""
        self._ids.append(token)
        return self._take(at_end=len(self._ids) - self._done > MAX_HELD_TOKENS)

    def flush(self) -> str:
        """What was held back, although it is no whole character."""
        return self._take(at_end=True)

    def _take(self, at_end: bool) -> str:
        before = self._tokenizer.decode(self._ids[self._start : self._done], skip_special_tokens=self._skip)
        after = self._tokenizer.decode(self._ids[self._start :], skip_special_tokens=self._skip)
        if after.endswith(REPLACEMENT) and not at_end:
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Ends a text at the first of several strings, and holds back what may be the beginning of one."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that no stop string can take back."""
        if not self._stops:
            return text
        self._held += text
        places = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            at, stop = min(places)
            self.found = True
            given, self._held = self._held[: at + len(stop) if self._include else at], ""
            return given
        keep = max(self._overlap(stop) for stop in self._stops)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return given

    def flush(self) -> str:
        given, self._held = self._held, ""
        return given

    def _overlap(self, stop: str) -> int:
        """Characters at the end of the held text that begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
