"""Adapters on the emulated GPU: all formats and more families than tests/cuda has."""

from pathlib import Path
from typing import Any

import pytest

from tests.cuda import test_adapters as short
from tests.cuda.kernels.test_adapters import check
from tests.emulator.kernels import EmulatedKernels, Kernels
from tests.helpers.cuda_adapters import AdaptedGemm, expected
from tests.helpers.cuda_gemm import Gemm, Problem, error
from tests.helpers.site_adapters import some_adapters
from tests.tolerances import GEMM_E4M3, GEMM_F32

FORMATS = [
    Gemm("bf16", 150, 1030, bias=True),
    Gemm("bf16", 2 * 37, 330, "geglu", batch_invariant=True),
    Gemm("w8a16", 70, 600, bias=True),
    Gemm("fp8a16", 150, 330, group=128),
    Gemm("w4a16", 2 * 37, 600, "swiglu", bias=True, group=128),
    Gemm("mxfp4a16", 150, 330, group=32, bias=True),
    Gemm("w8a8", 70, 600, bias=True),
    Gemm("w8a8", 70, 600, group=128),
    Gemm("fp8a8", 150, 600, bias=True),
    Gemm("fp8a8", 2 * 37, 330, "swiglu", group=128),
]
FAMILIES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "int8-wo", {"target_modules": short.LINEARS}),
    ("llama", "w8a8", {"target_modules": short.LINEARS, "rank_pattern": {"q_proj": 3, "down_proj": 11}}),
    ("llama", "fp8", {"target_modules": short.LINEARS}),
    ("llama", "int4-rtn", {"target_modules": short.LINEARS, "use_dora": True}),
    ("llama", "bf16", {"target_modules": short.LINEARS, "r": 64, "use_rslora": True}),
    ("qwen2", "int8-wo", {"target_modules": short.LINEARS, "bias": "lora_only"}),
    ("gemma3_text", "bf16", {"target_modules": short.LINEARS}),
    ("granitemoehybrid", "int8-wo", {"target_modules": ["q_proj", "o_proj", "in_proj", "out_proj"]}),
    ("deepseek_v3", "bf16", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]}),
    ("qwen3_5_text", "w8a8", {"target_modules": ["q_proj", "o_proj", "down_proj"]}),
]


@pytest.mark.parametrize("gemm", FORMATS, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 9, 33, 65, 130])
def test_products_with_adapters(gemm: Gemm, tokens: int) -> None:
    check(gemm, tokens)


@pytest.mark.skipif(Kernels is not EmulatedKernels and not Kernels.are_for(90), reason="wgmma is Hopper's alone")
@pytest.mark.parametrize("format", ["bf16", "w8a16", "w8a8", "fp8a8"])
def test_products_of_warpgroups_with_adapters(format: str) -> None:
    gemm = Gemm(format, 150, 330, bias=True, wgmma=True)
    problem, adapters = Problem(gemm, 130), some_adapters(150, 330)
    slots = [(row * 5 + 1) % 6 - 1 for row in range(130)]
    bound = GEMM_E4M3 if format == "fp8a8" else GEMM_F32
    assert error(AdaptedGemm(gemm, adapters).run(problem, slots), expected(problem, adapters, slots)) < bound


@pytest.mark.parametrize(
    ("family", "quant", "lora"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_logits_are_those_of_peft(family: str, quant: str, lora: dict[str, Any], tmp_path: Path) -> None:
    short.check_logits(family, quant, lora, tmp_path)
