"""Converts text to tokens and back, and conversations through the model's chat template."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any

import tokenizers
import tokenizers.decoders

from enginewright.errors import CorruptEngineError, UsageError, shorten
from enginewright.runtime.text.messages.formats import message_format
from enginewright.runtime.text.messages.parser import MessageFormat, ReasoningPlace

if TYPE_CHECKING:
    from enginewright.runtime.text.chat_template import ChatTemplate

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")  # tokens that a chat template may use
# Names of a template that are not free for other variables.
TEMPLATE_NAMES = ("messages", "add_generation_prompt", "chat_template", "tokenize", "tools", "documents")
OPENING_TOKENS = 16  # tokens at the end of a prompt in which reasoning may begin or end
REPLACEMENT = "\ufffd"  # decoded from bytes that are no complete character
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a byte in vocabularies whose other tokens are texts


class _WholeTexts(dict[int, str | None]):
    """The text of each token, decoded at its first use; None if the text depends on the tokens around it.

    Args:
        tokenizer: must not be the Tokenizer that owns this object, which would make a reference cycle.
        known: texts that are not decoded.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, known: Mapping[int, str | None]) -> None:
        super().__init__(known)
        self._tokenizer = tokenizer
        # Only then the text of several tokens is that of their bytes, without special treatment of the first one.
        self._decodes_bytes = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)

    def __missing__(self, token: int) -> str | None:
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        self[token] = None if REPLACEMENT in text or not self._decodes_bytes else text
        return self[token]


class Encoding(dict[str, Any]):
    """input_ids and attention_mask, as entries and as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _encoding(ids: list[Any]) -> Encoding:
    """Encoding of the tokens of one text, or of several."""
    mask = [[1] * len(one) for one in ids] if ids and isinstance(ids[0], list) else [1] * len(ids)
    return Encoding(input_ids=ids, attention_mask=mask)


@cache
def _byte_names() -> Mapping[str, int]:
    """Bytes by their characters in byte-level vocabularies.

    Printable bytes stand for themselves, and the others are numbered from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError("the text is no valid Unicode", f"{error.reason} at character {error.start}") from error


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        whole_texts: the text of each token that has the same text everywhere between complete characters, and None for
            others. The second mapping, [True], is without special tokens: their text is empty.

    Args:
        tokenizer_json: tokenizers' own format.
        config: the keys of tokenizer_config.json that matter (special tokens).
        chat_template: the template in Jinja, or None.
        now: gives the time that the template may print.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        config: Mapping[str, Any],
        chat_template: str | None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.config = config
        self._source, self._now = chat_template, now
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:  # tokenizers raises no narrower class
            raise CorruptEngineError("the tokenizer cannot be read", str(error), "Build the engine again.") from error
        self.use_message_format(message_format(chat_template))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def use_message_format(self, form: MessageFormat) -> None:
        """Replaces the detected message format. To be called before the first text."""
        self.message_format = form
        ids = {mark: self.token_id(mark) for mark in form.marks}
        # Marks that are special tokens, by id: they are part of texts although special tokens are not.
        self.shown_marks = {token: mark for mark, token in ids.items() if token in self.special_ids}
        self.mark_ids = {mark: token for token, mark in self.shown_marks.items()}
        skipped = {token: None if token in self.shown_marks else "" for token in self.special_ids}
        self.whole_texts: Sequence[Mapping[int, str | None]] = (
            _WholeTexts(self._tokenizer, {}),
            _WholeTexts(self._tokenizer, skipped),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary without added ones; `len` counts these, too."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @property
    def bos_token(self) -> str | None:
        """Token at the start of a text."""
        return self.config.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Token at the end of a text; the model may have more of them (Engine.eos_token_ids)."""
        return self.config.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token at the start of a text."""
        return self.token_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token at the end of a text."""
        return self.token_id(self.eos_token)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are no text, such as start, end, and marks of turns."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def token_id(self, token: str | None) -> int | None:
        """Id of a token; None if the vocabulary does not have it."""
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Converts a text to token ids. A rendered chat already has its special tokens: encode it without adding any.

        Args:
            text: the text.
            add_special_tokens: whether to add the special tokens around a text.

        Raises:
            UsageError: the text has an unpaired surrogate, as from command-line arguments that are not UTF-8.
        """
        _check_unicode(text)
        # A batch, even of one text, is encoded without Python's lock, so that streams continue meanwhile.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int, int]:
        """Converts two texts to one sequence of token ids, with the special tokens between and around them.

        Returns:
            The token ids, the index where the second text begins, and the index from which tokens are of type 1.

        Raises:
            UsageError: a text has an unpaired surrogate.
        """
        for text in (first, second):
            _check_unicode(text)
        (encoding,) = self._tokenizer.encode_batch_fast([(first, second)])
        begins = [
            next((index for index, number in enumerate(numbers) if number == 1), len(encoding.ids))
            for numbers in (encoding.sequence_ids, encoding.type_ids)
        ]
        return list(encoding.ids), begins[0], begins[1]

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> "Encoding":
        """Converts a text, or several, to token ids and an attention mask of ones, under transformers' names.

        Raises:
            UsageError: it is neither a text nor a list of texts.
        """
        if isinstance(text, str):
            return _encoding(self.encode(text, add_special_tokens=add_special_tokens))
        if not isinstance(text, list | tuple) or not all(isinstance(one, str) for one in text):
            raise UsageError(f"the text is {shorten(text)}", "it must be a text or a list of texts")
        return _encoding([self.encode(one, add_special_tokens=add_special_tokens) for one in text])

    def decode(self, ids: int | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of a token, or of several."""
        tokens = [int(ids)] if isinstance(ids, Integral) else list(ids)  # type: ignore[arg-type]
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token: int) -> bytes:
        """Bytes of a token: those of its text, or its own if it is a part of a character."""
        text = self.decode([token], skip_special_tokens=False)
        written = self._tokenizer.id_to_token(token) or ""
        if REPLACEMENT not in text:
            return text.encode()
        if found := _FALLBACK_BYTE.fullmatch(written):
            return bytes([int(found[1], 16)])
        names = _byte_names()
        return bytes(names[name] for name in written) if names.keys() >= set(written) else text.encode()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Id of a token, or of each of several; an unknown token has that of unk_token, or None."""
        if not isinstance(tokens, str):
            return [self._id_or_unknown(token) for token in tokens]
        return self._id_or_unknown(tokens)

    def _id_or_unknown(self, token: str) -> int | None:
        found = self.token_id(token)
        return self.token_id(self.config.get("unk_token")) if found is None else found

    @cached_property
    def longest_token_chars(self) -> int:
        """Number of characters of the longest token as it is written in the vocabulary."""
        return max(map(len, self._tokenizer.get_vocab()))

    def to_json(self) -> str:
        """The tokenizer in tokenizers' own format."""
        return str(self._tokenizer.to_str())

    @property
    def has_chat_template(self) -> bool:
        """True if the model has a chat template."""
        return self._source is not None

    def template_reads(self, name: str) -> bool:
        """True if the chat template has a variable of this name."""
        return self._source is not None and name in self._source

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Renders a conversation with the model's chat template.

        Args:
            messages: messages with role and content.
            add_generation_prompt: whether the text ends with the start of the model's message.
            template_kwargs: further variables of the template, such as Qwen3's enable_thinking.
            tools: tools that the model may call, in OpenAI's format.

        Raises:
            UsageError: the model has no chat template, it refuses the messages, or a name is reserved.
            EngineError: the template fails, or takes too long or too much memory.
        """
        names: dict[str, Any] = {name: self.config.get(name) or "" for name in SPECIAL_TOKENS}
        if tools and not self.template_reads("tools"):
            raise UsageError("tools cannot be shown to this model", "its chat template has none")
        if tools:
            names["tools"] = list(tools)
        return self._template.render(
            messages, names, add_generation_prompt=bool(add_generation_prompt), template_kwargs=template_kwargs
        )

    def reasoning_place(self, prompt: Sequence[int]) -> ReasoningPlace:
        """Position in the model's reasoning at the end of a prompt."""
        reasoning = self.message_format.reasoning
        if reasoning is None:
            return ReasoningPlace.OVER
        text = self.decode(prompt[-OPENING_TOKENS:], skip_special_tokens=False).rstrip()
        if text.endswith(reasoning.open):
            return ReasoningPlace.BEGUN
        return ReasoningPlace.OVER if text.endswith(reasoning.close) else ReasoningPlace.POSSIBLE

    def ends_in_reasoning(self, prompt: Sequence[int]) -> bool:
        """True if a message continues reasoning that its prompt has started."""
        return self.reasoning_place(prompt) is ReasoningPlace.BEGUN

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **template_kwargs: Any,
    ) -> "str | list[int] | Encoding":
        """Renders a conversation to text or token ids, under transformers' names and with its defaults.

        Args:
            conversation: messages, which the template gets unchanged.
            tokenize: False returns the text.
            add_generation_prompt: whether the text ends with the start of the model's message.
            return_dict: False returns only the token ids.
            template_kwargs: further variables of the template.

        Raises:
            UsageError: as `render_chat`.
        """
        if not isinstance(conversation, list | tuple) or not all(isinstance(one, Mapping) for one in conversation):
            raise UsageError(f"the conversation is {shorten(conversation)}", "it must be a list of messages")
        given = {
            name: value for name, value in template_kwargs.items() if not (name in TEMPLATE_NAMES and value is None)
        }
        text = self.render_chat(conversation, add_generation_prompt=add_generation_prompt, template_kwargs=given)
        if not tokenize:
            return text
        ids = self.encode(text, add_special_tokens=False)  # the template has added them
        return _encoding(ids) if return_dict else ids

    def close(self) -> None:
        """Ends the process that renders chats, if there is one."""
        if "_template" in vars(self):
            self._template.close()

    @cached_property
    def _template(self) -> "ChatTemplate":
        from enginewright.runtime.text.chat_template import ChatTemplate  # jinja2 takes a while to import

        if self._source is None:
            raise UsageError("this model has no chat template", fix="Give the whole text: engine generate --prompt.")
        return ChatTemplate(self._source, self._now)
