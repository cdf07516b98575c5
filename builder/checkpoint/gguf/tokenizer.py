"""Makes tokenizers' JSON from the tokenizer in a GGUF file's metadata.

Source: `tokenizer.ggml.*` of the GGUF specification. There are three kinds here. `gpt2` is byte-level BPE: the file has
merges, but only a name for the rule that splits a text into words (`tokenizer.ggml.pre`). `llama` is SentencePiece's
BPE: no merges, but a score for each piece, and the piece with the highest score is merged first. `gemma4` is like it,
but with merges in the file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from enginewright.builder.checkpoint.base import TokenizerFiles
from enginewright.builder.checkpoint.files import tokenizers_errors
from enginewright.builder.checkpoint.gguf.header import Value
from enginewright.errors import EngineError, UnsupportedModelError

SPACE = "\u2581"  # SentencePiece's symbol for a space


class TokenType(IntEnum):
    """Type of a token in a GGUF file."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Splitting:
    """The rule by which a byte-level BPE splits a text into words, and related settings."""

    # patterns of a word, each applied to the rest of those before it; (): GPT-2's, which tokenizers has
    patterns: tuple[str, ...] = ()
    digits: bool = False  # True if each digit is a word of its own
    nfc: bool = False  # True if texts are normalized to NFC first
    whole_words: bool = False  # True if a word that is a token is never split by merges
    add_bos: bool = False  # default of add_bos_token


# The patterns are those of the models' tokenizer.json. Llama 3's and Qwen 2's differ in how digits are grouped.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# A word has letters of upper case before those of lower case; o200k's may end as in "I'll", Mistral's Tekken's not.
BY_CASE = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SHORT_FORMS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",  # Chinese and Japanese
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
LLAMA3 = Splitting((WORDS % "{1,3}",), whole_words=True, add_bos=True)
O200K = Splitting((BY_CASE % (SHORT_FORMS, SHORT_FORMS, "{1,3}"),))
CL100K = Splitting((WORDS % "{1,3}",))
DIGITS = Splitting(digits=True)
SPLITTINGS = {
    "default": Splitting(),
    "gpt-2": Splitting(),
    **dict.fromkeys(("smollm", "refact", "starcoder"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon-h1", "lfm2", "pixtral"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), CL100K),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Splitting(DEEPSEEK3)),
    "qwen2": Splitting((WORDS % "",), nfc=True),
    "qwen35": Splitting((QWEN35,), nfc=True),
    "seed-coder": Splitting((SEED,)),
    "tekken": Splitting((BY_CASE % ("", "", ""),), whole_words=True, add_bos=True),
}

# Tokens that end a turn or a text, by their names: files rarely list more than one of a model's.
END_TOKENS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_text|>", "<|endoftext|>", "<eos>",
    "<turn|>", "<|tool_response>"
)  # fmt: skip
SAMPLING_KEYS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class Vocabulary:
    """The `tokenizer.*` metadata, checked."""

    def __init__(self, metadata: Mapping[str, Value], rows: int) -> None:
        """Checks the metadata.

        Args:
            metadata: metadata of the file.
            rows: rows of the embedding table; a token must have one.

        Raises:
            EngineError: something is missing or does not fit together.
        """
        self.metadata = metadata
        self.tokens: list[str] = self.array("tokens", str) or []
        if not self.tokens:
            raise EngineError("the GGUF file holds no tokenizer", fix="Convert the model again, with its tokenizer.")
        if len(self.tokens) > rows:
            raise EngineError(f"the tokenizer has {len(self.tokens)} tokens", f"the embedding table has {rows} rows")
        types = self.array("token_type", int) or [TokenType.NORMAL] * len(self.tokens)
        self.types = self._of_each_token("token_type", types)
        # Tokens that only fill up the table are left out: no text becomes one.
        used = [id for id, token in enumerate(self.tokens) if token and self.types[id] != TokenType.UNUSED]
        self.ids = {self.tokens[id]: id for id in used}
        if len(self.ids) != len(used):
            raise EngineError("the tokenizer has tokens with the same spelling", fix="Convert the model again.")

    def text(self, key: str) -> str | None:
        """Returns a text of the metadata; None if it is missing."""
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, str) else None

    def flag(self, key: str, default: bool) -> bool:
        """Returns a flag of the metadata.

        Args:
            key: the key.
            default: value if the key is missing.
        """
        value = self.metadata.get(f"tokenizer.ggml.{key}", default)
        return value if isinstance(value, bool) else default

    def id(self, key: str, default: int | None = None) -> int | None:
        """Returns a token id of the metadata; None if it is missing or not valid.

        Args:
            key: the key, without `_token_id`.
            default: value if the key is missing.
        """
        value = self.metadata.get(f"tokenizer.ggml.{key}_token_id", default)
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def array(self, key: str, kind: type) -> list[Any] | None:
        """Returns a list of the metadata; None if it is missing.

        Args:
            key: the key.
            kind: type of the entries.
        """
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not (isinstance(value, list) and all(type(entry) is kind for entry in value)):
            raise EngineError(f"metadata tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return value

    def scores(self) -> list[float]:
        """Returns the score of each token."""
        scores = self.array("scores", float)
        if scores is None:
            raise EngineError("metadata tokenizer.ggml.scores is missing", fix="Convert the model again.")
        return self._of_each_token("scores", scores)

    def of_type(self, *kinds: TokenType) -> list[str]:
        """Lists the tokens of some types."""
        return [token for token, id in self.ids.items() if self.types[id] in kinds]

    def special_ids(self) -> dict[str, int]:
        """Returns bos, eos, unk, pad → token id, for those that exist."""
        pieces = self.text("model") == "llama"  # SentencePiece has bos and eos at 1 and 2 by default
        unknown = next((id for id, kind in enumerate(self.types) if kind == TokenType.UNKNOWN), None)
        found = {
            "bos": self.id("bos", 1 if pieces else None),
            "eos": self.id("eos", 2 if pieces else None),
            "unk": self.id("unknown", unknown),
            "pad": self.id("padding"),
        }
        return {name: id for name, id in found.items() if id is not None}

    def _of_each_token(self, key: str, values: list[Any]) -> list[Any]:
        if len(values) != len(self.tokens):
            raise EngineError(f"metadata tokenizer.ggml.{key} has {len(values)} entries for {len(self.tokens)} tokens")
        return values


def build_tokenizer(vocabulary: Vocabulary) -> TokenizerFiles:
    """Makes the tokenizer.

    Raises:
        UnsupportedModelError: the kind of tokenizer, or its way to split text, is unknown.
        EngineError: the metadata does not fit together.
    """
    match vocabulary.text("model"):
        case "gpt2":
            name = vocabulary.text("pre")
            splitting = SPLITTINGS.get(name or "")
            if splitting is None:
                raise UnsupportedModelError(
                    f"pre-tokenizer {name!r} is not known" if name else "the GGUF file names no pre-tokenizer",
                    f"known are {', '.join(SPLITTINGS)}",
                    "Build from the model's safetensors checkpoint instead.",
                )
            tokenizer, add_bos = _byte_level(vocabulary, splitting), splitting.add_bos
        case "llama":
            tokenizer, add_bos = _sentencepiece(vocabulary, _merges(vocabulary)), True
        case "gemma4":
            tokenizer, add_bos = _sentencepiece(vocabulary, _stored_merges(vocabulary), has_prefix=False), True
        case other:
            raise UnsupportedModelError(
                f"a GGUF tokenizer of model {other!r} is not known",
                "known are gpt2, llama and gemma4",
                "Build from the model's safetensors checkpoint instead.",
            )
    special = vocabulary.special_ids()
    special_tokens = {vocabulary.tokens[id] for id in special.values()}
    special_tokens.update(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN))
    whole = special_tokens.union(vocabulary.of_type(TokenType.USER_DEFINED)) & vocabulary.ids.keys()
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=token in special_tokens)
            for token in sorted(whole, key=lambda token: vocabulary.ids[token])
        ]
    )
    config: dict[str, Any] = {f"{name}_token": vocabulary.tokens[id] for name, id in special.items()}
    # Gemma 4 needs bos, though its first converters wrote that it does not; llama.cpp always adds it.
    always = vocabulary.text("model") == "gemma4"
    config["add_bos_token"] = (always or vocabulary.flag("add_bos_token", add_bos)) and "bos" in special
    config["add_eos_token"] = vocabulary.flag("add_eos_token", False) and "eos" in special
    _add_ends(tokenizer, config, special)
    template = vocabulary.metadata.get("tokenizer.chat_template")
    return TokenizerFiles(tokenizer.to_str().encode(), config, template if isinstance(template, str) else None)


def generation_config(vocabulary: Vocabulary) -> dict[str, Any]:
    """Makes generation_config.json: tokens that end a text, and default sampling, as far as the file has them."""
    special = vocabulary.special_ids()
    ends = [special.get("eos"), vocabulary.id("eot"), vocabulary.id("eom")]
    # Gemma 4's converter does not mark `<|tool_response>` as control, though it ends a turn.
    shown = vocabulary.of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
    ends += [vocabulary.ids[token] for token in shown if token in END_TOKENS]
    unique = list(dict.fromkeys(id for id in ends if id is not None))
    config: dict[str, Any] = {f"{name}_token_id": special[name] for name in ("bos", "pad") if name in special}
    if unique:
        config["eos_token_id"] = unique if len(unique) > 1 else unique[0]
    sampling = {name: vocabulary.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    config |= {name: value for name, value in sampling.items() if type(value) in (int, float)}
    if "temperature" in config or "top_p" in config or "top_k" in config:
        config["do_sample"] = True
    return config


def _byte_level(vocabulary: Vocabulary, splitting: Splitting) -> Tokenizer:
    tokenizer = Tokenizer(_bpe(vocabulary, _stored_merges(vocabulary), ignore_merges=splitting.whole_words))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in splitting.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.patterns))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _stored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    pairs = [merge.split(" ") for merge in vocabulary.array("merges", str) or []]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise EngineError("metadata tokenizer.ggml.merges is missing or not in pairs", fix="Convert the model again.")
    return [(left, right) for left, right in pairs]


def _sentencepiece(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], has_prefix: bool = True) -> Tokenizer:
    """Makes a SentencePiece tokenizer; `has_prefix` is the default of putting a space before a text."""
    if vocabulary.flag("remove_extra_whitespaces", False) or vocabulary.array("precompiled_charsmap", int):
        raise UnsupportedModelError("a SentencePiece tokenizer that normalizes text is not implemented")
    prefix = vocabulary.flag("add_space_prefix", has_prefix)
    tokenizer = Tokenizer(
        _bpe(
            vocabulary,
            merges,
            unk_token=next(iter(vocabulary.of_type(TokenType.UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_type(TokenType.BYTE)),
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Lists every way to join a piece from two, the best piece first.

    Only normal pieces are merged: a text never becomes a control token, and a user-defined one is matched before
    merges.
    """
    scores = vocabulary.scores()
    pieces = {token: id for token, id in vocabulary.ids.items() if vocabulary.types[id] == TokenType.NORMAL}
    merges: list[tuple[str, str]] = []
    for piece in sorted(pieces, key=lambda piece: (-scores[pieces[piece]], pieces[piece])):
        cuts = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        merges += sorted(pairs, key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
    return merges


def _bpe(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    what = "the tokenizer in the GGUF file does not fit together"
    for left, right in merges:
        if not {left, right, left + right} <= vocabulary.ids.keys():
            raise EngineError(what, f"{left!r} and {right!r} are merged, and not all three are tokens")
    with tokenizers_errors(what):
        return models.BPE(vocabulary.ids, merges, **options)


def _add_ends(tokenizer: Tokenizer, config: Mapping[str, Any], special: Mapping[str, int]) -> None:
    """Makes the tokenizer put bos before a text and eos after it, as the config says."""
    bos, eos = ([end] if config[f"add_{end}_token"] else [] for end in ("bos", "eos"))
    if not bos and not eos:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *[f"{end}:1" for end in bos], "$B:1", *[f"{end}:1" for end in eos]],
        special_tokens=[{"id": end, "ids": [special[end]], "tokens": [config[f"{end}_token"]]} for end in (*bos, *eos)],
    )
