"""Hopper's matrix products for many tokens, in emulation, against float64."""

from dataclasses import replace

import pytest
import torch

from tests.emulator.kernels import SCHEDULES, EmulatedKernels, Kernels
from tests.helpers.cuda_gemm import Gemm, Problem, assert_each_site_is_missed, compiled, error, name_of
from tests.tolerances import GEMM_E4M3_POSITIVE, GEMM_F32

# Of all formats and epilogues, with one and two warpgroups; one chunk of K, and more than there are stages.
BF16 = Gemm("bf16", 70, 600, bias=True, wgmma=True)
W4A16 = Gemm("w4a16", 150, 330, bias=True, group=64, zeros=True, wgmma=True, large=True)
W8A8 = Gemm("w8a8", 150, 600, bias=True, wgmma=True)
FP8A8 = Gemm("fp8a8", 150, 600, bias=True, wgmma=True, large=True)
FP8A8_SUM = Gemm("fp8a8", 35, 1030, wgmma=True)
CALLS = [
    (BF16, 65),
    (replace(BF16, large=True), 130),
    (Gemm("bf16", 2 * 150, 70, "swiglu", bias=True, wgmma=True, large=True), 3),
    (Gemm("bf16", 2 * 37, 30, "geglu", to="bf16", wgmma=True), 66),
    (Gemm("w8a16", 2 * 70, 70, "geglu", to="bf16", wgmma=True), 65),
    (Gemm("w8a16", 270, 200, bias=True, wgmma=True, large=True), 130),
    (Gemm("fp8a16", 35, 530, wgmma=True), 66),  # three outputs after the last four
    (Gemm("fp8a16", 2 * 37, 330, "geglu", group=32, to="bf16", wgmma=True), 67),
    (Gemm("fp8a16", 150, 330, bias=True, group=128, wgmma=True, large=True), 65),
    (W4A16, 67),
    (replace(W4A16, large=False), 66),
    (Gemm("w4a16", 2 * 37, 600, "swiglu", group=32, bias=True, to="bf16", wgmma=True), 33),
    (Gemm("mxfp4a16", 150, 330, group=32, bias=True, wgmma=True), 65),
    (Gemm("mxfp4a16", 2 * 70, 130, "swiglu", group=32, wgmma=True, large=True), 66),
    (W8A8, 130),
    (Gemm("w8a8", 2 * 150, 330, "swiglu", group=32, to="bf16", wgmma=True, large=True), 65),
    (Gemm("w8a8", 70, 600, group=128, wgmma=True), 65),
    (FP8A8_SUM, 65),
    (FP8A8, 65),
    (replace(FP8A8, large=False), 65),
    (Gemm("fp8a8", 2 * 37, 70, "geglu", to="bf16", wgmma=True), 130),
    (Gemm("fp8a8", 2 * 150, 1030, "swiglu", group=128, bias=True, to="bf16", wgmma=True, large=True), 66),
    (Gemm("fp8a8", 70, 330, group=128, wgmma=True), 67),
    (Gemm("fp8a8", 70, 200, group=64, bias=True, wgmma=True), 65),
    (Gemm("fp8a8", 150, 330, group=32, wgmma=True, large=True), 130),
]


@pytest.fixture(scope="module")
def kernels(on_hopper: None) -> Kernels:
    return compiled(CALLS, 90)


@pytest.mark.parametrize(("gemm", "tokens"), CALLS, ids=[name_of(*call) for call in CALLS])
def test_products_are_those_of_the_packed_weights(kernels: Kernels, gemm: Gemm, tokens: int) -> None:
    problem = Problem(gemm, tokens)
    result = problem.run(kernels)
    assert error(result, problem.expected()) < gemm.tolerance
    for schedule in SCHEDULES[1:]:
        assert torch.equal(problem.run(kernels, schedule), result), schedule


def test_tiles_of_all_sizes_give_the_same_bits(kernels: Kernels) -> None:
    for gemm in (BF16, W4A16, FP8A8):
        other = replace(gemm, large=not gemm.large)
        assert torch.equal(Problem(other, 65).run(kernels), Problem(gemm, 65).run(kernels))


def test_integers_have_the_bits_of_other_kernels(kernels: Kernels) -> None:
    other = replace(W8A8, wgmma=False)
    assert torch.equal(Problem(W8A8, 130).run(kernels), Problem(other, 130).run(compiled([(other, 130)])))


def test_e4m3_is_summed_in_runs(kernels: Kernels) -> None:
    problem = Problem(FP8A8_SUM, 65)
    for codes in (problem.x, problem.weights["weight"]):
        codes.view(torch.uint8).bitwise_and_(0x7F)  # nothing is negative: what is cut off adds up
    result, exact = problem.run(kernels), problem.expected()
    assert error(result, exact) < GEMM_E4M3_POSITIVE < error(_cut_sums(problem, 1030), exact) / 4
    if Kernels is EmulatedKernels:
        assert error(result, _cut_sums(problem, 128)) < GEMM_F32 < error(result, _cut_sums(problem, 64)) / 100


def _cut_sums(problem: Problem, run: int) -> torch.Tensor:
    """Sums by tensor cores over `run` columns at a time, if emulated_wgmma.h is right about them."""
    x, weight = problem.x.double(), problem.weights["weight"].double()
    products = torch.nn.functional.pad(x[:, None] * weight, (0, -x.shape[1] % 32))  # [tokens, rows, columns]
    total, before = torch.zeros(products.shape[:2]).double(), torch.zeros(*products.shape[:2], 1).double()
    for step, of_step in enumerate(products.split(32, dim=2)):
        if step * 32 % run == 0:
            total, before = total + before[..., 0], torch.zeros_like(before)
        terms = torch.cat((before, of_step), dim=2)
        unit = 2.0 ** (terms.abs().amax(dim=2, keepdim=True).frexp().exponent - 14).double()
        before = ((terms / unit).trunc() * unit).sum(dim=2, keepdim=True)
    of_rows = problem.weights["scale"].double()
    return (total + before[..., 0]) * problem.x_scale.double() * of_rows


def test_each_barrier_fence_and_wait_is_missed(kernels: Kernels) -> None:
    problems = [Problem(BF16, 65), Problem(W4A16, 67), Problem(FP8A8, 65)]
    assert_each_site_is_missed(kernels, problems, seeds=4)
    count = len([site for site in kernels.sites if site.startswith("gemm_wgmma")])
    assert count == (10 if Kernels is EmulatedKernels else 0)
