"""Hopper's products of a warpgroup: on its GPU, and in our reading of the PTX manual elsewhere."""

import numpy as np
import pytest
import torch

from tests.emulator.kernels import SCHEDULES, SOURCES, EmulatedKernels, EmulationError, Kernels

SOURCE = "../../tests/helpers/wgmma_product.cuh"  # from csrc/cuda
KINDS = {"bf16": torch.bfloat16, "bf16_transposed": torch.bfloat16, "int8": torch.int8, "e4m3": torch.float8_e4m3fn}
SHAPES = [(kind, tiles, row_bytes) for kind in KINDS for tiles in (8, 16) for row_bytes in (64, 128)]
FAULTS = {
    "writes_a": "A was written while wgmma read it",
    "writes_b": "B was written while wgmma read it",
    "writes_d": "d was written while wgmma added to it",
    "lanes_differ": "lanes of a warp begin different wgmma",
    "warps_differ": "warps of a warpgroup begin different wgmma",
}
MISSED = {  # without what → what is said
    "fence_copies": "wgmma reads what a copy brought, without a fence",
    "sync_threads": "wgmma reads what a copy brought, without a barrier",
    "wgmma_fence": "wgmma begins without wgmma_fence",
    "wgmma_wait<1>": "A was written while wgmma read it",
    "wgmma_wait<0>": "without having waited for wgmma",
}


def kernel(kind: str, tiles: int, row_bytes: int, fault: str = "none") -> str:
    return f"wgmma_product<Kind::{kind}, {tiles}, {row_bytes}, Fault::{fault}>"


def matrices(kind: str, tiles: int, row_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tiles + row_bytes)
    dtype, columns = KINDS[kind], row_bytes // KINDS[kind].itemsize

    def of(rows: int) -> torch.Tensor:  # small integers: every sum is exact
        return torch.randint(-8, 9, (rows, columns), generator=generator).to(dtype)

    return of(128), of(8 * tiles)


def run(
    kernels: Kernels | EmulatedKernels, name: str, a: torch.Tensor, b: torch.Tensor, schedule: str = "forward"
) -> np.ndarray:
    integers = a.dtype == torch.int8
    out = np.full((len(a) + 1, len(b)), -77, np.int32 if integers else np.float32)
    rows = b.T.contiguous() if "_transposed" in name else b
    operands = [x.view(torch.uint8).numpy() for x in (a, rows)]
    kernels.launch(name, [1], 256, operands[1].size, *operands, out, schedule=schedule)
    return out


@pytest.fixture(scope="module")
def kernels(on_hopper: None) -> Kernels:
    names = [kernel(*shape) for shape in SHAPES]
    return Kernels([(SOURCE, name) for name in names], sm=90)


@pytest.fixture(scope="module")
def faulty() -> EmulatedKernels:  # a GPU need not notice
    return EmulatedKernels([(SOURCE, kernel("bf16", 8, 128, fault)) for fault in ("none", *FAULTS, "reads_d")], sm=90)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_products(kernels: Kernels, shape: tuple[str, int, int]) -> None:
    a, b = matrices(*shape)
    expected = (a.double() @ b.double().T).numpy()
    for schedule in SCHEDULES:
        out = run(kernels, kernel(*shape), a, b, schedule)
        assert np.array_equal(out[:-1], expected) and (out[-1] == -77).all(), schedule


@pytest.mark.parametrize(("fault", "why"), FAULTS.items())
def test_what_a_kernel_must_not_do(faulty: EmulatedKernels, fault: str, why: str) -> None:
    a, b = matrices("bf16", 8, 128)
    for schedule in SCHEDULES:
        with pytest.raises(EmulationError, match=why):
            run(faulty, kernel("bf16", 8, 128, fault), a, b, schedule)


def test_sums_are_not_there_before_the_wait(faulty: EmulatedKernels) -> None:
    out = run(faulty, kernel("bf16", 8, 128, "reads_d"), *matrices("bf16", 8, 128))
    assert np.isnan(out[-1, 0]) and not np.isnan(out[:-1]).any()


def test_each_fence_and_wait_is_missed(faulty: EmulatedKernels) -> None:
    name, operands = kernel("bf16", 8, 128), matrices("bf16", 8, 128)
    run(faulty, name, *operands)
    lines = (SOURCES / SOURCE).read_text().splitlines()
    sites = {lines[int(site.partition(":")[2]) - 1].strip().partition("(")[0]: site for site in faulty.sites}
    assert sites.keys() == {"wait_copies<0>", *MISSED}
    for what, why in MISSED.items():
        with faulty.without(sites[what]), pytest.raises(EmulationError, match=why):
            run(faulty, name, *operands)
    with faulty.without(sites["wait_copies<0>"]):
        assert np.isnan(run(faulty, name, *operands)).any()
