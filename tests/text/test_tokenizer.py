"""Text ↔ tokens: answers that come token by token, stop strings in any pieces, and chat templates from strangers."""

import gc
import itertools
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fcntl import ioctl
from functools import cache
from sys import byteorder
from termios import FIONREAD
from typing import IO, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from enginewright.errors import CorruptEngineError, EngineError, UsageError, WorkerLostError
from enginewright.runtime.core.prompts import PromptTooLongError, encode_prompt
from enginewright.runtime.text import chat_template
from enginewright.runtime.text.chat_template import ChatTemplate
from enginewright.runtime.text.detokenizer import Detokenizer, StopMatcher, StopStrings
from enginewright.runtime.text.tokenizer import Tokenizer
from enginewright.runtime.text.worker_process import WorkerProcess
from tests.helpers.serving import wait_until
from tests.helpers.tiny import BEGIN, END, MemoryCheckpoint
from tests.helpers.token_bytes import byte_level

BROKEN = "\ufffd"
TEXTS = ["Größe, naïve", "東京タワー", "🙂🇫🇷👩‍👩‍👧", "a b  c\n\td", " The quick", "מזל טוב", "x" * 40, "é" * 9, "𝔘𝔫"]  # noqa: RUF001


@cache
def byte_fallback() -> Tokenizer:
    """A tokenizer like Llama 2's and Gemma's: pieces of text that begin with ▁, and bytes for all other text."""
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
    """The text that the answer adds to the prompt's."""
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
    """Random tokens: where they are a text, the deltas are that text, and elsewhere nothing fails."""
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
    """Bytes that can no longer become a character are given soon, not at the end."""
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
    """A decoder strips the space at the start of a text, but a completion is not at the start."""
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
    """A text ends at the same position however it is split, and no delta shows a part of a stop string."""
    expected, found = naive_stop(text, stops, include)
    places = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    watcher, given = StopStrings(StopMatcher(stops), include=include), ""
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
            watcher = StopStrings(StopMatcher(["STOP", "STAY"]))
            given = [watcher.push(piece) for piece in (text[:first], text[first:second]) if not watcher.found]
            given += [] if watcher.found else [watcher.push(text[second:])]
            assert watcher.found and "".join(given) == "one two "


def test_stop_strings_take_one_step_a_character() -> None:
    """Whatever the stop strings are: here each character goes on with all of them, and then with none."""
    stops = ["a" * length + "b" for length in range(1, 64)]
    matcher = StopMatcher(stops)
    steps = 0

    class Counting(dict[str, int]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal steps
            steps += 1
            return super().get(key, default)

    matcher._next = [Counting(following) for following in matcher._next]
    watcher = StopStrings(matcher)
    text = ("a" * 63 + "c") * 100
    assert "".join(map(watcher.push, text)) + watcher.flush() == text
    assert steps <= 2 * len(text)


# Under transformers' names


@pytest.mark.parametrize("make", TOKENIZERS, ids=lambda make: make.__name__)
def test_transformers_says_the_same(make: Callable[[], Tokenizer]) -> None:
    source = MemoryCheckpoint({}, {}).tokenizer.chat_template
    names = (
        {"bos_token": BEGIN, "eos_token": END}
        if make is byte_level
        else {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )
    raw = RawTokenizer.from_str(make()._tokenizer.to_str())
    raw.add_tokens(["<more>"])
    ours = Tokenizer(raw.to_str().encode(), names, source)
    theirs = PreTrainedTokenizerFast(tokenizer_object=raw, clean_up_tokenization_spaces=False, **names)
    theirs.chat_template = source
    for name in ("bos_token", "bos_token_id", "eos_token", "eos_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs) == ours.vocab_size + 1
    for text in (TEXTS[0], "", TEXTS[:3], [""]):
        for special in (True, False):
            found, expected = ours(text, add_special_tokens=special), theirs(text, add_special_tokens=special)
            assert found.input_ids == found["input_ids"] == expected["input_ids"]
            assert found.attention_mask == found["attention_mask"] == expected["attention_mask"]
    for tokens in ("a", "no such token", names["eos_token"], ["a", "no such token"], []):
        assert ours.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    for ids in (5, [5], [5, 1], np.array([5, 6])):
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    for options in ({}, {"add_generation_prompt": True}, {"tools": None}):
        ids = ours.apply_chat_template(MESSAGES, **options)
        assert ids == dict(theirs.apply_chat_template(MESSAGES, **options))
        for form in ({"tokenize": False}, {"return_dict": False}):
            found = ours.apply_chat_template(MESSAGES, **form, **options)
            assert found == theirs.apply_chat_template(MESSAGES, **form, **options)


def test_names_of_the_callers_template() -> None:
    source = "{{ messages[0].role }}{{ effort }}{{ bos_token }}"
    tokenizer = Tokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {"bos_token": BEGIN}, source)
    message = [{"role": "tool", "content": "x"}]
    assert tokenizer.apply_chat_template(message, tokenize=False, effort="low") == f"toollow{BEGIN}"
    assert tokenizer.render_chat(message, template_kwargs={"effort": "low"}) == f"toollow{BEGIN}"
    for name in ("chat_template", "tools", "documents", "bos_token", "eos_token", "unk_token", "pad_token"):
        with pytest.raises(UsageError, match=f"cannot set {name}"):
            tokenizer.apply_chat_template(message, **{name: "x"})
        with pytest.raises(UsageError, match=f"cannot set {name}"):
            tokenizer.render_chat(message, template_kwargs={name: None})
    for name in ("messages", "add_generation_prompt", "tokenize"):
        with pytest.raises(UsageError, match=f"cannot set {name}"):
            tokenizer.render_chat(message, template_kwargs={name: None})


def test_wrong_types_are_usage_errors() -> None:
    tokenizer = byte_level()
    for text in (5, None, b"a", ["a", 5], {"a": 1}):
        with pytest.raises(UsageError, match="it must be a text or a list of texts"):
            tokenizer(text)  # type: ignore[arg-type]
    for conversation in ("hi", ["hi"], {"role": "user"}, None, 5):
        with pytest.raises(UsageError, match="a list of messages"):
            tokenizer.apply_chat_template(conversation)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="token_type_ids"):
        _ = tokenizer("a").token_type_ids


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
def test_an_endless_template_is_ended(source: str) -> None:
    with pytest.raises(EngineError, match="the chat template does not end"):
        render(source)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ ((((3 ** 64) ** 64) ** 64) ** 64) % 7 }}", "CPU time"),
        ("{{ messages[0].content.center(3000000000) }}", "memory"),
        ("{{ range(60000) | list | sum(start=[]) }}", ""),
        ("{{ [range(9999) | list] * 9999 | sum(start=[]) }}", ""),
    ],
    ids=["power", "center", "no sum", "sum"],
)
def test_a_template_is_stopped_within_one_call(source: str, why: str) -> None:
    """The time and the memory of this process are its own meanwhile."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.thread_time()
    with pytest.raises(EngineError, match=f"chat template.*{why}"):
        render(source)
    assert time.thread_time() - start < 0.5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 64 << 10


def test_a_template_that_was_stopped_renders_the_next_conversation() -> None:
    power = "(((messages | length + 2) ** 64) ** 64) ** 64"
    source = f"{{% if messages[0].content == 'loop' %}}{{{{ ({power}) ** 64 % 7 }}}}{{% endif %}}done"
    template = ChatTemplate(source)
    process = template._worker._process
    for _ in range(2):
        with pytest.raises(EngineError, match="CPU time"):
            template.render([{"role": "user", "content": "loop"}], {})
        assert template.render([{"role": "user", "content": "Hi"}], {}) == "done"
    assert template._worker._process is not process and process.returncode == -signal.SIGPROF


def _num_unread(pipe: IO[bytes]) -> int:
    """Number of bytes in a pipe that nobody has read yet."""
    return int.from_bytes(ioctl(pipe, FIONREAD, bytes(4)), byteorder)


def test_a_template_whose_process_is_killed_is_rendered_by_another_one(caplog: pytest.LogCaptureFixture) -> None:
    """A killed process is no fault of the template, nor of the conversation, so another process renders it."""
    template = ChatTemplate("done")
    process = template._worker._process
    os.kill(process.pid, signal.SIGSTOP)  # so that it is under way when it is killed
    with ThreadPoolExecutor(1) as pool:
        text = pool.submit(template.render, MESSAGES, {})
        wait_until(lambda: _num_unread(process.stdin) > 0)  # a process that ends before that is replaced without a word
        os.kill(process.pid, signal.SIGKILL)
        assert text.result() == "done"
    assert template._worker._process is not process and "was ended by signal 9, and is started again" in caplog.text


def test_a_template_whose_processes_are_all_killed_is_an_error_of_the_server() -> None:
    template = ChatTemplate("done")
    template._worker = WorkerProcess("tests.helpers.killed_worker")
    with pytest.raises(WorkerLostError, match="was ended by signal 9"):
        template.render(MESSAGES, {})


def test_the_process_of_a_template_ends_with_it() -> None:
    template = ChatTemplate("x")
    process = template._worker._process
    del template
    gc.collect()
    assert process.returncode is not None


def test_variables_of_a_template() -> None:
    template = ChatTemplate("{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}")
    assert template.render(MESSAGES, {}, template_kwargs={"enable_thinking": False}) == "<think></think>"
    assert template.render(MESSAGES, {}) == ""
    with pytest.raises(UsageError, match="cannot set bos_token, messages"):
        template.render(MESSAGES, {}, template_kwargs={"messages": [], "bos_token": "x"})


@pytest.mark.parametrize("content", [b"bytes", {1, 2}, object()])
def test_a_message_holds_what_json_does(content: object) -> None:
    with pytest.raises(UsageError, match="that JSON does not have"):
        ChatTemplate("x").render([{"role": "user", "content": content}], {})


def test_a_template_beyond_the_limit_is_not_read() -> None:
    with pytest.raises(EngineError, match="too long"):
        ChatTemplate(" " * (chat_template.MAX_TEMPLATE_CHARS + 1))


@pytest.mark.parametrize("text", ["", "x", "word " * 9, "é" * 40, END * 7, " " * 30])
def test_a_prompt_up_to_the_limit_is_encoded_whole(text: str) -> None:
    """Whatever it is made of, a prompt that fits is not refused by the length of its text."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    assert encode_prompt(text, tokenizer, len(ids) + 1) == ids


class CountingTokenizer(Tokenizer):
    encoded_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("prompt", ["1" * 10**6, "word " * 10**6], ids=["short tokens", "words"])
def test_a_prompt_beyond_the_limit_is_refused_by_a_piece_of_it(prompt: str) -> None:
    tokenizer = CountingTokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None)
    limit = len(prompt) // tokenizer.longest_token_chars + 1  # so that its characters alone do not tell
    with pytest.raises(PromptTooLongError, match=f"maximum context length is {limit} tokens"):
        encode_prompt(prompt, tokenizer, limit)
    assert tokenizer.encoded_chars < len(prompt) / 2


def test_a_prompt_of_too_many_characters_is_not_encoded() -> None:
    tokenizer = CountingTokenizer(MemoryCheckpoint({}, {}).tokenizer.tokenizer_json, {}, None)
    with pytest.raises(PromptTooLongError, match=r"5001 characters.*maximum context length is 10 tokens"):
        encode_prompt("x" * 5001, tokenizer, 10)
    assert tokenizer.encoded_chars == 0


def test_other_threads_run_while_a_text_is_encoded() -> None:
    """Python's lock is free meanwhile: else this thread would count nothing until the text is done."""
    tokenizer = byte_level()
    for _ in range(20):  # a busy machine may not run this thread meanwhile
        done = threading.Event()
        thread = threading.Thread(target=lambda done=done: (tokenizer.encode("word " * 200_000), done.set()))
        thread.start()
        count = 0
        while not done.is_set():
            count += 1
            time.sleep(0.001)
        thread.join()
        if count > 20:
            break
    assert count > 20


def test_a_tokenizer_that_is_none_is_a_damaged_engine() -> None:
    with pytest.raises(CorruptEngineError, match="tokenizer"):
        Tokenizer(b"{}", {}, None)
