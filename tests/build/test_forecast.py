"""`engine build --dry-run`: it says beforehand what the build then does, reads no weight, and touches nothing."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from enginewright.builder.assembly import BuildConfig
from enginewright.builder.build import build_engine
from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.forecast import BASE_BYTES, Forecast, forecast
from enginewright.builder.gate import GateConfig
from enginewright.builder.progress import Silent
from enginewright.engine_file import EngineFile
from enginewright.errors import EngineError, UsageError
from enginewright.new_file import NewFile
from enginewright.passes.quant import METHODS, W8A8, Fp8, Int4Gptq, Int4Rtn, Int8Sq, QuantConfig
from enginewright.passes.quant.auto import Auto
from tests.helpers import tiny_gguf
from tests.helpers.command import run_engine
from tests.helpers.tiny import OF_KERNELS, MemoryCheckpoint


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


EXACT = [method() for method in METHODS if method is not Auto]  # whose sizes are predicted, and no more
CASES = [("llama", quant) for quant in (*EXACT, Int8Sq(activation_scheme="static"))] + [
    (family, Int4Rtn()) for family in OF_KERNELS if family != "llama"
]

SOME = [("llama", quant) for quant in EXACT if quant.name in ("bf16", "int4-awq", "int4-gptq")]
SOME += [case for case in CASES if case[0] in ("gemma3_text", "gpt_oss")]


def name_of(case: object) -> str:
    return str(getattr(case, "name", case))


@pytest.mark.parametrize(("family", "quant"), SOME, ids=name_of)
def test_a_build_does_what_was_said(family: str, quant: QuantConfig, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny(family)
    said = forecast(checkpoint, BuildConfig(quant=quant, gate=None), tmp_path / "x.engine", Silent())
    assert checkpoint.reads == [] and list(tmp_path.iterdir()) == []
    done = build_engine(checkpoint, BuildConfig(quant=quant, gate=None), tmp_path / "x.engine")
    assert 0 <= done.size_bytes - said.file_bytes < 8192, "goldens and the quality report come on top"
    assert sum(said.weight_bytes.values()) == done.weight_bytes
    assert (said.kv_bytes_per_token, said.max_seq_len) == (done.kv_bytes_per_token, done.max_seq_len)
    assert said.rewrites == {name: done.rewrites[name] for name in said.rewrites}
    assert set(done.rewrites) - set(said.rewrites) <= ({"smooth", "choose_codes"} if quant.calibrated else set())
    with EngineFile.open(tmp_path / "x.engine") as file:
        steps = json.loads(file.read_section("plan/cpu"))["calls"]
        assert sum(said.kernels["cpu"].values()) == len(steps) and {step["kernel"] for step in steps} == set(
            said.kernels["cpu"]
        )
        assert said.recipe == {key: value for key, value in file.manifest.recipe.items() if key != "calibration"}
        assert set(said.weight_bytes) == {form.dtype for form in file.sections.values() if form.dtype}
    assert (said.calibration is None) == (done.calibration is None) == (not quant.calibrated)
    if said.calibration is not None and done.calibration is not None:
        assert said.calibration == {key: done.calibration[key] for key in said.calibration}


def test_the_command_says_it_and_touches_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(checkpoint), contents(tmp_path)
    result = run_engine("build", checkpoint, "--quant", "w8a8", "--dry_run")
    assert result.exit_code == 0 and result.stdout == ""
    for piece in ("tiny-llama-w8a8.engine", " gemm_w8a8@1", "KiB i8", "on that disk", "in memory", "skipped  by"):
        assert piece in result.stderr
    report = json.loads(run_engine("build", checkpoint, "--quant", "w8a8", "--dry-run", "--json").stdout)
    assert report["targets"] == ["cpu"] and report["kernels"]["cpu"]["gemm_w8a8@1"] == 13
    assert report["disk_bytes"] == report["file_bytes"] and report["free_disk_bytes"] > 0
    assert report["refusals"]["round_in_producer"][0].endswith(" cannot quantize.")
    assert (contents(checkpoint), contents(tmp_path)) == before
    assert json.loads(run_engine("build", checkpoint, "--quant", "w8a8", "--json").stdout)["path"] == report["output"]


def test_what_a_build_refuses_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.engine"
    for code, said, arguments in (
        (2, "512 positions", (checkpoint, "--max-seq-len", "513")),
        (2, "--calib-size means nothing", (checkpoint, "--calib-size", "3")),
        (2, "there is no folder", (checkpoint, "-o", tmp_path / "no" / "x.engine")),
        (2, "--dump-graphs", (checkpoint, "--dump-graphs", tmp_path / "graphs")),
    ):
        result = run_engine("build", "--dry-run", "-o", path, *arguments)
        assert result.exit_code == code and said in result.stderr, result.output
    odd = tmp_path / "odd"
    shutil.copytree(checkpoint, odd)
    (odd / "config.json").write_text((odd / "config.json").read_text().replace("{", '{"clip_qkv": 5,', 1))
    result = run_engine("build", "--dry-run", odd)
    assert result.exit_code == 3 and "clip_qkv = 5" in result.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd"]


def test_a_device_or_a_pipe_is_not_replaced(checkpoint: Path, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for dry in ((), ("--dry-run",)):
        result = run_engine("build", checkpoint, "-o", pipe, "--gate", "off", *dry)
        assert result.exit_code == 2 and "it is there, and is no file" in result.stderr
    assert pipe.is_fifo()


def test_calibration_data_is_looked_at(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    opened = open_checkpoint(str(checkpoint))

    def said(data: str | None) -> Forecast:
        config = BuildConfig(quant=Int8Sq(), calib_data=data, calib_size=4)
        return forecast(opened, config, tmp_path / "x.engine", Silent())

    here, remote, own = said("x.txt"), said("owner/Texts"), said(None)
    assert here.calibration is not None and len(here.calibration["sha256"]) == 64
    assert remote.calibration == {"source": "owner/Texts", "samples": 4, "tokens": 512}, "nothing is fetched"
    assert own.calibration == {"source": "the model itself", "samples": 4, "tokens": 512}
    assert own.memory_bytes > BASE_BYTES and own.disk_bytes >= own.file_bytes
    with pytest.raises(UsageError, match=r"there is no calibration data y\.txt"):
        said("y.txt")


def test_the_draft_and_waiting_codes_take_their_space_on_the_disk(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama", tie_word_embeddings=False)

    def said(quant: QuantConfig) -> Forecast:
        return forecast(checkpoint, BuildConfig(quant=quant), tmp_path / "x.engine", Silent())

    rounded, chosen, smoothed, draft = map(said, (Int4Rtn(), Int4Gptq(), Int8Sq(), W8A8()))
    assert rounded.disk_bytes == rounded.file_bytes == chosen.file_bytes < draft.file_bytes
    assert draft.file_bytes < smoothed.disk_bytes == smoothed.file_bytes, "adapters need its factors"
    codes = sum(rows * columns for rows, columns in 3 * [(96, 48), (48, 48), (148, 48), (48, 74)])
    assert codes < chosen.disk_bytes - chosen.file_bytes < 2 * codes


@pytest.mark.parametrize(("activations", "kernel"), [("fp8", "gemm_fp8a8@1"), ("bf16", "gemm_fp8a16@1")])
def test_each_family_of_targets_has_its_kernels(activations: str, kernel: str, tmp_path: Path) -> None:
    wanted = BuildConfig(quant=Fp8(fp8_activations=activations), targets=("cpu", "cuda:sm_90a"))
    said = forecast(MemoryCheckpoint.tiny("llama"), wanted, tmp_path / "x.engine", Silent())
    products = {family: {name for name in kernels if "fp8" in name} for family, kernels in said.kernels.items()}
    assert products == {"cpu": {"gemm_fp8a16@1"}, "cuda": {kernel}}
    assert said.recipe["fp8_activations"] == activations


@pytest.mark.parametrize("bits", ["5.1", "15"])
def test_mixed_formats_are_predicted_by_their_size(bits: str, tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint.tiny("llama", hidden_size=96, intermediate_size=160)
    build = BuildConfig(quant=Auto(bits=bits), calib_size=4, gate=None)
    said = forecast(checkpoint, build, tmp_path / "x.engine", Silent())
    assert checkpoint.reads == []
    done = build_engine(checkpoint, build, tmp_path / "x.engine")
    assert sum(said.weight_bytes.values()) == pytest.approx(done.weight_bytes, rel=0.03)
    assert said.disk_bytes > done.size_bytes


class Phases(Silent):
    def __init__(self) -> None:
        self.begun: list[str] = []

    def phase(self, name: str, total: int = 0) -> None:
        self.begun.append(name)


def test_what_a_plan_tells_is_refused_before_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, path, phases = MemoryCheckpoint.tiny("llama", tie_word_embeddings=True), tmp_path / "x.engine", Phases()
    for build, said in (
        (BuildConfig(quant=Auto(bits="4.01")), r"(?s)--bits 4\.01 .*takes 4\.\d+ bits a weight.*Use 4\.\d\d or more"),
        (BuildConfig(quant=Int8Sq(), max_seq_len=513), "512 positions"),
        (BuildConfig(quant=Int4Gptq(quantize_lm_head=True)), "--quantize-lm-head is not possible"),
    ):
        with pytest.raises(UsageError, match=said):
            forecast(checkpoint, build, path, Silent())
        with pytest.raises(UsageError, match=said):
            build_engine(checkpoint, build, path, phases)
    monkeypatch.setattr(NewFile, "free_bytes", lambda file: 1000)
    with pytest.raises(EngineError, match="no space"):
        build_engine(checkpoint, BuildConfig(quant=Int8Sq()), path, phases)
    assert set(phases.begun) == {"check the plan"}
    assert checkpoint.reads == [] and list(tmp_path.iterdir()) == []


def test_tensors_that_are_dequantized_take_memory(tmp_path: Path) -> None:
    path = tiny_gguf.write_model(tmp_path / "x.gguf", "llama", tiny_gguf.tiny_model("llama")).finish()
    config = BuildConfig(gate=None)
    said = forecast(open_checkpoint(str(path)), config, tmp_path / "x.engine", Silent())
    assert said.memory_bytes == BASE_BYTES + 4 * 108 * 54
    gated = forecast(open_checkpoint(str(path)), replace(config, gate=GateConfig()), tmp_path / "x.engine", Silent())
    assert gated.memory_bytes > said.memory_bytes
