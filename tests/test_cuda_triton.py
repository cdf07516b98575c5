"""Kernels in Triton: what they compute in its interpreter, and what they become for each architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from enginewright.builder.cuda import Compiled, compile_each
from enginewright.builder.cuda.triton_gemm import TILES, gemm_bf16
from enginewright.errors import EngineError
from enginewright.triton_instance import TritonInstance
from tests.helpers.triton_gemm_run import PROBLEMS
from tests.tolerances import RECURRENCE_F32, TRITON_GEMM_BF16, TRITON_GEMM_F32

SHARED_BYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120": 99}  # KiB of a block
ROOT = Path(__file__).resolve().parent.parent


def gemm(sm: str, out: str = "f32") -> TritonInstance:
    return gemm_bf16(sm, 1536, 576, (576, 576, 1600), bias=True, out=out)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(cache: Path) -> dict[str, Compiled]:
    made = compile_each([(sm, gemm(sm)) for sm in TILES], cache=cache)
    return {sm: compiled for (sm, _), compiled in made.items()}


def interpreted(module: str, *arguments: str) -> list[Any]:
    """What a module of tests.helpers prints in a process whose kernels run in Triton's interpreter."""
    found = subprocess.run(
        [sys.executable, "-m", f"tests.helpers.{module}", *arguments],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return [json.loads(line) for line in found.stdout.splitlines()]


def check_recurrences(which: str, count: int) -> None:
    """One of the lists of problems of triton_recurrence_run.py."""
    results = interpreted("triton_recurrence_run", which)
    assert len(results) == count
    for index, result in enumerate(results):
        assert result["error"] < RECURRENCE_F32 and result["state"] < RECURRENCE_F32, (index, result)
        assert result["same"], f"problem {index} has other bits when its prompt is cut, or alone"


def test_recurrences_in_chunks_in_the_interpreter() -> None:
    check_recurrences("few", 2)


def test_values_in_the_interpreter() -> None:
    results = interpreted("triton_gemm_run")
    for problem, result in zip(PROBLEMS, results, strict=True):
        limit = TRITON_GEMM_F32 if problem[-1].is_floating_point and problem[-1].itemsize == 4 else TRITON_GEMM_BF16
        assert result["error"] < limit, problem
        assert result["outside"] == 0, problem


@pytest.mark.parametrize("sm", SHARED_BYTES)
def test_it_fits_the_architecture(sm: str, made: dict[str, Compiled]) -> None:
    compiled = made[sm]
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.local_bytes == 0
    assert 0 < compiled.static_shared_bytes + compiled.shared_bytes <= SHARED_BYTES[sm] * 1024
    assert 0 < compiled.registers * compiled.num_warps * 32 <= 65536
    assert compiled.num_warps == TILES[sm].num_warps
    assert compiled.scratch_bytes == (384 if sm in ("sm_90a", "sm_100a") else 0)  # three descriptors


def test_instructions(made: dict[str, Compiled]) -> None:
    text = disassembled(made["sm_90a"].cubin)
    assert text.count("HGMMA") > 0 and text.count("UTMALDG") > 0 and text.count("UTMASTG") > 0
    text = disassembled(made["sm_100a"].cubin)
    assert text.count("UTCHMMA") > 0 and text.count("UTMALDG") > 0
    for sm in ("sm_80", "sm_120"):
        text = disassembled(made[sm].cubin)
        assert text.count("HMMA.16816.F32.BF16") > 0 and text.count("LDGSTS") > 0
    assert b".target sm_80" in made["ptx"].cubin and b"mma.sync" in made["ptx"].cubin


def disassembled(cubin: bytes) -> str:
    from triton.tools.disasm import get_sass

    return str(get_sass(cubin))


def test_the_same_bytes_again(made: dict[str, Compiled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From other caches, another folder, and whatever the environment asks Triton for."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"TRITON_DEFAULT_FP_FUSION": "1", "DISABLE_PTXAS_OPT": "1", "NVRTC_APPEND_FLAGS": "-G"}.items():
        monkeypatch.setenv(name, value)
    wanted = [(sm, gemm(sm)) for sm in ("sm_90a", "sm_120")]
    again = compile_each(wanted, cache=tmp_path / "cache")
    assert again == {(sm, kernel): made[sm] for sm, kernel in wanted}
    assert made["sm_120"].cubin != made["sm_89"].cubin
    for compiled in made.values():
        assert str(ROOT).encode() not in compiled.cubin and b"/tmp" not in compiled.cubin


def test_a_kernel_that_does_not_compile_is_shown(cache: Path) -> None:
    wrong = gemm("sm_80")
    constants = tuple((name, 24 if name == "BLOCK_K" else value) for name, value in wrong.constants)
    instance = TritonInstance(wrong.module, wrong.function, wrong.signature, constants, 8, 3)
    with pytest.raises(EngineError, match=r"gemm_bf16<N=1536, .* of triton/gemm.py does not compile for sm_80"):
        compile_each([("sm_80", instance)], cache=cache)
