"""Kernels in Triton: what they compute in its interpreter, and what they become for each architecture."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from enginewright.builder.cuda import Compiled, compile_each
from enginewright.errors import EngineError
from enginewright.targets import PTX
from tests.helpers.chunks import chunk_kernels
from tests.helpers.compiled import compile_kernels
from tests.tolerances import RECURRENCE_F32

SHARED_BYTES = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_120": 99}  # KiB of a block
ROOT = Path(__file__).resolve().parents[2]
SMS = ("sm_80", "sm_90a")  # tests/long compiles both kernels, for all
_, SCAN = chunk_kernels(True, 3, 3, 10, 50)


@pytest.fixture(scope="module")
def made(cache: Path) -> dict[str, Compiled]:
    return {sm: kernels[SCAN] for sm, kernels in compile_kernels([SCAN], (*SMS, PTX), cache=cache).items()}


def interpreted(module: str, *arguments: str) -> list[Any]:
    """Output of a module of tests.helpers in a process whose kernels run in Triton's interpreter."""
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
        assert result.pop("same"), f"problem {index} has other bits when its prompt is cut, or alone"
        assert max(result.values()) < RECURRENCE_F32, (index, result)


def test_recurrences_in_chunks_in_the_interpreter() -> None:
    check_recurrences("few", 2)


@pytest.mark.parametrize("sm", SMS)
def test_it_fits_the_architecture(sm: str, made: dict[str, Compiled]) -> None:
    compiled = made[sm]
    assert compiled.cubin.startswith(b"\x7fELF")
    assert compiled.local_bytes == 0
    assert 0 < compiled.static_shared_bytes + compiled.shared_bytes <= SHARED_BYTES[sm] * 1024
    assert 0 < compiled.registers * compiled.num_warps * 32 <= 65536
    assert compiled.num_warps == SCAN.num_warps and compiled.scratch_bytes == 0


def test_products_are_those_of_tensor_cores(made: dict[str, Compiled]) -> None:
    for sm in ("sm_80", "sm_90a"):
        assert "TF32" in disassembled(made[sm].cubin)
    assert b".target sm_80" in made[PTX].cubin and b"mma.sync" in made[PTX].cubin


def disassembled(cubin: bytes) -> str:
    from triton.tools.disasm import get_sass

    return str(get_sass(cubin))


def test_the_same_bytes_again(made: dict[str, Compiled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other caches, another folder, and options for Triton in the environment change no byte."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"TRITON_DEFAULT_FP_FUSION": "1", "DISABLE_PTXAS_OPT": "1", "NVRTC_APPEND_FLAGS": "-G"}.items():
        monkeypatch.setenv(name, value)
    again = compile_kernels([SCAN], ["sm_90a"], cache=tmp_path / "cache")
    assert again == {"sm_90a": {SCAN: made["sm_90a"]}}
    assert made["sm_90a"].cubin != made["sm_80"].cubin
    for compiled in made.values():
        assert str(ROOT).encode() not in compiled.cubin and b"/tmp" not in compiled.cubin


def test_a_kernel_that_does_not_compile_is_shown(cache: Path) -> None:
    constants = dict(SCAN.constants) | {"BLOCK_V": 24}  # not a power of two
    wrong = msgspec.structs.replace(SCAN, constants=tuple(constants.items()))
    with pytest.raises(EngineError, match=r"scan_chunks<DELTA=True, .* of triton/recurrence.py does not compile for"):
        compile_each([("sm_80", wrong)], cache=cache)
