"""Tokenizers out of GGUF metadata, against implementations that share nothing with ours."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.gemma.tokenization_gemma import GemmaTokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from enginewright.builder.checkpoint import TokenizerFiles, open_checkpoint
from enginewright.errors import EngineError, UnsupportedModelError
from tests.helpers.tiny_gguf import TinyGguf, state_of, tiny_model

TEXTS = [
    "",
    " ",
    "Hello, world! It's 2026; they'LL pay $1,234,567.89 (or 50%).",
    "  two  spaces,   three\n\n\n  lines\t\ttabs \r\n mixed \u00a0 \u3000 blanks  ",
    "naïve café – “quotes” … e\u0301 vs é, Å vs Å, ﬁ",
    "日本語のテキスト、한국어, Русский, العربية ١٢٣, हिन्दी १२३, ½ ² Ⅻ",
    "🦄 👩‍👩‍👧 🏳️‍🌈 \x00\x07\x7f",
    "def f(x: int) -> int:\n    return x**2 + 0x1F  # see `g`\n\tif not x:\n\t\tpass",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n <|endoftext|><|im_end",
    "a" * 70 + "  " + "1" * 40 + "\n" * 9 + "don't DON'T I'm I'M",
]
ALPHABET = "abcdefgh   \n\n\tABé日1290<>|_.,;'\"½🦄"


def texts(count: int) -> list[str]:
    generator = random.Random(11)
    made = ["".join(generator.choices(ALPHABET, k=generator.randrange(1, 60))) for _ in range(count)]
    return TEXTS + made


def built(writer: TinyGguf, rows: int) -> TokenizerFiles:
    writer.add_state(state_of(tiny_model("llama", vocab_size=rows)))
    return open_checkpoint(str(writer.finish())).tokenizer


def writer_for(tmp_path: Path) -> TinyGguf:
    return TinyGguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama").config)


def ids(tokenizer: TokenizerFiles, text: str, add_special_tokens: bool = False) -> list[int]:
    return Tokenizer.from_buffer(tokenizer.tokenizer_json).encode(text, add_special_tokens=add_special_tokens).ids


# transformers splits SmolLM's words as GPT-2 does, and knows nothing of SmolLM's single digits (llama.cpp and the
# model's own tokenizer.json do). So it is the reference as it is where no digits are, and with them split off where
# there are any.
def check_real_tokenizer(smollm2_gguf: Path, plain: PreTrainedTokenizerBase, num_texts: int) -> None:
    files = open_checkpoint(str(smollm2_gguf)).tokenizer
    tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    digits = Tokenizer.from_str(plain.backend_tokenizer.to_str())
    digits.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    with_digits = 0
    for text in texts(num_texts):
        read = tokenizer.encode(text).ids
        assert read == digits.encode(text).ids, text
        if any(character.isnumeric() for character in text):
            with_digits += 1
        else:
            assert read == plain(text)["input_ids"], text
        assert tokenizer.decode(read, skip_special_tokens=True) == plain.decode(read, skip_special_tokens=True)
    assert 0 < with_digits < num_texts
    assert tokenizer.get_vocab() == plain.get_vocab()
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert special == set(range(17))


def trained(splitter: pre_tokenizers.PreTokenizer, nfc: bool = False) -> Tokenizer:
    """A byte-level BPE whose words are cut by `splitter`."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitter
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text * 3 for text in texts(300)], trainer)
    return tokenizer


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # from its paper's code
# From the tokenizer.json of GPT-OSS 20B, Mistral Nemo, Qwen3.5, Seed-OSS and DeepSeek V3.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDS = "'s|'t|'re|'ve|'m|'ll|'d"
_BEGIN, _SPACES = r"[^\r\n\p{L}\p{N}]?", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K_WORDS = (
    f"{_BEGIN}{_UPPER}*{_LOWER}+(?i:{_ENDS})?|{_BEGIN}{_UPPER}+{_LOWER}*(?i:{_ENDS})?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
)
TEKKEN_WORDS = rf"{_BEGIN}{_UPPER}*{_LOWER}+|{_BEGIN}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
QWEN35_WORDS = rf"(?i:{_ENDS})|{_BEGIN}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_SPACES}"
SEED_WORDS = rf"(?i:{_ENDS})|{_BEGIN}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _SPACES
)
SPLITTERS = {
    "gpt-2": split(GPT2_WORDS),
    "default": split(GPT2_WORDS),
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), split(GPT2_WORDS)]),
    "llama-bpe": split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "qwen2": split(PRETOKENIZE_REGEX),
    "dbrx": split(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"]),
    "gpt-4o": split(O200K_WORDS),
    "tekken": split(TEKKEN_WORDS),
    "qwen35": split(QWEN35_WORDS),
    "seed-coder": split(SEED_WORDS),
    "deepseek-v3": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(Regex("[\u4e00-\u9fa5\u3040-\u30ff]+"), "isolated"),
            split(DEEPSEEK3_WORDS),
        ]
    ),
}
NFC = ("qwen2", "qwen35")


@pytest.mark.parametrize("pre", SPLITTERS)
def test_words(tmp_path: Path, pre: str) -> None:
    reference = trained(SPLITTERS[pre], nfc=pre in NFC)
    model = reference.model
    assert isinstance(model, models.BPE)
    model.save(str(tmp_path))
    merges = [tuple(line.split(" ")) for line in (tmp_path / "merges.txt").read_text().splitlines()[1:]]
    writer = writer_for(tmp_path)
    writer.add_merged_vocabulary(pre, reference.get_vocab(), merges)  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_buffer(built(writer, 700).tokenizer_json)
    for text in texts(500):
        assert tokenizer.encode(text, add_special_tokens=False).ids == reference.encode(text).ids, text


def test_words_differ_between_pre_tokenizers() -> None:
    """Pre-tokenizers give different words; otherwise the test above would not notice one in place of another."""
    text = "they'LL pay 1234567\n\n  ok (McDonald) हिन्दी 東京は -\n-x"
    same = ("default", "dbrx")  # as GPT-2's, and as Llama 3's
    cuts = {name: str(splitter.pre_tokenize_str(text)) for name, splitter in SPLITTERS.items() if name not in same}
    assert len(set(cuts.values())) == len(cuts)


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_whole_words_and_bos(tmp_path: Path, pre: str) -> None:
    writer = writer_for(tmp_path)
    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "<s>": 4, "abc": 5}
    writer.add_merged_vocabulary(pre, vocabulary, [("a", "b")])  # of which none leads to abc
    writer.add_bos_token_id(4)
    tokenizer = built(writer, 6)
    assert ids(tokenizer, "abc") == [5]
    assert ids(tokenizer, "abc", add_special_tokens=True) == [4, 5]
    assert tokenizer.config == {"bos_token": "<s>", "add_bos_token": True, "add_eos_token": False}


@pytest.mark.parametrize(
    ("pre", "expected"), [("smollm", [0, 1]), ("qwen2", [0, 1]), ("gpt-2", [2]), ("llama-bpe", [2])]
)
def test_digits(tmp_path: Path, pre: str, expected: list[int]) -> None:
    """Two digits are merged or not, by the pre-tokenizer. No trained vocabulary shows it: it has such merges or not."""
    writer = writer_for(tmp_path)
    writer.add_merged_vocabulary(pre, {"1": 0, "2": 1, "12": 2}, [("1", "2")])
    assert ids(built(writer, 3), "12") == expected


@pytest.mark.parametrize("pre", ["viking", None])
def test_unknown_pre_tokenizer(tmp_path: Path, pre: str | None) -> None:
    writer = writer_for(tmp_path)
    writer.add_merged_vocabulary(pre or "", {"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    message = "pre-tokenizer 'viking' is not known" if pre else "names no pre-tokenizer"
    with pytest.raises(UnsupportedModelError, match=message):
        built(writer, 3)


def test_unknown_kind_of_tokenizer(tmp_path: Path) -> None:
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary()
    writer.kv_data[0]["tokenizer.ggml.model"].value = "t5"
    with pytest.raises(UnsupportedModelError, match="tokenizer of model 't5' is not known"):
        built(writer, 71)


USER_DEFINED = ["\n\n", "\n\n\n", "  ", "   ", "    ", "<b>"]


def spelled() -> tuple[list[str], list[int]]:
    """SentencePiece's kind of vocabulary, best piece first: (tokens, types). Some characters are no piece."""
    generator = random.Random(3)
    corpus = " ".join(texts(300)).replace(" ", "▁").replace("\n", "")
    drawn = {corpus[at : at + generator.randrange(2, 6)] for at in generator.choices(range(len(corpus) - 9), k=900)}
    characters = sorted(set("▁".join(texts(0))) - set("\n 🦄日"))
    pieces = sorted(piece for piece in drawn if set(piece) <= set(characters))
    tokens = ["<unk>", "<s>", "</s>", *USER_DEFINED, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    tokens.append("<pad>")
    types = [2, 3, 3] + [4] * len(USER_DEFINED) + [6] * 256 + [1] * (len(pieces) + len(characters)) + [5]
    return tokens, types


def merged(text: str, tokens: Sequence[str], types: Sequence[int], prefix: bool) -> list[int]:
    """SentencePiece's BPE as its paper tells it, on whole strings: join the best pair until no pair is a piece."""
    ids = {token: id for id, token in enumerate(tokens)}
    whole = max(
        (token for token in USER_DEFINED if token in text),
        key=lambda token: (-text.find(token), len(token)),
        default="",
    )
    if whole:
        before, rest = text.split(whole, 1)
        return [*merged(before, tokens, types, prefix), ids[whole], *merged(rest, tokens, types, prefix)]
    if not text:
        return []
    symbols = list(("▁" if prefix else "") + text.replace(" ", "▁"))
    while True:
        pairs = [(ids.get(left + right, len(ids)), at) for at, (left, right) in enumerate(pairwise(symbols))]
        best, at = min(pairs, default=(len(ids), 0))
        if best == len(ids) or types[best] != 1:
            break
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    found: list[int] = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    tokens, types = spelled()
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary(tokens, types)
    writer.add_add_space_prefix(prefix)
    tokenizer = built(writer, len(tokens))
    loaded = Tokenizer.from_buffer(tokenizer.tokenizer_json)
    for text in texts(500):
        read = loaded.encode(text, add_special_tokens=False).ids
        assert read == merged(text, tokens, types, prefix), text
        if not any(token in text for token in USER_DEFINED):  # after which a prefix is added again
            assert loaded.decode(read, skip_special_tokens=False) == text
    assert ids(tokenizer, "a", add_special_tokens=True)[0] == 1
    assert tokenizer.config["add_bos_token"] is True
    assert tokenizer.config["unk_token"] == "<unk>"


def test_sentencepiece_without_bytes(tmp_path: Path) -> None:
    """Text that is no piece is one unknown token, however long it is."""
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary(["<unk>", "<s>", "</s>", "a", "▁"])
    assert ids(built(writer, 5), "a日本a日") == [4, 3, 0, 3, 0]


def gemma4_vocabulary() -> tuple[list[str], list[int], list[tuple[str, str]]]:
    """(tokens, types, merges), of which some are across blanks and line ends; as LlamaHfVocab writes them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=600, limit_alphabet=60, show_progress=False)
    tokenizer.train_from_iterator([*texts(300), "\n" * 7, "def f():\n    x\n    y"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    shown = ["<|tool_response>", "<turn|>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"], *shown]
    return tokens, [3] * 5 + [6] * 256 + [1] * len(model["vocab"]) + [4, 3], [tuple(pair) for pair in model["merges"]]


@pytest.mark.parametrize("says_bos", [True, False])
def test_gemma4(tmp_path: Path, says_bos: bool) -> None:
    """Tokens are those of transformers with the same vocabulary and merges; bos always comes first, as in llama.cpp."""
    tokens, types, merges = gemma4_vocabulary()
    assert any(len(left + right) > 1 and set(left + right) == {"\n"} for left, right in merges)
    writer = writer_for(tmp_path)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(tokens))
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(merge) for merge in merges])
    for id, name in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{name}_token_id")(id)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(says_bos)
    files = built(writer, len(tokens))
    loaded = Tokenizer.from_buffer(files.tokenizer_json)
    reference = GemmaTokenizer({token: id for id, token in enumerate(tokens)}, merges)
    for text in texts(500):
        read = loaded.encode(text, add_special_tokens=False).ids
        assert read == reference(text, add_special_tokens=False)["input_ids"], text
        assert loaded.decode(read, skip_special_tokens=False) == text
    assert ids(files, "a", add_special_tokens=True)[0] == 2
    assert files.config["add_bos_token"] is True
    ends = open_checkpoint(str(tmp_path / "tiny.gguf")).generation_config["eos_token_id"]
    assert [tokens[id] for id in ends] == ["<eos>", "<|tool_response>", "<turn|>"]


def test_gemma4_without_merges(tmp_path: Path) -> None:
    writer = writer_for(tmp_path)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list(["a", "b", "ab"])
    with pytest.raises(EngineError, match="merges is missing or not in pairs"):
        built(writer, 3)


def test_special_tokens(tmp_path: Path) -> None:
    """Control tokens are special, user-defined ones are not, both are taken whole; what fills up is no token."""
    tokens, types = spelled()
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary(tokens, types)
    tokenizer = Tokenizer.from_buffer(built(writer, len(tokens)).tokenizer_json)
    added = tokenizer.get_added_tokens_decoder()
    assert {token.content for token in added.values() if token.special} == {"<unk>", "<s>", "</s>"}
    assert {token.content for token in added.values() if not token.special} == set(USER_DEFINED)
    assert isinstance(added[1], AddedToken)
    assert tokenizer.encode("a</s>b<b>", add_special_tokens=False).ids.count(2) == 1
    assert tokenizer.token_to_id("<pad>") is None
    assert tokenizer.decode([len(tokens) - 1]) == ""


def test_bos_and_eos_as_the_file_says(tmp_path: Path) -> None:
    for add_bos, add_eos in [(True, True), (False, True), (True, False), (False, False)]:
        writer = writer_for(tmp_path)
        writer.add_spelled_vocabulary()
        writer.add_add_bos_token(add_bos)
        writer.add_add_eos_token(add_eos)
        tokenizer = built(writer, 71)
        read = ids(tokenizer, "A", add_special_tokens=True)
        assert (read[0] == 1, read[-1] == 2) == (add_bos, add_eos)
        assert (tokenizer.config["add_bos_token"], tokenizer.config["add_eos_token"]) == (add_bos, add_eos)


def test_the_same_bytes_each_time(tmp_path: Path) -> None:
    tokens, types = spelled()
    made = []
    for _ in range(2):
        writer = writer_for(tmp_path)
        writer.add_spelled_vocabulary(tokens, types)
        made.append(built(writer, len(tokens)))
    assert made[0] == made[1]


def test_ends_of_a_text(tmp_path: Path) -> None:
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary(["<unk>", "<s>", "</s>", "<end_of_turn>", "<|im_end|>", "x"], [2, 3, 3, 3, 1, 1])
    writer.add_eot_token_id(5)
    built(writer, 71)
    checkpoint = open_checkpoint(str(tmp_path / "tiny.gguf"))
    assert checkpoint.generation_config["eos_token_id"] == [2, 5, 3]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", ["<unk>", "<s>", "<s>"], "with the same spelling"),
        ("token_type", [1, 1], "2 entries for 67 tokens"),
        ("scores", [0.0], "1 entries for 67 tokens"),
        ("scores", [1] * 67, "not a list of float"),
        ("tokens", [], "holds no tokenizer"),
        ("remove_extra_whitespaces", True, "normalizes text"),
    ],
)
def test_vocabulary_that_does_not_fit(tmp_path: Path, key: str, value: object, message: str) -> None:
    writer = writer_for(tmp_path)
    writer.add_spelled_vocabulary()
    if key == "tokens":
        del writer.kv_data[0]["tokenizer.ggml.token_type"]
    writer.kv_data[0].pop(f"tokenizer.ggml.{key}", None)
    if isinstance(value, bool):
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    elif value:
        assert isinstance(value, list)
        writer.add_array(f"tokenizer.ggml.{key}", value)
    with pytest.raises(EngineError, match=message):
        built(writer, 71)


def test_merges_that_lead_to_no_token(tmp_path: Path) -> None:
    for merge in [("a", "b"), ("a", "x"), ("x", "b")]:
        writer = writer_for(tmp_path)
        writer.add_merged_vocabulary("gpt-2", {"a": 0, "b": 1}, [merge])
        with pytest.raises(EngineError, match="not all three are tokens"):
            built(writer, 2)
