"""`engine rebuild`: an engine is made again from its inputs, and changes of these are reported."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from enginewright.builder.progress import Silent
from enginewright.builder.rebuild import rebuild
from enginewright.engine_file import EngineFile
from tests.helpers.command import run_engine
from tests.helpers.eagle import with_eagle
from tests.helpers.engines import copied
from tests.helpers.quantized import tiny_case
from tests.helpers.tiny import tiny_checkpoint
from tests.helpers.tiny_gguf import tiny_model as gguf_model
from tests.helpers.tiny_gguf import write_model

WEIGHTS = "tiny-llama/model.safetensors"


def built(checkpoint: Path, engine: Path, *options: object) -> Path:
    result = run_engine("build", checkpoint, "-o", engine, *(options or ("--gate", "off")))
    assert result.exit_code == 0, result.stderr
    return engine


def refused(code: int, *arguments: object) -> str:
    """The error of a command that fails without a traceback."""
    result = run_engine("rebuild", *arguments)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), (result.output, result.exception)
    return " ".join(result.stderr.split())


def remade(*arguments: object) -> dict[str, Any]:
    """A report on the same bytes."""
    result = run_engine("rebuild", *arguments, "--json")
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    assert report["same"] and not report["recipe"] and not report["sources"] and not report["sections"]
    return report


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint and its engine."""
    folder = tmp_path_factory.mktemp("rebuild")
    built(tiny_checkpoint(folder, "llama"), folder / "x.engine", "--quant", "int8-wo", "--gate", "off")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of the made folder for each test."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_the_same(folder: Path) -> None:
    result = run_engine("rebuild", folder / "x.engine")
    assert result.exit_code == 0
    assert "content   the same: sha256:" in result.stdout and "file      the same, byte for byte" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["tiny-llama", "x.engine"], "nothing is left"
    report = remade(folder / "x.engine", "-o", folder / "y.engine")
    assert report["same_bytes"] and report["b"] == str(folder / "y.engine")
    assert (folder / "y.engine").read_bytes() == (folder / "x.engine").read_bytes()


def test_a_checkpoint_elsewhere_and_of_another_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine says what its model was called; the folder may be called otherwise."""
    (folder / "tiny-llama").rename(folder / "moved")
    said = refused(2, folder / "x.engine")
    assert "the checkpoint tiny-llama was not found" in said and "Name it with --model" in said
    assert remade(folder / "x.engine", "--model", folder / "moved")["same_bytes"]
    monkeypatch.chdir(folder / "moved")
    assert remade(folder / "x.engine")["same_bytes"], "its files are here"


def test_a_checkpoint_in_the_cache_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder / "hub"
    for revision in "a", "b":
        snapshot = cache / f"models--org--tiny-llama/snapshots/{revision}"
        shutil.copytree(folder / "tiny-llama", snapshot)
    config = cache / "models--org--tiny-llama/snapshots/a/config.json"
    config.write_text(config.read_text() + " ")  # another revision
    shutil.rmtree(folder / "tiny-llama")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    assert remade(folder / "x.engine")["same_bytes"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_input_that_is_missing(folder: Path, name: str) -> None:
    (folder / "tiny-llama" / name).unlink()
    assert "was not found" in refused(2, folder / "x.engine")
    said = refused(2, folder / "x.engine", "--model", folder / "tiny-llama")
    assert f"{folder / 'tiny-llama'} is not what the engine was built from: {name} is missing" in said


def test_inputs_that_have_changed(folder: Path) -> None:
    config = folder / "tiny-llama/config.json"
    config.write_text(config.read_text() + "\n")
    weights = folder / "tiny-llama/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (folder / "tiny-llama/chat_template.jinja").write_text("{{ messages[0].content }}")
    said = refused(2, folder / "x.engine")
    assert "chat_template.jinja is new" in said
    assert "config.json has changed (sha256 " in said and "model.safetensors has changed" in said
    assert "tokenizer.json" not in said


def test_an_engine_that_is_not_of_its_inputs(folder: Path) -> None:
    """The engine's hashes are right, and its manifest names another one's inputs, so that only a build can tell."""
    copied(folder / "x.engine", folder / "y.engine", {"chat_template": b"{{ 'do as I say' }}"})
    result = run_engine("rebuild", folder / "y.engine")
    assert result.exit_code == 1 and "content   different" in result.stdout
    assert "chat_template: nbytes" in result.stdout and "file      different" in result.stdout


def test_evidence_alone(folder: Path) -> None:
    with EngineFile.open(folder / "x.engine") as file:
        goldens = json.loads(file.read_section("goldens"))
    goldens["entries"] = goldens["entries"][:1]
    changed = copied(folder / "x.engine", folder / "y.engine", {"goldens": json.dumps(goldens).encode()})
    result = run_engine("rebuild", changed)
    assert result.exit_code == 0 and "file      differs in its evidence only" in result.stdout


def test_a_gate_is_asked_for_the_same(folder: Path) -> None:
    """The gate's level and limits are in the engine; without evidence it is left out, and the content is the same."""
    engine = built(folder / "tiny-llama", folder / "y.engine", "--quant", "w8a8", "--gate", "quick,kl=0.7,layer=0.5")
    assert remade(engine)["same_bytes"] is True
    report = remade(engine, "--no-evidence")
    assert report["same_bytes"] is None and report["evidence"] == report["sizes"] == {}


def test_settings_of_methods_and_limits(folder: Path) -> None:
    for number, options in enumerate(
        (
            ("--quant", "int4-rtn", "--group-size", "64", "--zero-points", "--kv-cache-dtype", "int8"),
            ("--max-seq-len", "64", "--max-batch-size", "3"),
        )
    ):
        engine = built(folder / "tiny-llama", folder / f"{number}.engine", "--gate", "off", *options)
        assert remade(engine)["same_bytes"], options


def test_a_gguf_file(tmp_path: Path) -> None:
    """A GGUF file is in the manifest by its own name, and names its engine without the quantization."""
    path = write_model(tmp_path / "tiny-Q8_0.gguf", "llama", gguf_model("llama")).finish()
    engine = built(path, tmp_path / "x.engine", "--gate", "off")
    assert remade(engine)["same_bytes"] and remade(engine, "--model", path)["same_bytes"]
    path.write_bytes(path.read_bytes() + b"\0")
    assert "tiny-Q8_0.gguf has changed" in refused(2, engine)


def test_a_checkpoint_that_is_quantized_already(folder: Path) -> None:
    """The checkpoint's format has the name of a method of ours, which must not be applied again."""
    tiny = tiny_case("fp8, blocks")
    (folder / "tiny-llama/config.json").write_text(json.dumps(dict(tiny.checkpoint.config)))
    save_file({name: value.contiguous() for name, value in tiny.checkpoint.stored.items()}, folder / WEIGHTS)
    engine = built(folder / "tiny-llama", folder / "y.engine", "--gate", "off")
    with EngineFile.open(engine) as file:
        assert file.manifest.recipe["quant"] == "fp8"
    assert remade(engine)["same_bytes"]


def test_calibration(folder: Path) -> None:
    """Rebuilds are right with our own texts, and with data that has to be named and has fewer texts than wanted."""
    calibrated = ("--quant", "int8-sq", "--gate", "off")
    own = built(folder / "tiny-llama", folder / "own.engine", *calibrated, "--calib-size", "2")
    assert remade(own)["same_bytes"]
    data = folder / "texts.jsonl"
    assert "was calibrated on no data" in refused(2, own, "--calib-data", data)
    texts = ["Too", "short", *(f"{number} is a number, and this is a text about it. " * 3 for number in range(4))]
    lines = [json.dumps({"text": text}) for text in texts]
    data.write_text("\n".join(lines))
    engine = built(folder / "tiny-llama", folder / "data.engine", *calibrated, "--calib-data", data)
    assert "Name it with --calib-data" in refused(2, engine)
    assert remade(engine, "--calib-data", data)["same_bytes"]
    data.write_text("\n".join(lines).replace("number", "figure"))
    assert f"{data} is not what the engine was calibrated on" in refused(2, engine, "--calib-data", data)


def test_a_draft(folder: Path) -> None:
    (folder / "draft").mkdir()
    draft = tiny_checkpoint(folder / "draft", "llama", num_hidden_layers=1)
    options = ["--gate", "off", "--draft", draft, "--draft-quant", "int8-wo"]
    engine = built(folder / "tiny-llama", folder / "y.engine", *options)
    assert remade(engine, "--draft", draft)["same_bytes"]
    said = refused(2, engine, "--draft", folder / "tiny-llama")
    assert "config.json has changed" in said and "with --draft" in said
    assert "--draft means nothing here" in refused(2, folder / "x.engine", "--draft", draft)


def test_a_head(folder: Path) -> None:
    """A head's folder may have another name by now."""
    head = with_eagle("llama", layers=(1, 3))
    draft = head.store(folder / "head", {}, {})
    engine = built(folder / "tiny-llama", folder / "eagle.engine", "--gate", "off", "--draft", draft)
    assert remade(engine)["same_bytes"]
    moved = draft.rename(folder / "moved")
    assert remade(engine, "--draft", moved)["same_bytes"]
    head.store(folder / "other", {"rms_norm_eps": 1e-6}, {})
    said = refused(2, engine, "--draft", folder / "other")
    assert "config.json has changed" in said and "with --draft" in said


@pytest.mark.parametrize("draft", ["skip:1", "auto"])
def test_what_draft_tokens_without_another_model(folder: Path, draft: str) -> None:
    engine = built(folder / "tiny-llama", folder / f"{draft[:4]}.engine", "--gate", "off", "--draft", draft)
    assert remade(engine)["same_bytes"]


@pytest.mark.parametrize(
    "options",
    [("w8a8", "--rotate"), ("int4-rtn", "--recover", "3"), ("int4-rtn", "--recover", "3", "--calib-size", "2")],
    ids=" ".join,
)
def test_a_model_that_was_changed_before(folder: Path, options: tuple[str, ...]) -> None:
    engine = built(folder / "tiny-llama", folder / "r.engine", "--gate", "off", "--quant", *options)
    assert remade(engine)["same_bytes"]


def test_what_cannot_be_made_again(folder: Path) -> None:
    engine = folder / "x.engine"
    other = copied(engine, folder / "y.engine", {}, builder_version="0.0.1")
    said = refused(2, other)
    assert "was built by enginewright 0.0.1" in said and "pip install 'enginewright[build]==0.0.1'" in said
    assert "its manifest names no source files" in refused(2, copied(engine, folder / "z.engine", {}, sources={}))
    assert "there is no such file" in refused(2, folder / "nowhere.engine")
    assert "there is no folder" in refused(2, engine, "-o", folder / "a/b")
    assert "is the engine itself" in refused(2, engine, "-o", engine)
    data = bytearray(engine.read_bytes())
    data[len(data) // 2] ^= 1
    engine.write_bytes(data)
    assert "is damaged" in refused(5, engine)


def test_as_a_library(folder: Path) -> None:
    assert rebuild(folder / "x.engine", Silent())["same"]
