"""GEMM kernels against float64, on every instruction set of this machine."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.helpers.gemm_problem import (
    BF16_KERNELS,
    INT8_KERNELS,
    KERNELS,
    TOKENS,
    Problem,
    generator,
    relative_error,
)
from tests.helpers.kernel_runner import KernelRunner, Operands, weight
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32

ISAS = _cpu.isa_names()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_gemm(isa: str, kernel: str, tokens: int) -> None:
    problem = Problem(kernel, tokens, 37, 577)
    assert relative_error(problem.run(isa, "f32"), problem.expected()) < GEMM_F32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 64), (48, 129), (130, 31), (200, 64), (300, 700)])
def test_gemm_of_other_shapes(isa: str, kernel: str, rows: int, columns: int) -> None:
    for tokens in (1, 3, 40):
        problem = Problem(kernel, tokens, rows, columns)
        assert relative_error(problem.run(isa, "f32", threads=2), problem.expected()) < GEMM_F32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_tokens_in_tiles_of_every_size(isa: str, kernel: str) -> None:
    for tokens in (8, 9, 12, 13, 24, 129, 150):  # tiles are of up to 12, groups of tiles of up to 128
        problem = Problem(kernel, tokens, 37, 130)
        assert relative_error(problem.run(isa, "f32"), problem.expected()) < GEMM_F32, tokens


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("epilogue", ["none", "swiglu", "geglu"])
@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_epilogues_with_bias(isa: str, kernel: str, epilogue: str, tokens: int) -> None:
    problem = Problem(kernel, tokens, 74, 577, epilogue, bias=True)
    assert relative_error(problem.run(isa, "f32"), problem.expected()) < GEMM_F32
    assert relative_error(problem.run(isa, "bf16"), problem.expected()) < GEMM_BF16_OUT
    assert torch.equal(problem.run(isa, "bf16"), problem.run(isa, "f32").bfloat16().float())


CUT = [(kernel, isa, epilogue) for kernel in KERNELS for isa in ISAS for epilogue in ("none", "swiglu")]
SOME_CUT = [case for n, case in enumerate(CUT) if n % 4 in (0, 3)]  # each kernel on each ISA


@pytest.mark.parametrize(("kernel", "isa", "epilogue"), SOME_CUT)
def test_bits_depend_neither_on_company_nor_on_threads(isa: str, kernel: str, epilogue: str) -> None:
    problem = Problem(kernel, max(TOKENS), 330, 577, epilogue)
    together = problem.run(isa, "f32")
    assert torch.equal(together[:1], problem.run(isa, "f32", x=problem.x[:1]))
    assert torch.equal(together[60:], problem.run(isa, "f32", x=problem.x[60:]))
    for tokens, threads in itertools.product(TOKENS, (1, 2, 3)):
        start = (tokens * 5) % (max(TOKENS) - tokens + 1)
        alone = problem.run(isa, "f32", threads, problem.x[start : start + tokens])
        assert torch.equal(together[start : start + tokens], alone)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", BF16_KERNELS)
def test_bits_of_the_tiniest_numbers_do_not_depend_on_company(isa: str, kernel: str) -> None:
    """Products and sums around the smallest normal number, and inputs below it."""
    problem = Problem(kernel, 40, 64, 200)
    exponents = torch.randint(-133, -118, problem.x.shape, generator=generator(3)).float()
    problem.x = (problem.x.float() * torch.exp2(exponents)).bfloat16()
    together = problem.run(isa, "f32")
    assert (together != 0).any()
    for tokens in (1, 2, 3, 20):
        assert torch.equal(together[:tokens], problem.run(isa, "f32", x=problem.x[:tokens]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_weights_beyond_a_strip(isa: str, kernel: str) -> None:
    """A thread's weights do not fit L2, so that tokens pass more than one strip."""
    problem = Problem(kernel, 19, 1100, 1000)
    assert relative_error(problem.run(isa, "f32"), problem.expected()) < GEMM_F32


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_that_are_stored_past_the_caches(isa: str, kernel: str) -> None:
    """Logits are stored so, except for the first rows, and for the last columns where they are few."""
    problem = Problem(kernel, 19, (1 << 14) + 5, 40)
    wide = problem.run(isa, "f32", threads=2)
    assert relative_error(wide, problem.expected()) < GEMM_F32
    for start in (0, 11, 12, 18):
        assert torch.equal(wide[start:], problem.run(isa, "f32", x=problem.x[start:]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", INT8_KERNELS)
@pytest.mark.parametrize("tokens", [65, 66, 70, 71])
def test_few_tokens_after_a_whole_panel(isa: str, kernel: str, tokens: int) -> None:
    problem = Problem(kernel, tokens, 34, 8192)
    together = problem.run(isa, "f32")
    assert relative_error(together, problem.expected()) < GEMM_F32
    assert torch.equal(together[64:], problem.run(isa, "f32", x=problem.x[64:]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_more_tokens_than_pass_at_once(isa: str, kernel: str) -> None:
    problem = Problem(kernel, 140, 530, 700)
    together = problem.run(isa, "f32")
    assert relative_error(together, problem.expected()) < GEMM_F32
    for start in (0, 125, 138):
        assert torch.equal(together[start:], problem.run(isa, "f32", x=problem.x[start:]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", BF16_KERNELS)
def test_infinite_inputs_do_not_reach_pad_columns(isa: str, kernel: str) -> None:
    problem = Problem(kernel, 3, 37, 100)
    problem.x[1, 5] = float("inf")
    result = problem.run(isa, "bf16")  # asserts zeros in the pad
    assert result[[0, 2]].isfinite().all() and not result[1].isfinite().any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [32, 96, 128, 256])
def test_fp8_with_scales_by_runs(isa: str, group: int) -> None:
    """The last run is shorter, or the only one; weights pass from memory, and expanded a strip at a time."""
    for columns, epilogue in ((31, "none"), (577, "swiglu"), (1090, "geglu")):
        problem = Problem("gemm_fp8a16@1", 140, 74, columns, epilogue, bias=True, group=group)
        together = problem.run(isa, "f32", threads=2)
        assert relative_error(together, problem.expected()) < GEMM_F32
        for tokens in (1, 2, 3, 5, 6, 7, 16, 17):
            assert torch.equal(together[:tokens], problem.run(isa, "f32", x=problem.x[:tokens]))


def codes_of(kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Every weight of 8 bits that there may be, and its value."""
    if kernel == "gemm_w8a16@1":
        return torch.arange(-127, 128).to(torch.int8), torch.arange(-127, 128).float()
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    values = torch.from_numpy(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), values


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", ["gemm_w8a16@1", "gemm_fp8a16@1"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 17, 40])
def test_every_code_is_exact(isa: str, kernel: str, tokens: int) -> None:
    """A code in a row of zeros meets a number of a few bits: what comes out is their product, whatever M."""
    codes, values = codes_of(kernel)
    factors = torch.arange(1, tokens + 1)
    for place in range(64, 68):  # in a word of four
        problem = Problem(kernel, tokens, len(codes), 70)
        problem.weight = torch.zeros(len(codes), 70, dtype=torch.uint8).view(codes.dtype)
        problem.weight[:, place] = codes
        problem.vectors["scale"] = torch.ones(len(codes))
        problem.x = torch.zeros(tokens, 70).bfloat16()
        problem.x[:, place] = factors
        assert torch.equal(problem.run(isa, "f32"), factors[:, None] * values)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_work(kernel: str, epilogue: str) -> None:
    problem = Problem(kernel, 5, 74, 577, epilogue, bias=True)
    work = problem.work("portable")
    blocks = 5 if epilogue == "none" else 2 * 3
    stored = blocks * 16 * 640 * problem.weight.itemsize // (2 if problem.of_groups else 1)
    scales = 2 * blocks * 16 * 19 if problem.of_groups else 0  # bf16
    assert work["weight_bytes"] == stored + scales + sum(vector.nbytes for vector in problem.vectors.values())
    assert work["activation_bytes"] == 5 * 577 * problem.x.itemsize + 5 * problem.outputs * 4
    operations = {"bf16_ops": 0, "int8_ops": 0, "fp32_ops": 0}
    operations["int8_ops" if kernel in INT8_KERNELS else "bf16_ops"] = 2 * 5 * 74 * 577
    assert {name: work[name] for name in operations} == operations


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_requests_in_flight_share_one_pass_of_the_weights(isa: str, kernel: str) -> None:
    """Weights have the columns of an 8-billion-parameter model's MLP; prompts may be read in several panels."""
    for tokens in 33, 64:
        assert Problem(kernel, tokens, 32, 14_336).work(isa)["weight_passes"] == 1
    passes = Problem(kernel, 100, 32, 14_336).work(isa)["weight_passes"]
    assert passes == (2 if kernel in INT8_KERNELS and "amx" not in isa else 1)


@pytest.mark.parametrize("isa", ISAS)
def test_x_may_be_columns_of_a_buffer(isa: str) -> None:
    problem = Problem("gemm_bf16@1", 5, 37, 128)
    runner = KernelRunner(isa, tokens=5)
    wide = runner.filled(torch.cat((torch.full((5, 64), 7.0).bfloat16(), problem.x), dim=1))
    out = runner.buffer(5, 37, "f32")
    operands: Operands = {"x": wide.view(64, 128), "weight": weight(problem.weight, "r16"), "out": out}
    runner.call("gemm_bf16@1", operands, {"epilogue": "none"})
    assert torch.equal(runner.read(out), problem.run(isa, "f32"))


def malformed() -> list[tuple[str, dict[str, Any]]]:
    bf16, i8 = torch.zeros(32, 64).bfloat16(), torch.zeros(32, 64, dtype=torch.int8)
    vector = torch.zeros(32)
    return [
        ("layout r16", {"weight": weight(bf16, "r16_pairs")}),
        ("layout r16_pairs", {"epilogue": "swiglu", "out": 16}),
        ("weight of bf16", {"weight": weight(i8, "r16")}),
        ("64 columns, not 65", {"x": 65}),
        ("32 columns, not 33", {"out": 33}),
        ("differ in their rows", {"linear": (0, 0, 1, 0, 0, 0)}),
        ("no epilogue 'relu'", {"epilogue": "relu"}),
        ("must be text", {"epilogue": 3}),
        ("'bias' must have 32 columns", {"bias": weight(torch.zeros(31))}),
        ("'bias' must be f32", {"bias": weight(vector.bfloat16())}),
        ("no operand 'scale'", {"scale": weight(vector)}),
        ("no zeros after", {"weight": weight(torch.zeros(32, 40).bfloat16(), "r16"), "x": 40, "view": True}),
    ]


@pytest.mark.parametrize(("message", "change"), malformed(), ids=lambda value: value if isinstance(value, str) else "")
def test_malformed_operands_are_refused(message: str, change: dict[str, Any]) -> None:
    runner = KernelRunner("portable")
    columns = change.get("x", 64)
    x = runner.filled(torch.zeros(1, 128).bfloat16()).view(0, columns)
    if "view" not in change:
        x = runner.filled(torch.zeros(1, columns).bfloat16())
    linear = change.get("linear", (0, 1, 0, 0, 0, 0))
    out = runner.buffer(1, change.get("out", 32), "f32", linear)
    operands: Operands = {
        "x": x,
        "weight": change.get("weight", weight(torch.zeros(32, 64).bfloat16(), "r16")),
        "out": out,
    }
    operands |= {name: change[name] for name in ("bias", "scale") if name in change}
    with pytest.raises(ValueError, match=message):
        runner.call("gemm_bf16@1", operands, {"epilogue": change.get("epilogue", "none")})


def malformed_runs() -> list[tuple[str, dict[str, Any]]]:
    scale = torch.zeros(32, 4)
    return [
        ("'scale' must be a weight of f32 with the layout r16_columns", {"scale": weight(torch.zeros(32))}),
        ("'scale' must be a weight of f32", {"scale": weight(scale.bfloat16(), "r16_columns")}),
        ("'scale' must have 4 columns, not 3", {"scale": weight(scale[:, :3], "r16_columns")}),
        ("'scale' and 'weight' differ in their rows", {"scale": weight(scale[:31], "r16_columns")}),
        ("multiple of 32", {"group": 48}),
        ("in 0 … 256, not 288", {"group": 288}),
        ("'scale' must be one matrix of plain layout", {"group": 0}),
    ]


@pytest.mark.parametrize(("message", "change"), malformed_runs(), ids=lambda value: str(value)[:40])
def test_malformed_runs_of_fp8_are_refused(message: str, change: dict[str, Any]) -> None:
    runner = KernelRunner("portable")
    operands: Operands = {
        "x": runner.filled(torch.zeros(1, 128).bfloat16()),
        "weight": weight(torch.zeros(32, 128).to(torch.float8_e4m3fn), "r16"),
        "scale": change.get("scale", weight(torch.zeros(32, 4), "r16_columns")),
        "out": runner.buffer(1, 32, "f32"),
    }
    with pytest.raises(ValueError, match=message):
        runner.call("gemm_fp8a16@1", operands, {"epilogue": "none", "group": change.get("group", 32)})


def test_a_weight_with_too_few_bytes_is_refused() -> None:
    runner = KernelRunner("portable")
    short = _cpu.OperandSpec.weight(np.zeros(16 * 64 * 2, np.uint8), "bf16", "r16", 17, 64)
    operands: Operands = {
        "x": runner.filled(torch.zeros(1, 64).bfloat16()),
        "weight": short,
        "out": runner.buffer(1, 17, "f32"),
    }
    with pytest.raises(ValueError, match="2048 bytes, but its shape takes 4096"):
        runner.call("gemm_bf16@1", operands, {"epilogue": "none"})
