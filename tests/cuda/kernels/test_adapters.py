"""Products with adapters on CUDA, in emulation, against float64."""

import numpy as np
import pytest
import torch

from enginewright.runtime.device.cuda.adapters import NO_TABLES
from tests.emulator.kernels import EmulatedKernels, Kernels
from tests.helpers.cuda_adapters import LOGIT_ROWS, AdaptedGemm, expected
from tests.helpers.cuda_gemm import Gemm, Problem, compiled, error, name_of
from tests.helpers.site_adapters import NONE, Adapter, random_adapter, some_adapters
from tests.tolerances import GEMM_F32

# Two splits of K and a tail; N of no round number, the pieces of which are no multiples of 4 or 16.
BF16 = Gemm("bf16", 74, 577, bias=True)
CASES = [
    (BF16, (1, 7, 33)),
    (Gemm("bf16", 74, 577, "swiglu", bias=True), (3, 66)),
    (Gemm("w8a16", 1101, 130), (2,)),  # three blocks of outputs
    (Gemm("w8a8", 74, 577, "swiglu"), (5,)),
    (Gemm("fp8a8", 74, 577, bias=True, group=128), (9, 65)),
    (Gemm("w4a16", 74, 330, group=32, zeros=True), (2,)),
]
CALLS = [(gemm, tokens) for gemm, counts in CASES for tokens in counts]


def slots_of(tokens: int, count: int) -> list[int]:
    """Slots of rows: all, and none, in no order."""
    return [(row * 5 + 1) % (count + 1) - 1 for row in range(tokens)]


@pytest.mark.parametrize(("gemm", "tokens"), CALLS, ids=[name_of(*call) for call in CALLS])
def test_products_with_adapters(gemm: Gemm, tokens: int) -> None:
    check(gemm, tokens)


def check(gemm: Gemm, tokens: int) -> None:
    """Checks rows of all adapters of `some_adapters` and of none, and that the latter have the base's bits."""
    problem, adapters = Problem(gemm, tokens), some_adapters(gemm.rows, gemm.columns)
    slots = slots_of(tokens, len(adapters))
    result = AdaptedGemm(gemm, adapters).run(problem, slots)
    assert error(result, expected(problem, adapters, slots)) < GEMM_F32
    base, rows = problem.run(compiled([(gemm, tokens)])), [row for row, slot in enumerate(slots) if slot == NONE]
    assert torch.equal(result[rows], base[rows])


@pytest.mark.parametrize("dtype", ["bf16", "i8"])
@pytest.mark.parametrize("rank", [1, 7, 16, 64, 320])
def test_ranks(rank: int, dtype: str) -> None:
    """Rows of one adapter alone, more of them than a tile has."""
    adapters = [random_adapter(rank, 577, [(0, 30, rank), (30, 44, 5)], dtype)]
    problem, slots = Problem(BF16, 11), [0] * 11
    result = AdaptedGemm(BF16, adapters).run(problem, slots)
    assert error(result, expected(problem, adapters, slots)) < GEMM_F32


@pytest.fixture(scope="module")
def adapted() -> tuple[AdaptedGemm, list[Adapter]]:
    adapters = some_adapters(BF16.rows, BF16.columns)
    return AdaptedGemm(BF16, adapters), adapters


def test_bits_of_a_row_depend_on_its_own_adapter_alone(adapted: tuple[AdaptedGemm, list[Adapter]]) -> None:
    gemm, adapters = adapted
    problem, slots = Problem(BF16, 33), [max(row % 9 - 4, NONE) for row in range(18)] + [1] * 15
    together = gemm.run(problem, slots)
    assert error(together, expected(problem, adapters, slots)) < GEMM_F32
    for first, count in (0, 1), (1, 1), (2, 3), (5, 28):
        rows = slice(first, first + count)
        assert torch.equal(gemm.run(problem, slots, rows), together[rows])
    others = AdaptedGemm(BF16, [*reversed(adapters)], max_rank=335)  # other slots, and other places in memory
    there = [NONE if slot == NONE else len(adapters) - 1 - slot for slot in slots]
    assert torch.equal(others.run(problem, there), together)


def test_a_step_without_adapters_has_the_bits_of_the_base(adapted: tuple[AdaptedGemm, list[Adapter]]) -> None:
    problem = Problem(BF16, 3)
    assert torch.equal(adapted[0].run(problem, [NONE] * 3), problem.run(compiled([(BF16, 3)])))


def test_a_slot_is_loaded_again(adapted: tuple[AdaptedGemm, list[Adapter]]) -> None:
    """Another adapter in a slot, and one that changes other layers only."""
    _, adapters = adapted
    gemm, problem = AdaptedGemm(BF16, adapters), Problem(BF16, 2)
    gemm.adapters.load(2, {"weight": adapters[1].site_adapter(BF16.rows)})
    gemm.adapters.load(1, {})
    base = problem.run(compiled([(BF16, 2)]))
    result = gemm.run(problem, [2, 1])
    assert error(result, expected(problem, [adapters[1]], [0, NONE])) < GEMM_F32
    assert torch.equal(result[1], base[1])


def test_rows_of_logits() -> None:
    adapters = some_adapters(BF16.rows, BF16.columns)
    problem, slots = Problem(BF16, 5), [3, 0, NONE, 1, 0]
    result = AdaptedGemm(BF16, adapters, LOGIT_ROWS).run(problem, slots)
    assert error(result, expected(problem, adapters, slots)) < GEMM_F32


def test_tables_of_a_step(adapted: tuple[AdaptedGemm, list[Adapter]]) -> None:
    slots = np.array([2, NONE, 0, *[2] * 9, 0], np.int32)
    logit_rows = np.array([1, 2], np.int32)
    tables = adapted[0].adapters.tables(slots, logit_rows)
    assert tables["adapter_rows"].tolist() == [2, 12, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert tables["adapter_tiles"].tolist() == [3, 0, 0, 2, 2, 2, 8, 2, 10, 2]
    assert tables["adapter_logit_slots"].tolist() == [NONE, 0]
    assert tables["adapter_logit_rows"].tolist() == [1] and tables["adapter_logit_tiles"].tolist() == [1, 0, 0, 1]
    assert adapted[0].adapters.tables(slots, logit_rows) is tables
    assert adapted[0].adapters.tables(np.full(3, NONE, np.int32), logit_rows) is NO_TABLES


@pytest.mark.skipif(Kernels is not EmulatedKernels, reason="a GPU's barriers cannot be left out")
def test_each_barrier_is_missed() -> None:
    # More ranks than one block has 16 of in turn, and two pieces.
    adapters = [random_adapter(1, 577, [(0, 37, 41), (37, 37, 33)])]
    gemm, problem, slots = AdaptedGemm(BF16, adapters), Problem(BF16, 3), [0, 0, 0]
    right = gemm.run(problem, slots)
    assert gemm.barriers()
    for site in gemm.barriers():
        with gemm.without(site):
            missed = any(not torch.equal(gemm.run(problem, slots), right) for _ in range(6))
        assert missed, f"nothing is missed without {site}"
