"""Launches for a matrix product on each architecture."""

from dataclasses import replace
from itertools import combinations

import pytest
import torch

from enginewright.builder.cuda import Instance, compile_each
from enginewright.plan import Launch, Linear, linear
from enginewright.plugins.architectures import ARCHITECTURES, ArchSpec
from enginewright.plugins.gemm.gemm_bf16 import GEMM_BF16
from enginewright.plugins.gemm.gemm_format import FORMATS, GemmDesc
from enginewright.plugins.gemm.gemm_tiles import MANY, TILES, GemmConfig, configs, feature_blocks
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from enginewright.targets import CUDA, PTX, SMS
from tests.helpers.cuda_gemm import Gemm, Problem, compiled, error
from tests.tolerances import GEMM_F32

# Of an 8B Llama; of two layers of no round size; and of one that fills no GPU.
SIZES = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (30011, 1030), (6400, 600), (70, 30))
NARROW = Gemm("bf16", 70, 800, bias=True)
SPLITS = {1: 1, 2: 2, 132: 3}  # multiprocessors → parts that its K is divided into


def descs() -> list[GemmDesc]:
    return [
        GemmDesc(format, features, columns, gated=features == 28672, groups=groups, batch_invariant=invariant)
        for format in FORMATS.values()
        for features, columns in SIZES
        for groups in ((1, 2) if format.lines == 8 else (0, 1))
        for invariant in (False, True)
    ]


def both(arch: ArchSpec) -> tuple[ArchSpec, ...]:
    """The architecture with and without wgmma, where it has it."""
    return (arch, replace(arch, wgmma_gemm=True)) if arch.name == "sm_90a" else (arch,)


def test_each_architecture_that_is_compiled_for_is_known() -> None:
    assert list(ARCHITECTURES) == [*SMS, PTX]


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_each_number_of_tokens_has_one_kernel_that_fits(arch: ArchSpec) -> None:
    for each in both(arch):
        for desc in descs():
            tiles = TILES[desc.format.name]
            found = configs(desc, each, tiles)
            assert [one.low for one in found] == [1, *(one.high + 1 for one in found[:-1])] and found[-1].high == MANY
            assert all(one.stages >= 2 and one.threads <= 1024 for one in found), found
            for one in found:
                limit = each.shared_bytes if one.kernel == "gemm_wgmma" else 99 << 10
                assert one.shared_bytes <= limit, one


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda arch: arch.name)
def test_blocks_fill_the_multiprocessors_and_no_more(arch: ArchSpec) -> None:
    for desc in descs():
        tiles = TILES[desc.format.name]
        found, blocks = configs(desc, arch, tiles), feature_blocks(desc, tiles)
        assert found[0].splits == 1 or found[0].splits * blocks <= tiles.waves * arch.multiprocessors
        many = [one for one in found if one.kernel == "gemm_large"]
        if len(many) == 2:
            assert tiles_of(desc, many[1], many[0].high) < arch.multiprocessors
        if many[-1].low > tiles.small_tokens[-1] + 1:
            assert tiles_of(desc, many[-1], many[-1].low) >= arch.multiprocessors


def tiles_of(desc: GemmDesc, config: GemmConfig, tokens: int) -> int:
    return -(-desc.blocks_of_16 * 16 // config.features) * -(-tokens // config.tokens)


def call_on(*architectures: str) -> Call:
    rows = linear(tokens=1)
    operands = {
        "x": Matrix("bf16", rows, 600, 704, 640),
        "weight": Matrix("bf16", Linear(6400), 600, 600, 600, "r16"),
        "out": Matrix("f32", rows, 6400, 6464, 6400),
    }
    return Call(operands, {"epilogue": "none"}, architectures)


def test_a_call_for_several_architectures_has_the_launches_of_each() -> None:
    kernel = GEMM_BF16.kernels[CUDA]
    assert isinstance(kernel, CudaKernel) and kernel.scratch is not None
    together = kernel.launches(call_on("sm_86", "sm_90a"))

    def of(name: str) -> set[tuple[str, int, int]]:
        return {_told(one) for one in together if name in (one.architectures or (name,))}

    for name in ("sm_86", "sm_90a"):
        assert of(name) == {_told(one) for one in kernel.launches(call_on(name))}
    assert of("sm_86") != of("sm_90a")
    # Partial sums have room on each of them: where K is not split, there are none.
    rows = {name: kernel.scratch(call_on(*name))[1].constant for name in (("sm_86",), ("sm_90a",), ("sm_86", "sm_90a"))}
    assert list(rows.values()) == [0, 2 * 64, 2 * 64]


def _told(launch: Launch) -> tuple[str, int, int]:
    return launch.kernel, launch.low, launch.high


def test_products_are_right_on_gpus_of_each_size() -> None:
    """Few tokens, in emulation: as parts of K are added, there are no two with the same bits."""
    gemms = [_on(NARROW, multiprocessors) for multiprocessors in SPLITS]
    assert [gemm.launch(3).grid[1].rows.constant for gemm in gemms] == list(SPLITS.values())
    kernels = compiled([(gemm, 3) for gemm in gemms])
    results, expected = [Problem(gemm, 3).run(kernels) for gemm in gemms], Problem(NARROW, 3).expected()
    assert all(error(result, expected) < GEMM_F32 for result in results)
    assert not any(torch.equal(one, other) for one, other in combinations(results, 2))


def test_many_tokens_have_the_bits_of_few_on_a_small_gpu() -> None:
    gemm = replace(_on(NARROW, 2), batch_invariant=True)
    kernels = compiled([(gemm, 2), (gemm, 65)])
    assert torch.equal(Problem(gemm, 65).run(kernels)[:2], Problem(gemm, 2).run(kernels))


def _on(gemm: Gemm, multiprocessors: int) -> Gemm:
    return replace(gemm, arch=replace(gemm.arch, multiprocessors=multiprocessors))


def test_launches_of_each_architecture_compile() -> None:
    """Launches whose sizes no other architecture has compile without spills."""
    gemm = Gemm("bf16", 4096, 14336, to="bf16")
    wanted = [
        (name, Instance(f"{launch.kernel.partition('<')[0]}.cuh", launch.kernel))
        for name in SMS
        for launch in (replace(gemm, arch=ARCHITECTURES[name]).launch(tokens) for tokens in (8, 65))
    ]
    assert len({kernel for _, kernel in wanted}) > 2
    made = compile_each(wanted)
    assert all(one.local_bytes == 0 for one in made.values())
