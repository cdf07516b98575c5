"""Engines with code for GPUs: opened for one, shown by `engine inspect`, and refused where nothing runs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from enginewright.cli import main
from enginewright.code import CompiledKernel, write_code
from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError, NoCodeForMachineError
from enginewright.runtime.count import format_bytes
from enginewright.runtime.engine import Engine
from tests.helpers.engines import built, copied
from tests.helpers.tiny import tiny_checkpoint

CODE = {
    "code/sm_80": write_code({"rope@1": (CompiledKernel("_Zrope"), b"for 8.0")}),
    "code/sm_90a": write_code(
        {"rope@1": (CompiledKernel("_Zrope"), b"for 9.0"), "gemm@1": (CompiledKernel("gemm"), b"more")}
    ),
    "code/ptx": write_code({"rope@1": (CompiledKernel("_Zrope"), b".version 9.0")}),
}
TARGETS = ("cuda:sm_80", "cuda:sm_90a", "cuda:ptx")


@pytest.fixture(scope="module")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama"), "bf16")


def gpu_engine(cpu: Path, path: Path, *, targets: tuple[str, ...] = TARGETS, **sections: bytes) -> Path:
    with EngineFile.open(cpu) as file:
        plan = file.read_section("plan/cpu")
    return copied(cpu, path, {"plan/cuda": plan, **CODE, **sections}, targets=targets)


@pytest.fixture(scope="module")
def both(cpu: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_engine(cpu, tmp_path_factory.mktemp("both") / "both.engine", targets=("cpu", *TARGETS))


@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 6), b"for 8.0"), ((9, 0), b"for 9.0"), ((12, 0), b".version 9.0")]
)
def test_the_code_that_fits_is_chosen(both: Path, capability: tuple[int, int], expected: bytes) -> None:
    with Engine.open(both, "cuda") as engine:
        archive = engine.code(capability)
        assert archive.cubin("rope@1") == expected
        assert archive.launches["rope@1"].symbol == "_Zrope"


def test_no_code_for_a_gpu(both: Path) -> None:
    with Engine.open(both, "cuda") as engine, pytest.raises(NoCodeForMachineError) as caught:
        engine.code((7, 5))
    assert f"{both} has no code for this GPU: its compute capability is 7.5" in str(caught.value)
    assert "sm_80, sm_90a, ptx" in str(caught.value)


def test_no_code_for_gpus_at_all(cpu: Path) -> None:
    with pytest.raises(NoCodeForMachineError, match=r"it was built for cpu\n.*--target cuda:sm_80 or cuda:sm_86"):
        Engine.open(cpu, "cuda")


def test_an_engine_for_gpus_alone(cpu: Path, tmp_path: Path) -> None:
    path = gpu_engine(cpu, tmp_path / "gpu.engine")
    with pytest.raises(NoCodeForMachineError, match=r"cuda:sm_90a, cuda:ptx\nBuild it again with --target cpu\."):
        Engine.open(path)
    with Engine.open(path, "cuda") as engine:
        assert engine.plan.vocab_size


def test_code_that_is_missing_or_damaged(cpu: Path, tmp_path: Path) -> None:
    missing = gpu_engine(cpu, tmp_path / "missing.engine", targets=(*TARGETS, "cuda:sm_120"))
    with Engine.open(missing, "cuda") as engine, pytest.raises(CorruptEngineError, match="code/sm_120"):
        engine.code((12, 0))
    damaged = gpu_engine(cpu, tmp_path / "damaged.engine", **{"code/sm_80": CODE["code/sm_80"][:-64]})
    with Engine.open(damaged, "cuda") as engine, pytest.raises(CorruptEngineError, match="code/sm_80 is damaged"):
        engine.code((8, 0))


@pytest.mark.parametrize("with_cpu", [True, False])
def test_inspect_shows_code(cpu: Path, both: Path, with_cpu: bool, tmp_path: Path) -> None:
    path = both if with_cpu else gpu_engine(cpu, tmp_path / "gpu.engine")
    result = CliRunner().invoke(main, ["inspect", str(path), "--json"])
    summary = json.loads(result.stdout)
    assert summary["targets"] == [*(["cpu"] if with_cpu else []), *TARGETS]
    kernels = {"sm_80": 1, "sm_90a": 2, "ptx": 1}
    assert {name: code["kernels"] for name, code in summary["code"].items()} == kernels
    assert all(code["bytes"] == len(CODE[f"code/{name}"]) for name, code in summary["code"].items())
    text = CliRunner().invoke(main, ["inspect", str(path)]).stdout
    sizes = {name: format_bytes(code["bytes"]) for name, code in summary["code"].items()}
    assert f"  code       sm_90a: 2 kernels, {sizes['sm_90a']}\n" in text
    assert f"  code       ptx: 1 kernel, {sizes['ptx']}, compiled where it is loaded\n" in text


def test_inspect_of_an_engine_without_targets(cpu: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["inspect", str(copied(cpu, tmp_path / "none.engine", {}, targets=()))])
    assert result.exit_code == 6
