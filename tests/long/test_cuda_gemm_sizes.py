"""Matrix products on CUDA in emulation, over shapes by chance: every launch of every format."""

import random
from dataclasses import replace

import pytest
import torch

from tests.cuda.kernels import test_gemm as short
from tests.emulator.kernels import SCHEDULES, Kernels
from tests.helpers.breadth import others, repeated
from tests.helpers.cuda_gemm import WEIGHTS, Gemm, Problem, compiled, error, name_of

OTHER_INVARIANT = others(short.INVARIANT, short.SOME_INVARIANT)
TOKENS = (1, 2, 3, 7, 8, 9, 16, 17, 33, 65, 130)


def shape(format: str, seed: int, wgmma: bool) -> Gemm:
    chance = random.Random(f"{format} {seed}")
    epilogue = chance.choice(("none", "none", "swiglu", "geglu"))
    grouped = format in ("w4a16", "mxfp4a16") or (format in ("fp8a16", "w8a8", "fp8a8") and chance.random() < 0.5)
    return Gemm(
        format,
        rows=chance.choice((1, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 200)) * (1 if epilogue == "none" else 2),
        columns=chance.choice((1, 31, 32, 63, 64, 65, 96, 127, 128, 129, 200, 257, 600, 1030)),
        epilogue=epilogue,
        bias=chance.random() < 0.5,
        group=chance.choice((32, 64, 96, 128, 256)) if grouped else 0,
        zeros=format == "w4a16" and chance.random() < 0.5,
        to=chance.choice(("f32", "bf16")),
        large=chance.random() < (0.5 if wgmma else 0.3),
        wgmma=wgmma,
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("format", WEIGHTS)
@pytest.mark.parametrize("wgmma", [False, True])
def test_products_of_any_shape(wgmma: bool, format: str, seed: int) -> None:
    if wgmma and not Kernels.are_for(90):
        pytest.skip("wgmma is Hopper's alone, and this is another GPU")
    gemm = shape(format, seed, wgmma)
    counts = [tokens for tokens in TOKENS if gemm.large or not wgmma or tokens > 64]
    kernels = compiled([(gemm, tokens) for tokens in counts], 90 if wgmma else 80)
    for tokens in counts:
        problem = Problem(gemm, tokens, seed)
        result, expected = problem.run(kernels, "random", seed), problem.expected()
        assert error(result, expected) < gemm.tolerance, (gemm, tokens)
        for schedule in SCHEDULES[:2]:
            assert torch.equal(problem.run(kernels, schedule), result), (gemm, tokens, schedule)


@pytest.mark.parametrize("sm", [89, 90])
def test_gpus_multiply_fp8_in_their_own_ways(sm: int) -> None:
    short.check_fp8(sm, [(gemm, tokens) for gemm, tokens in short.CALLS if gemm.format == "fp8a8"])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("format", WEIGHTS)
def test_a_token_has_the_same_bits_in_any_company(format: str, seed: int) -> None:
    gemm = replace(shape(format, seed, wgmma=False), batch_invariant=True, large=False)
    cases = [(gemm, tokens) for tokens in (*TOKENS, 64)] + [(replace(gemm, large=True), 130)]
    kernels = compiled(cases)
    *results, longest = [Problem(*case, seed).run(kernels) for case in cases]
    for (_, tokens), result in zip(cases, results, strict=False):
        assert torch.equal(result, longest[:tokens]), (gemm, tokens)


@pytest.fixture(scope="module")
def invariant_kernels() -> Kernels:
    return compiled([case for gemm in OTHER_INVARIANT for case in short.sizes(gemm)])


test_many_tokens_have_the_bits_of_few_if_batch_invariant = repeated(
    short.test_many_tokens_have_the_bits_of_few_if_batch_invariant,
    "gemm",
    OTHER_INVARIANT,
    ids=lambda gemm: name_of(gemm, 130),
)
