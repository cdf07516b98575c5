"""Tables by benchmarks/kernel_resources.py of compiled kernels, and resources of tiny models' kernels."""

from pathlib import Path
from typing import Any

import pytest
from kernel_resources import Kernel, compiled_for, excesses, kernels, table

from enginewright.builder.cuda import Compiled, Instance
from tests.cuda.test_build import FEW_SHAPES
from tests.helpers.tiny import tiny_checkpoint

NARROW = Kernel(Instance("gemm.cuh", "gemm<Gemm{.columns = 64}>"), 128, 0)
WIDE = Kernel(Instance("gemm.cuh", "gemm<Gemm{.columns = 576}>"), 256, 101_376)
ROPE = Kernel(Instance("rope.cuh", "rope<Rope{}>"), 64, 0)
FOUND = (NARROW, WIDE, ROPE)
MADE = {
    "sm_80": {
        NARROW.instance: Compiled(b"", "gemm", 64, 0, 0),
        WIDE.instance: Compiled(b"", "gemm", 255, 16, 0),
        ROPE.instance: Compiled(b"", "rope", 20, 32, 128),
    },
    "sm_90a": {
        NARROW.instance: Compiled(b"", "gemm", 64, 0, 0),
        WIDE.instance: Compiled(b"", "gemm", 200, 0, 1),
        ROPE.instance: Compiled(b"", "rope", 20, 0, 128),
    },
}


def test_a_line_a_function() -> None:
    assert table(FOUND, MADE).splitlines() == [
        "| kernel | specializations | threads | shared bytes | sm_80 | sm_90a |",
        "|---|---|---|---|---|---|",
        "| `gemm` | 2 | 128 to 256 | 0 to 101376 | 64 to 255, 0 to 16 B local | 64 to 200, 0 to 1 B static |",
        "| `rope` | 1 | 64 | 0 | 20, 32 B local, 128 B static | 20, 128 B static |",
    ]


def test_a_line_a_specialization() -> None:
    lines = table(FOUND, MADE, each=True).splitlines()
    assert lines[3] == "| `gemm<Gemm{.columns = 576}>` | 1 | 256 | 101376 | 255, 16 B local | 200, 1 B static |"
    assert len(lines) == 5


def test_excesses_are_named_unless_they_are_allowed() -> None:
    spilled = "sm_80: 16 bytes of local memory a thread: gemm<Gemm{.columns = 576}>"
    table_of_angles = "sm_80: 32 bytes of local memory a thread: rope<Rope{}>"
    too_much = "sm_90a: 101377 bytes of shared memory: gemm<Gemm{.columns = 576}>"
    assert excesses(FOUND, MADE, {}) == [spilled, table_of_angles, too_much]
    assert excesses(FOUND, MADE, {"rope": "a reason"}) == [spilled, too_much]
    assert excesses((NARROW, ROPE), {"sm_90a": MADE["sm_90a"]}, {}) == []


# llama's are those that tests/cuda/test_build.py builds, from the same cache.
@pytest.mark.parametrize(("family", "sizes", "sms"), [("llama", FEW_SHAPES, ("sm_80", "sm_90a"))])
def test_kernels_of_tiny_models_take_no_more_than_they_should(
    family: str, sizes: dict[str, Any], sms: tuple[str, ...], tmp_path: Path
) -> None:
    model = str(tiny_checkpoint(tmp_path / family, family, **sizes))
    found = kernels(model, ["bf16"], tuple(f"cuda:{sm}" for sm in sms))
    made = compiled_for(found, sms)
    norm = "layer_norm" if family == "gpt2" else "rms_norm"
    assert {kernel.function for kernel in found} >= {"embed", "gemm_small", "gemm_large", "paged_prefill", norm}
    assert excesses(found, made) == []
