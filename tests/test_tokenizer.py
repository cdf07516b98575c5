"""Text ↔ tokens: answers that come token by token, stop strings in any pieces, and chat templates from strangers."""

import itertools
import json
import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers

from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.runtime import chat_template
from enginewright.runtime.chat_template import ChatTemplate
from enginewright.runtime.detokenizer import Detokenizer, StopStrings
from enginewright.runtime.prompts import encode_prompt
from enginewright.runtime.tokenizer import Tokenizer
from tests.tiny import BEGIN, END, MemoryCheckpoint

BROKEN = "\ufffd"
TEXTS = ["Größe, naïve", "東京タワー", "🙂🇫🇷👩‍👩‍👧", "a b  c\n\td", " The quick", "מזל טוב", "x" * 40, "é" * 9, "𝔘𝔫"]  # noqa: RUF001


@cache
def byte_level() -> Tokenizer:
    """As Llama 3's: every byte is a token, and merges may end in the middle of a character."""
    return Tokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None)


@cache
def byte_fallback() -> Tokenizer:
    """As Llama 2's and Gemma's: pieces of text that begin with ▁, and bytes for all that is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghnqrstuxT", "▁T", "he", "▁The", "ö", "東", "▁▁"]
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "▁")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    raw = RawTokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(raw.to_str().encode(), {}, None)


TOKENIZERS = [byte_level, byte_fallback]


def deltas_of(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in answer), detokenizer.flush()]


def expected_text(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """What the answer adds to the whole text."""
    return tokenizer.decode(prompt + answer)[len(tokenizer.decode(prompt)) :]


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
@settings(max_examples=150, deadline=None)
@given(prompt=st.sampled_from([*TEXTS, ""]), pieces=st.lists(st.sampled_from(TEXTS), max_size=5), data=st.data())
def test_deltas_of_texts(make: object, prompt: str, pieces: list[str], data: st.DataObject) -> None:
    """Any text, tokenized in pieces or byte by byte: each delta is whole characters, and together they are the text."""
    tokenizer = byte_level() if make is byte_level else byte_fallback()
    start = tokenizer.encode(prompt) if prompt else []
    answer: list[int] = []
    for piece in pieces:
        answer += bytes_of(tokenizer, piece) if data.draw(st.booleans()) else tokenizer.encode(piece)
    expected = expected_text(tokenizer, start, answer)
    assert BROKEN not in expected
    deltas = deltas_of(tokenizer, start, answer)
    assert "".join(deltas) == expected
    assert not any(BROKEN in delta for delta in deltas)
    assert deltas[-1] == "", "nothing is held back at the end of a whole character"


def bytes_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of the single bytes."""
    if tokenizer is byte_fallback():
        return [3 + byte for byte in text.encode()]
    return [token for byte in text.encode() for token in [byte_tokens()[byte]]]


@cache
def byte_tokens() -> dict[int, int]:
    raw = json.loads(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json)["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: raw[name] for byte, name in names.items()}


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_deltas_of_random_tokens(make: object) -> None:
    """Tokens that a model of noise draws: where they are a text, the deltas are that text; nothing fails elsewhere."""
    tokenizer = byte_level() if make is byte_level else byte_fallback()
    rng, valid = random.Random(5), 0
    for _ in range(1500):
        answer = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(1, 12))]
        prompt = tokenizer.encode(rng.choice(TEXTS))
        deltas, expected = deltas_of(tokenizer, prompt, answer), expected_text(tokenizer, prompt, answer)
        if BROKEN not in expected:
            valid += 1
            assert "".join(deltas) == expected
        if make is byte_level:
            assert "".join(deltas).strip(BROKEN) == expected.strip(BROKEN), answer
    assert valid > 100


def test_a_character_that_never_comes_is_flushed() -> None:
    tokenizer = byte_level()
    cut = bytes_of(tokenizer, "🙂")[:3]
    assert deltas_of(tokenizer, [], cut) == ["", "", "", BROKEN]
    assert "".join(deltas_of(tokenizer, [], [*cut, *tokenizer.encode("abc")[1:]])) == BROKEN + "abc"


def test_bytes_that_are_no_character_do_not_take_the_next_one_with_them() -> None:
    tokenizer = byte_level()
    for count in range(1, 8):
        noise = [byte_tokens()[0x80]] * count
        assert "".join(deltas_of(tokenizer, [], [*noise, *bytes_of(tokenizer, "🙂!")])) == BROKEN * count + "🙂!"
    literal = bytes_of(tokenizer, BROKEN * 5 + "🙂")
    assert "".join(deltas_of(tokenizer, [], literal)) == BROKEN * 5 + "🙂"


def test_a_prompt_that_ends_in_the_middle_of_a_character() -> None:
    """The answer has all of it, or what comes after; and nothing of the prompt."""
    tokenizer = byte_level()
    cut = bytes_of(tokenizer, "a🙂")[:-1]
    rest = bytes_of(tokenizer, "🙂b")
    assert "".join(deltas_of(tokenizer, cut, rest[3:])) == "🙂b"
    assert "".join(deltas_of(tokenizer, cut, rest[4:])) == "b"
    assert "".join(deltas_of(tokenizer, cut, [])) == ""


def test_bytes_that_are_no_character_are_not_waited_for() -> None:
    """What can become a character no more is given soon, not at the end."""
    detokenizer = Detokenizer(byte_level(), [])
    given = "".join(detokenizer.push(byte_tokens()[0x80]) for _ in range(20))
    assert len(given) >= 16


def test_special_tokens_are_no_text_unless_asked_for() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("a")[1:], 2, *tokenizer.encode("b")[1:]]
    assert "".join(deltas_of(tokenizer, [0], ids)) == "ab"
    shown = Detokenizer(tokenizer, [0], skip_special_tokens=False)
    assert "".join(map(shown.push, ids)) + shown.flush() == "a<|turn|>b"


def test_the_first_token_keeps_its_space() -> None:
    """A decoder strips the space at the beginning of a text; an answer is not at the beginning."""
    tokenizer = byte_fallback()
    answer = tokenizer.encode("The")
    assert tokenizer.decode(answer) == "The"
    assert "".join(deltas_of(tokenizer, tokenizer.encode("a"), answer)) == " The"
    assert "".join(deltas_of(tokenizer, [], answer)) == "The"


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, bool]:
    """Character by character: the first stop string that is complete ends it; of two, the longer."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include else end - len(max(found, key=len))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 12)),
    include=st.booleans(),
)
def test_stop_strings_in_any_pieces(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """Ends at the same place however the text is cut; no delta shows what a stop string takes back."""
    expected, found = naive_stop(text, stops, include)
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    watcher, given = StopStrings(stops, include=include), ""
    for start, end in itertools.pairwise(places):
        given += watcher.push(text[start:end])
        assert expected.startswith(given)
        if watcher.found:
            break
    assert (watcher.found is not None) == found
    if not found:
        longest = max(len(stop) for stop in stops)
        assert len(expected) - len(given) < longest, "more is held back than could be a stop string"
        given += watcher.flush()
    assert given == expected and watcher.flush() == ""


def test_every_cut_of_a_text() -> None:
    text = "one two STOP three"
    for first in range(len(text)):
        for second in range(first, len(text)):
            watcher = StopStrings(["STOP", "STAY"])
            given = [watcher.push(piece) for piece in (text[:first], text[first:second]) if not watcher.found]
            given += [] if watcher.found else [watcher.push(text[second:])]
            assert watcher.found and "".join(given) == "one two "


# Chat templates


MESSAGES = [{"role": "user", "content": "Hi <b> é"}]


def render(source: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    return ChatTemplate(source).render(messages, {"bos_token": BEGIN, "eos_token": END})


def test_a_conversation_up_to_the_answer() -> None:
    files = MemoryCheckpoint({}, {}).tokenizer
    tokenizer = Tokenizer(files.tokenizer_json, {"bos_token": BEGIN}, files.chat_template)
    text = "user: Hi<|turn|>\nassistant: "
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == text
    ids = encode_prompt([{"role": "user", "content": "Hi"}], tokenizer, 100)
    assert ids == tokenizer.encode(text, add_special_tokens=False) and 2 in ids and ids[0] != 0


def test_a_missing_template_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no chat template") as refused:
        Tokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None).render_chat(MESSAGES)
    assert "--prompt" in str(refused.value)


def test_names_and_filters_of_templates() -> None:
    assert render("{{ bos_token }}{{ eos_token }}{{ pad_token }}") == BEGIN + END
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "Hi <b> é"}]'
    assert json.loads(render("{{ messages | tojson(indent=2) }}")) == MESSAGES
    assert render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}") == ""
    assert render("  {% if add_generation_prompt %}\nyes\n  {% endif %}") == "yes\n"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ messages[0].content * 2 ~ 2 ** 3 }}") == "Hi <b> éHi <b> é8"


def test_a_template_may_refuse() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ (''|attr('__class__')).x }}",
        "{{ ('{0.__class__.__mro__}').format(1).x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ none | dictsort }}",
        "{{ messages | nofilter }}",
        "{% for %}",
        "{{ raise_exception() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**10 }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_escapes_and_faults_are_errors_of_ours(source: str) -> None:
    with pytest.raises(EngineError, match="chat template") as refused:
        render(source)
    assert refused.value.exit_code == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
    ],
    ids=["silent", "long", "recursive"],
)
def test_an_endless_template_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_SECONDS", 0.2)
    with pytest.raises(EngineError, match="does not come to an end"):
        render(source)


def test_a_template_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(EngineError, match="too long"):
        ChatTemplate(" " * (chat_template.MAX_TEMPLATE_CHARS + 1))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300) | st.sampled_from([" " * 999, "\n" * 500, END * 99, "é" * 400, "x" * 5000]))
def test_the_least_number_of_tokens(text: str) -> None:
    """Told without tokenizing, and never more than there are."""
    tokenizer = byte_level()
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert tokenizer.least_tokens("x" * 10**6) > 10**6 / 100


@pytest.mark.parametrize("change", ["normalizer", "lstrip", "removed", "fallback", "a byte is missing", "model"])
def test_where_text_may_vanish_its_length_tells_nothing(change: str) -> None:
    form = json.loads(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json)
    match change:
        case "normalizer":
            form["normalizer"] = {"type": "Strip", "strip_left": True, "strip_right": True}
        case "lstrip":
            form["added_tokens"][0]["lstrip"] = True
        case "removed":
            split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
            form["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, form["pre_tokenizer"]]}
        case "fallback":
            assert byte_fallback().least_tokens("x" * 10**6) == 0
            return
        case "a byte is missing":
            form["model"]["vocab"] = {token: n for token, n in form["model"]["vocab"].items() if token != "Ċ"}
            form["model"]["merges"] = []
        case "model":
            form["model"] = {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "x"}
    assert Tokenizer(json.dumps(form).encode(), {}, None).least_tokens("x" * 10**6) == 0


def test_a_tokenizer_that_is_none_is_a_damaged_engine() -> None:
    with pytest.raises(CorruptEngineError, match="tokenizer"):
        Tokenizer(b"{}", {}, None)
