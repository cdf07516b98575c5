"""Text ↔ tokens: encoding, decoding, and conversations through the model's chat template."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import tokenizers

from enginewright.errors import CorruptEngineError, UsageError

if TYPE_CHECKING:
    from enginewright.runtime.chat_template import ChatTemplate

REPLACEMENT = "\ufffd"  # what bytes that are no character decode to


class _Kind(msgspec.Struct):
    type: str = ""
    behavior: str = ""
    pretokenizers: "list[_Kind]" = []


class _Added(msgspec.Struct):
    lstrip: bool = False
    rstrip: bool = False


class _Form(msgspec.Struct):
    """What of tokenizer.json decides which text a token may stand for."""

    model: _Kind
    decoder: _Kind | None = None
    normalizer: Any = None
    pre_tokenizer: _Kind | None = None
    added_tokens: list[_Added] = []


class _WholeTexts(dict[int, str | None]):
    """Worked out when they are first asked for."""

    def __init__(self, text_of: Callable[[int], str | None]) -> None:
        self._text_of = text_of

    def __missing__(self, token: int) -> str | None:
        self[token] = self._text_of(token)
        return self[token]


class Tokenizer:
    """A model's tokenizer.

    whole_texts: of each token that has the same text wherever it stands between whole characters; None of others. The
    second, [True], leaves special tokens out: their text is empty.

    Args:
        tokenizer_json: tokenizers' own format.
        config: the keys of tokenizer_config.json that matter (special tokens).
        chat_template: Jinja, or None.
        now: the time that the template may print.
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
        self.whole_texts: tuple[Mapping[int, str | None], ...] = (
            _WholeTexts(self._whole_text),
            _WholeTexts(lambda token: "" if token in self.special_ids else self._whole_text(token)),
        )
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: a beginning, an end, whose turn it is."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token for token, entry in added.items() if entry.special)

    def token_id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. A rendered chat already has its special tokens: encode it without adding any.

        Raises:
            UsageError: the text holds half of a surrogate pair, as arguments that are no UTF-8 do.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the text is no valid Unicode", f"{error.reason} at character {error.start}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _whole_text(self, token: int) -> str | None:
        text = self.decode([token], skip_special_tokens=False)
        return None if REPLACEMENT in text or not self._decodes_bytes else text

    @cached_property
    def _decodes_bytes(self) -> bool:
        """Whether a text is the bytes of its tokens one behind the other, with nothing done to its beginning."""
        return self._form.decoder is not None and self._form.decoder.type == "ByteLevel"

    @cached_property
    def _form(self) -> _Form:
        return msgspec.json.decode(self._tokenizer.to_str(), type=_Form)

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, told from its length; 0 where that tells nothing."""
        return 0 if self._most_bytes is None else -(-len(text.encode(errors="replace")) // self._most_bytes)

    @cached_property
    def _most_bytes(self) -> int | None:
        """Bytes of text that a token stands for at most; None if text may vanish before it becomes tokens.

        Known for byte-level BPE without a normalizer: every byte is in some token. Added tokens that take the space
        around them with them may stand for any length.
        """
        form = self._form
        first = form.pre_tokenizer or _Kind()
        kinds = {entry.type: entry for entry in (first, *first.pretokenizers)}
        greedy = any(token.lstrip or token.rstrip for token in form.added_tokens)
        removed = any(entry.behavior == "Removed" for entry in kinds.values())
        if form.model.type != "BPE" or form.normalizer or "ByteLevel" not in kinds or greedy or removed:
            return None
        if kinds.keys() - {"ByteLevel", "Digits", "Sequence", "Split"}:
            return None
        vocabulary = self._tokenizer.get_vocab()
        if not all(byte in vocabulary for byte in tokenizers.pre_tokenizers.ByteLevel.alphabet()):
            return None
        return max(len(token.encode()) for token in vocabulary)

    @property
    def has_chat_template(self) -> bool:
        return self._source is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """A conversation as the model was trained to see it; add_generation_prompt: it is the model's turn.

        Raises:
            UsageError: the model has no chat template, or it refuses the messages.
        """
        names = {name: self.config.get(name) or "" for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return self._template.render(messages, names, add_generation_prompt=add_generation_prompt)

    @cached_property
    def _template(self) -> "ChatTemplate":
        from enginewright.runtime.chat_template import ChatTemplate  # jinja2 takes a while to import

        if self._source is None:
            raise UsageError("this model has no chat template", fix="Give the whole text with --prompt.")
        return ChatTemplate(self._source, self._now)
