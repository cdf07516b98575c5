"""Calibration data: what is read, cut and chosen; what the model writes itself; and what is refused, by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginewright.builder.assembly import BuildConfig
from enginewright.builder.build import build_engine
from enginewright.builder.calibration import Samples, calibrate
from enginewright.builder.calibration.samples import MIN_TOKENS, SAMPLE_TOKENS
from enginewright.builder.progress import Silent
from enginewright.cli import main
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, UsageError
from enginewright.passes.quant import W8A8, Int4Gptq, Int8Sq, QuantConfig
from enginewright.runtime.api.llm import LLM
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.helpers.tiny import MemoryCheckpoint, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint() -> MemoryCheckpoint:
    return MemoryCheckpoint.tiny("llama", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: MemoryCheckpoint) -> Tokenizer:
    files = checkpoint.tokenizer
    return Tokenizer(files.tokenizer_json, files.config, files.chat_template)


def calibration(checkpoint: MemoryCheckpoint, folder: Path, data: object = None, size: int | None = None) -> Samples:
    config = BuildConfig(quant=Int8Sq(), calib_data=None if data is None else str(data), calib_size=size)
    made = calibrate(checkpoint, config, folder / "x.engine", Silent())
    assert made is not None
    return made


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
    return path


SENTENCE = "The quick brown fox jumps over the lazy dog, naïve and 東京. "


def test_every_form_of_a_line_is_the_text_that_the_model_would_see(
    checkpoint: MemoryCheckpoint, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": "Who are you, and why?"}, {"role": "assistant", "content": "A tiny model."}]
    path = write(
        tmp_path / "forms.jsonl",
        {"text": SENTENCE, "id": 7},
        {"prompt": SENTENCE, "completion": "No, it does not."},
        {"messages": messages, "prompt": "Who are you, and why?"},
    )
    made = calibration(checkpoint, tmp_path, path)
    assert [list(text) for text in made.texts] == [
        tokenizer.encode(SENTENCE),
        tokenizer.encode(f"{SENTENCE}No, it does not."),
        tokenizer.encode(
            "user: Who are you, and why?<|turn|>\nassistant: A tiny model.<|turn|>\n", add_special_tokens=False
        ),
    ]
    assert made.to_dict() | {"sha256": ""} == {
        "source": str(path),
        "samples": 3,
        "tokens": sum(len(text) for text in made.texts),
        "sha256": "",
    }


def test_samples_are_the_beginnings_of_texts_from_all_over_the_file(
    checkpoint: MemoryCheckpoint, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    texts = [f"{number} {SENTENCE * 9}" for number in range(11)]
    texts[0] = texts[4] = "short"
    path = write(tmp_path / "many.jsonl", *({"text": text} for text in texts))
    made = calibration(checkpoint, tmp_path, path, 3)
    # Of 11 in three parts (0-2, 3-6, 7-10) the first of each; 0 is too short, and 1 comes after the others.
    assert [list(text) for text in made.texts] == [tokenizer.encode(texts[n])[:SAMPLE_TOKENS] for n in (3, 7, 1)]
    assert {len(text) for text in made.texts} == {SAMPLE_TOKENS}
    everything = calibration(checkpoint, tmp_path, path, 50)
    assert len(everything.texts) == 9, "no text counts twice"
    assert made == calibration(checkpoint, tmp_path, path, 3) != everything


def test_plain_text_is_cut_at_the_ends_of_lines(
    checkpoint: MemoryCheckpoint, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = [f"{number}: {SENTENCE * 2}\n" for number in range(40)]
    (tmp_path / "text.md").write_text("\ufeff" + "".join(lines))
    made = calibration(checkpoint, tmp_path, tmp_path / "text.md", 100)
    beginnings = [tokenizer.encode("".join(lines[n:]))[:SAMPLE_TOKENS] for n in range(40)]
    assert [list(text) in beginnings for text in made.texts] == [True] * len(made.texts) and len(made.texts) > 5
    (tmp_path / "line.txt").write_text("".join(lines).replace("\n", " "))
    assert len(calibration(checkpoint, tmp_path, tmp_path / "line.txt", 100).texts) == pytest.approx(len(made.texts), 1)


def test_of_a_large_file_the_beginning_counts(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "x.jsonl", *({"text": f"{n} {SENTENCE}"} for n in range(9)), {"wrong": 1})
    monkeypatch.setattr("enginewright.builder.calibration.data.LIMIT_BYTES", path.stat().st_size - 2)
    assert len(calibration(checkpoint, tmp_path, path).texts) == 9
    one_line = tmp_path / "x.txt"
    one_line.write_text("東京" * 999)
    monkeypatch.setattr("enginewright.builder.calibration.data.LIMIT_BYTES", 1000)
    assert calibration(checkpoint, tmp_path, one_line).texts, "cut within a character"


def test_tokens_that_the_model_does_not_have(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": SENTENCE}, {"text": f"{SENTENCE} The capital of France is Paris."})
    texts = calibration(checkpoint, tmp_path, path).texts
    highest = max(texts[0])
    assert max(texts[1]) > highest
    smaller = replace(checkpoint, config={**checkpoint.config, "vocab_size": highest + 1})
    assert calibration(smaller, tmp_path, path).texts == texts[:1]


def test_a_template_that_prints_the_date_prints_the_same_on_every_day(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint.tokenizer
    dated = type(files)(files.tokenizer_json, files.config, "{{ strftime_now('%d %b %Y') }}" + str(files.chat_template))
    monkeypatch.setattr(MemoryCheckpoint, "tokenizer", dated)
    path = write(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": SENTENCE}]})
    (text,) = calibration(checkpoint, tmp_path, path).texts
    plain = Tokenizer(files.tokenizer_json, files.config, None)
    assert plain.decode(text).startswith("01 Jan 2026user: The quick")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", b'{"text": "a"}\n\n[1]\n', "x.jsonl, line 3: Expected `object`"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "a", "prompt": "b"}\n', 'x.jsonl, line 2: it has neither "text"'),
        ("x.jsonl", b'{"text": 5}\n', "line 1: Expected `str"),
        ("x.jsonl", b'{"text": "a"\n', "line 1: "),
        ("x.json", b'[\n{"text": "a"}\n]', "line 1: "),
        ("x.jsonl", b'{"messages": ["a"]}', "line 1: "),
        ("x.jsonl", b'{"messages": [{"role": "user"}]}', "line 1: its messages cannot be used: the model's chat"),
        (
            "x.jsonl",
            b'{"messages": [{"content": "a"}]}',
            "line 1: its messages cannot be used: the chat template failed",
        ),
        ("x.jsonl", b"\n  \n", "it is empty"),
        ("x.txt", b"", "it is empty"),
        ("x.txt", b" \n\t\n", "it is empty"),
        ("x.txt", b"too short", f"none of its texts has {MIN_TOKENS} tokens"),
        ("x.txt", "Größe".encode("latin-1") * 99, "byte 2 is not UTF-8"),
        ("x.txt", "Größe".encode("utf-16"), "it is binary"),
        ("x", b"\x7fELF\x00\x01", "it is binary"),
        ("x.parquet", b"PAR1", ".parquet: this form cannot be read"),
        ("x.jsonl.gz", b"\x1f\x8b", ".gz: this form"),
        ("x.txt", b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name_before_anything_is_written(
    checkpoint: MemoryCheckpoint, name: str, content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint.tokenizer
    strict = (
        "{{ raise_exception('no content') if not messages[0].content }}{{ messages[0].role + messages[0].content }}"
    )
    monkeypatch.setattr(MemoryCheckpoint, "tokenizer", type(files)(files.tokenizer_json, files.config, strict))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as refused:
        config = BuildConfig(quant=Int8Sq(), calib_data=str(tmp_path / name))
        build_engine(checkpoint, config, tmp_path / "x.engine")
    assert said in str(refused.value) and name in str(refused.value) and refused.value.exit_code == 2
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_messages_for_a_model_without_a_template(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint.tokenizer
    monkeypatch.setattr(MemoryCheckpoint, "tokenizer", type(files)(files.tokenizer_json, files.config, None))
    path = write(tmp_path / "x.jsonl", {"messages": [{"role": "user", "content": SENTENCE}]})
    with pytest.raises(UsageError, match="line 1: its messages cannot be used: this model has no chat template"):
        calibration(checkpoint, tmp_path, path)


@pytest.mark.parametrize("ref", ["no.jsonl", "data/no.txt", "/a/b/c", "no"])
def test_no_such_file(checkpoint: MemoryCheckpoint, ref: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "now.jsonl").touch()
    with pytest.raises(UsageError, match=f"there is no calibration data {ref}") as refused:
        calibration(checkpoint, tmp_path, ref)
    assert (ref == "no.jsonl") == ("Did you mean now.jsonl?" in refused.value.fix)
    with pytest.raises(UsageError, match="it is a folder"):
        calibration(checkpoint, tmp_path, tmp_path)


def test_a_method_that_needs_none_takes_none(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    assert calibrate(checkpoint, BuildConfig(quant=W8A8()), tmp_path / "x.engine", Silent()) is None
    for option in ({"calib_data": "x"}, {"calib_size": 8}):
        with pytest.raises(UsageError, match=r"--calib-.* means nothing to --quant w8a8"):
            build_engine(checkpoint, BuildConfig(quant=W8A8(), **option), tmp_path / "x.engine")
    assert list(tmp_path.iterdir()) == []
    folder = tiny_checkpoint(tmp_path, "llama")
    arguments = ["build", str(folder), "--calib-data", "x", "--calib_size", "1k", "-o", str(tmp_path / "x.engine")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and "--calib-data means nothing to --quant bf16" in result.stderr


def test_a_model_writes_its_own_text_alike_on_any_number_of_threads(
    checkpoint: MemoryCheckpoint, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", "1")
    one = calibration(checkpoint, tmp_path, size=35)
    monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", "3")
    assert calibration(checkpoint, tmp_path, size=35) == one
    assert {len(text) for text in one.texts} == {SAMPLE_TOKENS} and len(set(one.texts)) == 35
    assert one.source is None and list(tmp_path.iterdir()) == []
    texts = [tokenizer.decode(text) for text in one.texts]
    assert texts[2].startswith("The history of") and texts[1].startswith("user: What is the capital of France")
    fewer = calibration(checkpoint, tmp_path, size=7)
    assert fewer.texts == one.texts[:7], "a sample does not depend on how many there are"


def test_a_model_of_few_positions_writes_short_texts(tmp_path: Path) -> None:
    made = calibration(MemoryCheckpoint.tiny("qwen3", max_position_embeddings=41), tmp_path, size=5)
    assert [len(text) for text in made.texts] == [41] * 5


def test_the_engine_says_what_it_was_calibrated_on(checkpoint: MemoryCheckpoint, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"text": SENTENCE})
    recipes = []
    for data in (None, str(path)):
        config = BuildConfig(quant=Int8Sq(), calib_data=data, calib_size=3)
        report = build_engine(checkpoint, config, tmp_path / "x.engine")
        with EngineFile.open(tmp_path / "x.engine") as file:
            recipes.append(file.manifest.recipe["calibration"])
        assert report.calibration == recipes[-1] | {"source": data or "the model itself"}
    assert [recipe["source"] for recipe in recipes] == ["the model itself", "data"]
    assert recipes[1] == calibration(checkpoint, tmp_path, path, 3).recipe()["calibration"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["x.engine", "x.jsonl"]


CHOOSING = [Int4Gptq(), Int8Sq()]  # methods that read activations


@pytest.mark.parametrize("quant", CHOOSING[:1], ids=lambda quant: quant.name)
def test_the_bytes_do_not_depend_on_threads(
    quant: QuantConfig, checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for threads in ("1", "2"):
        monkeypatch.setenv("ENGINEWRIGHT_NUM_THREADS", threads)
        build_engine(checkpoint, BuildConfig(quant=quant, calib_size=3), tmp_path / threads)
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_whatever_fails_while_the_model_writes_nothing_is_left(
    checkpoint: MemoryCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise EngineError("no answers today")

    with pytest.raises(UsageError, match="there is no folder"):
        build_engine(checkpoint, BuildConfig(quant=Int8Sq()), tmp_path / "missing" / "x.engine")
    monkeypatch.setattr(LLM, "generate", failing)
    with pytest.raises(EngineError, match="no answers today"):
        build_engine(checkpoint, BuildConfig(quant=Int8Sq()), tmp_path / "x.engine")
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_logits_are_no_numbers_cannot_write(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama")
    checkpoint.stored["model.norm.weight"][:] = float("nan")
    with pytest.raises(EngineError, match="its logits are not numbers"):
        calibration(checkpoint, tmp_path, size=2)


def test_a_template_that_refuses_leaves_the_beginnings(
    checkpoint: MemoryCheckpoint, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = checkpoint.tokenizer
    for template in (None, "{{ raise_exception('no') }}"):
        monkeypatch.setattr(MemoryCheckpoint, "tokenizer", type(files)(files.tokenizer_json, files.config, template))
        made = calibration(checkpoint, tmp_path, size=6)
        assert [tokenizer.decode(text).startswith("The history of") for text in made.texts] == [0, 0, 1, 1, 0, 0]
