"""Matrix products on CUDA for few tokens, in emulation, against float64 on what the engine file's bytes stand for."""

import pytest
import torch

from tests.cuda_gemm import Gemm, Problem, compiled, error
from tests.emulated import SCHEDULES, Kernels
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32

# Rows and columns of no round number, with one split of K and with two; a last group that is not whole.
CASES = [
    (Gemm("bf16", 70, 600, bias=True), (1, 2, 3, 7, 8, 9, 16, 17, 33, 64)),
    (Gemm("bf16", 2 * 37, 330, "swiglu", to="bf16"), (1, 3, 8)),
    (Gemm("w8a16", 150, 600, bias=True), (3,)),
    (Gemm("w8a16", 2 * 70, 70, "geglu", to="bf16"), (9,)),
    (Gemm("fp8a16", 33, 530), (2,)),
    (Gemm("w4a16", 70, 330, group=32, zeros=True), (1, 7)),
    (Gemm("w4a16", 2 * 37, 600, "swiglu", bias=True, group=128, to="bf16"), (1, 17)),
    (Gemm("w4a16", 30, 200, group=64), (33,)),
    (Gemm("mxfp4a16", 150, 330, group=32, bias=True), (5, 16)),
    (Gemm("w8a8", 70, 600, bias=True), (1, 16)),
    (Gemm("w8a8", 2 * 37, 330, "swiglu", group=32, to="bf16"), (3,)),
    (Gemm("w8a8", 70, 600, group=128), (12,)),
]
CALLS = [(gemm, tokens) for gemm, counts in CASES for tokens in counts]
IDS = [f"{gemm.format}-{gemm.rows}x{gemm.columns}-{gemm.epilogue}-{tokens}" for gemm, tokens in CALLS]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return compiled(CALLS)


@pytest.mark.parametrize(("gemm", "tokens"), CALLS, ids=IDS)
def test_products_are_those_of_the_packed_weights(kernels: Kernels, gemm: Gemm, tokens: int) -> None:
    problem = Problem(gemm, tokens)
    result = problem.run(kernels)
    assert error(result, problem.expected()) < (GEMM_F32 if gemm.to == "f32" else GEMM_BF16_OUT)
    for schedule in SCHEDULES[1:]:
        assert torch.equal(problem.run(kernels, schedule), result), schedule


@pytest.mark.parametrize("gemm", [CASES[0][0], CASES[5][0], CASES[9][0]], ids=lambda gemm: gemm.format)
def test_few_tokens_have_the_same_bits_in_any_company(gemm: Gemm) -> None:
    counts = (1, 2, 8, 9, 16, 31, 64)
    kernels = compiled([(gemm, tokens) for tokens in counts])
    results = [Problem(gemm, tokens).run(kernels) for tokens in counts]
    for tokens, result in zip(counts, results, strict=True):
        assert torch.equal(result, results[-1][:tokens])


def test_each_barrier_is_missed(kernels: Kernels) -> None:
    """Of one call or another: where the sums of a block are small, they are not in the way of its last stage."""
    problems = [Problem(CASES[0][0], tokens) for tokens in (3, 64)] + [Problem(CASES[7][0], 33)]
    whole = [problem.run(kernels) for problem in problems]
    runs = [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(8))]
    for site in kernels.sites:
        with kernels.without(site):
            assert any(
                not torch.equal(problem.run(kernels, *run), result)
                for problem, result in zip(problems, whole, strict=True)
                for run in runs
            ), f"nothing is missed without {site}"
