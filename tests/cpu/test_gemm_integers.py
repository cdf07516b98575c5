"""GEMMs with int8 activations: exact sums, runs of columns, weights of 4 bits."""

from typing import Any

import pytest
import torch

from enginewright import _cpu
from tests.helpers.gemm_problem import FOUR_BIT_KERNELS, INT8_KERNELS, Problem, relative_error, scales_of
from tests.helpers.kernel_runner import KernelRunner, Operands, weight
from tests.tolerances import GEMM_F32

ISAS = _cpu.isa_names()


@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 33])
def test_int8_products_are_the_same_bits_everywhere(tokens: int) -> None:
    """Sums are exact, and what follows them has one order: every instruction set gives what fp32 by hand gives."""
    problem = Problem("gemm_w8a8@1", tokens, 70, 1300, bias=True)
    sums = (problem.x.double() @ problem.weight.double().T).float()
    expected = sums * scales_of(problem.x, 0) * problem.vectors["scale"] + problem.vectors["bias"]
    for isa in ISAS:
        assert torch.equal(problem.run(isa, "f32", threads=2), expected), isa


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 5, 17, 40])
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)])
def test_the_largest_int8_products_neither_saturate_nor_wrap(isa: str, tokens: int, signs: tuple[int, int]) -> None:
    columns = 16_500  # 127 * 127 of them are above 2^27, and x is cut into pieces
    problem = Problem("gemm_w8a8@1", tokens, 33, columns)
    problem.x.fill_(signs[0] * 127)
    problem.weight.fill_(signs[1] * 127)
    problem.vectors["scale"] = torch.full((33,), 2.0**-20)
    expected = torch.tensor(float(signs[0] * signs[1] * 127 * 127 * columns)) * scales_of(problem.x, 0) * 2.0**-20
    assert torch.equal(problem.run(isa, "f32"), expected.expand(tokens, 33))


@pytest.mark.parametrize("tokens", [1, 2, 6, 7, 33])
@pytest.mark.parametrize("kernel", FOUR_BIT_KERNELS)
def test_weights_of_4_bits_give_the_same_bits_everywhere(kernel: str, tokens: int) -> None:
    """One quantization group gives the same bits on every instruction set, several on those that have an FMA."""
    whole, runs = (Problem(kernel, tokens, 70, 1300, bias=True, group=group) for group in (0, 32))
    numbers = whole.numbers()
    scaled = (whole.x.double() @ numbers.T).float() * whole.of_groups["scale"].float().T
    expected = scaled * scales_of(whole.x, 0) + whole.vectors["bias"]
    results = [runs.run(isa, "f32", threads=2) for isa in ISAS if isa != "portable"]
    for isa in ISAS:
        assert torch.equal(whole.run(isa, "f32", threads=2), expected), isa
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("isa", ISAS)
def test_every_code_of_e2m1(isa: str) -> None:
    """Each in every row and at every place of a line, times powers of two, the first subnormal: exact but for the
    tokens' scales."""
    problem = Problem("gemm_mxfp4a8@1", 32, 16, 32)
    problem.x = torch.eye(32).to(torch.int8)
    problem.weight = ((torch.arange(16)[:, None] + torch.arange(32)) % 16).to(torch.uint8)
    halved = 2.0 ** torch.arange(-128, 112, 15)
    problem.of_groups["scale"] = halved.bfloat16().view(16, 1)
    numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    weight = torch.tensor(numbers + [-number for number in numbers])[problem.weight.int()] * (2 * halved[:, None])
    assert torch.equal(problem.run(isa, "f32"), weight.T * scales_of(problem.x, 32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 6, 40])
def test_weights_of_4_bits_at_their_largest(isa: str, tokens: int, zeros: bool) -> None:
    problem = Problem("gemm_w4a8@1", tokens, 33, 16_500, group=0, zeros=zeros)
    problem.x.fill_(-127)
    problem.weight.fill_(15)
    problem.of_groups["scale"] = torch.full((33, 1), 2.0**-20).bfloat16()
    if zeros:
        problem.of_groups["zero"].fill_(3)
    exact = torch.tensor(-127.0 * (12 if zeros else 7) * 16_500)
    expected = exact * 2.0**-20 * scales_of(problem.x, 0)
    assert torch.equal(problem.run(isa, "f32"), expected.expand(tokens, 33))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("tokens", [1, 3, 6, 40])
def test_e2m1_at_its_largest(isa: str, tokens: int, sign: int) -> None:
    problem = Problem("gemm_mxfp4a8@1", tokens, 33, 16_500, group=0)
    problem.x.fill_(127)
    problem.weight.fill_(7 if sign > 0 else 15)
    problem.of_groups["scale"] = torch.full((33, 1), 2.0**-20).bfloat16()
    expected = torch.tensor(sign * 127.0 * 12 * 16_500) * 2.0**-20 * scales_of(problem.x, 0)
    assert torch.equal(problem.run(isa, "f32"), expected.expand(tokens, 33))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", INT8_KERNELS)
@pytest.mark.parametrize("group", [0, 32, 64, 96, 512])
def test_runs_of_columns(isa: str, kernel: str, group: int) -> None:
    """The last run is shorter, or the only one; runs end inside a piece of K, or with it."""
    for columns in (31, 577, 1090):
        zeros = columns == 577 and kernel == "gemm_w4a8@1"
        problem = Problem(kernel, 40, 70, columns, "swiglu", bias=True, group=group, zeros=zeros)
        together = problem.run(isa, "f32", threads=2)
        assert relative_error(together, problem.expected()) < GEMM_F32
        for tokens in range(1, 8):
            assert torch.equal(together[:tokens], problem.run(isa, "f32", x=problem.x[:tokens]))


def malformed() -> list[tuple[str, str, dict[str, Any]]]:
    codes, scale = torch.zeros(32, 128, dtype=torch.uint8), torch.zeros(32, 4).bfloat16()
    return [
        ("gemm_w4a8@1", "weight of u4", {"weight": weight(codes.to(torch.int8), "r16")}),
        ("gemm_w4a8@1", "'scale' must be a weight of bf16 with the layout r16_columns", {"scale": weight(scale)}),
        ("gemm_w4a8@1", "'scale' must have 4 columns, not 3", {"scale": weight(scale[:, :3], "r16_columns")}),
        ("gemm_w4a8@1", "'scale' and 'weight' differ", {"scale": weight(scale[:31], "r16_columns")}),
        ("gemm_w4a8@1", "'zero' must be a weight of i8", {"zero": weight(scale, "r16_columns")}),
        ("gemm_w4a8@1", "'x_scale' must have 4 columns, not 1", {"x_scale": 1}),
        ("gemm_w4a8@1", "'x_scale' must have 2 columns, not 4", {"group": 64}),
        ("gemm_w4a8@1", "multiple of 32", {"group": 48}),
        ("gemm_w4a8@1", "in 0 … 512, not 544", {"group": 544}),
        ("gemm_mxfp4a8@1", "weight of e2m1", {"weight": weight(codes, "r16")}),
        ("gemm_mxfp4a8@1", "'scale' must have 4 columns, not 3", {"scale": weight(scale[:, :3], "r16_columns")}),
        ("gemm_mxfp4a8@1", "no operand 'zero'", {"zero": weight(scale.to(torch.int8), "r16_columns")}),
        ("gemm_w8a8@1", "no operand 'zero'", {"zero": weight(scale.to(torch.int8), "r16_columns")}),
        ("gemm_w8a8@1", "'scale' must be f32", {"scale": weight(torch.zeros(32).bfloat16())}),
    ]


@pytest.mark.parametrize(("kernel", "message", "change"), malformed(), ids=lambda value: str(value)[:40])
def test_malformed_operands_are_refused(kernel: str, message: str, change: dict[str, Any]) -> None:
    runner = KernelRunner("portable")
    four_bits = kernel in FOUR_BIT_KERNELS
    matrix = torch.zeros(32, 128, dtype=torch.uint8 if four_bits else torch.int8)
    operands: Operands = {
        "x": runner.filled(torch.zeros(1, 128, dtype=torch.int8)),
        "x_scale": runner.buffer(1, change.get("x_scale", 4), "f32"),
        "weight": weight(matrix, "r16", "e2m1" if kernel == "gemm_mxfp4a8@1" else None),
        "scale": weight(torch.zeros(32, 4).bfloat16(), "r16_columns") if four_bits else weight(torch.zeros(32)),
        "out": runner.buffer(1, 32, "f32"),
    }
    operands |= {name: change[name] for name in ("weight", "scale", "zero") if name in change}
    with pytest.raises(ValueError, match=message):
        runner.call(kernel, operands, {"epilogue": "none", "group": change.get("group", 32)})


@pytest.mark.parametrize(
    ("message", "dtype", "layout", "shape"),
    [
        ("of u4 cannot be plain", "u4", "plain", (4, 64)),
        ("of e2m1 cannot be plain", "e2m1", "plain", (4, 64)),
        ("has 511 bytes, but its shape takes 512", "e2m1", "r16", (3, 5)),
        ("has a layout of bf16, i8, e4m3, u4 and e2m1 weights, but is f32", "f32", "r16", (4, 64)),
        ("has no two halves", "i8", "r16_columns_pairs", (5, 2)),
        ("has 511 bytes, but its shape takes 512", "u4", "r16", (3, 5)),
        ("has 511 bytes, but its shape takes 1024", "bf16", "r16_columns_pairs", (34, 8)),
    ],
)
def test_malformed_weights_are_refused(message: str, dtype: str, layout: str, shape: tuple[int, int]) -> None:
    runner = KernelRunner("portable")
    with pytest.raises(ValueError, match=message):
        runner.call("gemm_w4a8@1", {"weight": _cpu.OperandSpec.weight(bytes(511), dtype, layout, *shape)}, {})
