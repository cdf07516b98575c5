"""Matrix products on CUDA, in emulation, against float64 on what the engine file's bytes stand for."""

from dataclasses import replace

import pytest
import torch

from tests.emulator.kernels import SCHEDULES, EmulatedKernels, Kernels
from tests.helpers.cuda_gemm import Gemm, Problem, assert_each_site_is_missed, compiled, error, name_of
from tests.tolerances import GEMM_F32

# Rows and columns of no round number, with one split of K and with two; a last group that is not whole.
BF16 = Gemm("bf16", 70, 600, bias=True)
W4A16 = Gemm("w4a16", 70, 330, group=32, zeros=True)
W8A8 = Gemm("w8a8", 70, 600, bias=True)
FP8A8 = Gemm("fp8a8", 70, 600, bias=True)
CASES = [
    (BF16, (1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 65)),
    (Gemm("bf16", 2 * 37, 330, "swiglu", to="bf16"), (1, 3, 8, 66)),
    (Gemm("bf16", 2 * 150, 70, "swiglu", bias=True, large=True), (130,)),
    (Gemm("bf16", 70, 30), (1100,)),  # more tiles of tokens than a turn has
    (Gemm("w8a16", 150, 600, bias=True), (3,)),
    (Gemm("w8a16", 2 * 70, 70, "geglu", to="bf16"), (9, 65)),
    (Gemm("w8a16", 150, 200, bias=True, large=True), (130,)),
    (Gemm("fp8a16", 35, 530), (2, 65)),  # three outputs after the last four
    (Gemm("fp8a16", 2 * 37, 330, "geglu", group=32, to="bf16"), (5,)),
    (Gemm("fp8a16", 150, 330, bias=True, group=128, large=True), (65,)),
    (W4A16, (1, 7, 32, 65)),
    (Gemm("w4a16", 2 * 37, 600, "swiglu", bias=True, group=128, to="bf16"), (1, 17)),
    (Gemm("w4a16", 150, 200, group=64, zeros=True, large=True), (33, 130)),
    (Gemm("mxfp4a16", 150, 330, group=32, bias=True), (5, 16, 65)),
    (Gemm("mxfp4a16", 2 * 70, 130, "swiglu", group=32, large=True), (66,)),
    (W8A8, (1, 16, 65)),
    (Gemm("w8a8", 2 * 37, 330, "swiglu", group=32, to="bf16"), (3,)),
    (Gemm("w8a8", 70, 600, group=128), (12,)),
    (Gemm("w8a8", 150, 330, group=32, large=True), (33,)),
    (FP8A8, (1, 17, 65)),
    (Gemm("fp8a8", 2 * 37, 330, "swiglu", group=128, to="bf16"), (3, 66)),
    (Gemm("fp8a8", 2 * 150, 70, "geglu", bias=True, large=True), (130,)),
    (Gemm("fp8a8", 150, 330, bias=True, group=128, large=True), (33,)),
]
# One split of K, two, and three of which the last is a chunk.
INVARIANT = [
    replace(gemm, batch_invariant=True)
    for gemm in (
        Gemm("bf16", 70, 800, bias=True),
        Gemm("bf16", 2 * 150, 300, "swiglu"),
        Gemm("w8a16", 2 * 37, 600, "geglu"),
        Gemm("fp8a16", 150, 600, group=128),
        Gemm("w4a16", 70, 900, group=32, zeros=True),
        Gemm("mxfp4a16", 150, 600, group=32, bias=True),
        Gemm("w8a8", 70, 600, group=128),
        Gemm("fp8a8", 70, 600, bias=True),
        Gemm("fp8a8", 70, 800, group=128),
    )
]
SOME_INVARIANT = INVARIANT[::2]  # each number of splits, and scales of rows and of groups; tests/long has the others
CALLS = [(gemm, tokens) for gemm, counts in CASES for tokens in counts]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return compiled(CALLS)


@pytest.mark.parametrize(("gemm", "tokens"), CALLS, ids=[name_of(*call) for call in CALLS])
def test_products_are_those_of_the_packed_weights(kernels: Kernels, gemm: Gemm, tokens: int) -> None:
    problem = Problem(gemm, tokens)
    result = problem.run(kernels)
    assert error(result, problem.expected()) < gemm.tolerance
    for schedule in SCHEDULES[1:]:
        assert torch.equal(problem.run(kernels, schedule), result), schedule


@pytest.mark.parametrize("sm", [89, 90])
def test_gpus_multiply_fp8_in_their_own_ways(sm: int) -> None:
    check_fp8(sm, [(FP8A8, 65), (replace(FP8A8, group=128, bias=False), 17)])  # tests/long has all


def check_fp8(sm: int, calls: list[tuple[Gemm, int]]) -> None:
    """FP8 is multiplied as it is, or as f16; in code for SM 80, as bf16."""
    kernels = compiled(calls, sm)
    for gemm, tokens in calls:
        problem = Problem(gemm, tokens)
        result = problem.run(kernels)
        assert error(result, problem.expected()) < gemm.tolerance
        for schedule in SCHEDULES[1:]:
            assert torch.equal(problem.run(kernels, schedule), result), schedule


@pytest.mark.parametrize(
    ("gemm", "counts"),
    [(BF16, (1, 9, 17, 64)), (W4A16, (1, 7, 32)), (FP8A8, (1, 17))],
    ids=["bf16", "w4a16", "fp8a8"],
)
def test_few_tokens_have_the_same_bits_in_any_company(kernels: Kernels, gemm: Gemm, counts: tuple[int, ...]) -> None:
    results = [Problem(gemm, tokens).run(kernels) for tokens in counts]
    for tokens, result in zip(counts, results, strict=True):
        assert torch.equal(result, results[-1][:tokens])


@pytest.mark.parametrize("gemm", [BF16, W4A16], ids=["bf16", "w4a16"])
def test_tiles_of_all_sizes_give_the_same_bits(kernels: Kernels, gemm: Gemm) -> None:
    """Tiles for many tokens give the bits of those for few."""
    large = replace(gemm, large=True)
    result = Problem(large, 65).run(compiled([(large, 65)]))
    assert torch.equal(result, Problem(gemm, 65).run(kernels))


@pytest.fixture(scope="module")
def invariant_kernels() -> Kernels:
    return compiled([case for gemm in SOME_INVARIANT for case in sizes(gemm)])


def sizes(gemm: Gemm) -> list[tuple[Gemm, int]]:
    """Tiles of both sizes, few tokens, and what it would be with batch_invariant off."""
    return [(replace(gemm, large=True), 130), (gemm, 7), (gemm, 65), (replace(gemm, batch_invariant=False), 65)]


@pytest.mark.parametrize("gemm", SOME_INVARIANT, ids=lambda gemm: name_of(gemm, 130))
def test_many_tokens_have_the_bits_of_few_if_batch_invariant(invariant_kernels: Kernels, gemm: Gemm) -> None:
    problems = [Problem(*case) for case in sizes(gemm)]
    longest, *results = [problem.run(invariant_kernels) for problem in problems]
    assert error(longest, problems[0].expected()) < GEMM_F32
    assert [torch.equal(result, longest[: len(result)]) for result in results] == [True, True, False]


def test_integers_have_the_same_bits_in_any_company(kernels: Kernels) -> None:
    results = [Problem(W8A8, tokens).run(kernels) for tokens in (1, 16, 65)]
    assert torch.equal(results[0], results[2][:1]) and torch.equal(results[1], results[2][:16])


def test_each_barrier_is_missed(kernels: Kernels) -> None:
    """Each barrier is needed by one call or another: a block's small sums do not overlap its last stage."""
    problems = [Problem(BF16, 3), Problem(BF16, 64), Problem(W4A16, 32), Problem(W4A16, 65)]
    assert_each_site_is_missed(kernels, problems, seeds=8)
    assert bool(kernels.sites) == (Kernels is EmulatedKernels)
