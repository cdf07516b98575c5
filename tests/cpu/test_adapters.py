"""Products with adapters against float64, on every instruction set of this machine."""

from typing import Any

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.helpers.gemm_problem import KERNELS, Problem, relative_error
from tests.helpers.kernel_runner import Buffer, KernelRunner
from tests.helpers.site_adapters import NONE, Adapter, random_adapter, some_adapters, with_rows
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32

ISAS = _cpu.isa_names()
MAX_RANK = 352
ONE_COLUMN = (1, 0, 0, 0, 0, 0)
TOKEN_ROWS, LOGIT_ROWS = (0, 1, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0)


def run(
    problem: Problem, isa: str, adapters: list[Adapter], slots: list[int], *, dtype: str = "f32", threads: int = 1,
    rows: slice = slice(None),
) -> torch.Tensor:  # fmt: skip
    """The kernel's result for some rows of a problem, whose adapters are those of `slots`."""
    x, own = problem.x[rows], np.array(slots[rows], np.int32)
    inputs = {
        "adapter_slots": (own, TOKEN_ROWS, ONE_COLUMN),
        "logit_rows": (np.zeros(1, np.int32), LOGIT_ROWS, ONE_COLUMN),
    }
    runner = KernelRunner(isa, threads, tokens=len(x), inputs=inputs, arena_bytes=1 << 23)
    table = _cpu.Adapters([(problem.rows, x.shape[1], 0)], len(adapters), MAX_RANK, len(x), 1, 0)
    for slot, adapter in enumerate(adapters):
        table.load(slot, [adapter.change()], [] if adapter.replaced is None else [adapter.replaced.change()])
    out = runner.buffer(len(x), problem.outputs, dtype)
    operands, attributes = problem.call_of(runner, x)
    delta: dict[str, Buffer | _cpu.OperandSpec] = {
        "adapters": _cpu.OperandSpec.adapters(table, 0),
        "delta": runner.buffer(len(x), problem.rows, "f32"),
    }
    read = {name: operands[name] for name in ("x", "x_scale") if name in operands}
    shrunk = runner.buffer(len(x), MAX_RANK, "f32")
    group = {"group": problem.group} if "x_scale" in read else {}
    gated = int(problem.epilogue != "none")
    runner.add("adapter_delta@1", {**read, **delta, "shrunk": shrunk}, {**group, "gated": gated})
    runner.call(problem.kernel, {**operands, **delta, "out": out}, attributes)
    return runner.read(out)


def expected(problem: Problem, adapters: list[Adapter], slots: list[int]) -> torch.Tensor:
    y, x = problem.product(), problem.inputs()
    for slot, adapter in enumerate(adapters):
        rows = [row for row, own in enumerate(slots) if own == slot]
        y[rows] = adapter.applied(y[rows], x[rows])
    return problem.finished(y)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_products_with_adapters(isa: str, kernel: str, tokens: int, epilogue: str) -> None:
    problem = Problem(kernel, tokens, 74, 577, epilogue, bias=tokens % 2 == 1)
    adapters = some_adapters(74, 577)
    slots = [(row * 5 + 1) % 6 - 1 for row in range(tokens)]
    right = expected(problem, adapters, slots)
    assert relative_error(run(problem, isa, adapters, slots, threads=2), right) < GEMM_F32
    assert relative_error(run(problem, isa, adapters, slots, dtype="bf16"), right) < GEMM_BF16_OUT


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_bits_of_a_row_depend_on_its_own_adapter_alone(isa: str, kernel: str, epilogue: str) -> None:
    problem, adapters = Problem(kernel, 33, 130, 323, epilogue), some_adapters(130, 323)
    slots = [max(row % 9 - 4, -1) for row in range(28)] + [1] * 5  # some with rows that pass alone, some four at once
    together = run(problem, isa, adapters, slots)
    for first, count, threads in (0, 1, 1), (1, 1, 2), (2, 3, 3), (5, 28, 2), (9, 2, 3), (31, 2, 2):
        rows = slice(first, first + count)
        assert torch.equal(run(problem, isa, adapters, slots, threads=threads, rows=rows), together[rows])
    base = [row for row, slot in enumerate(slots) if slot == NONE]
    assert torch.equal(together[base], problem.run(isa, "f32")[base]), "rows without an adapter have the base's bits"


def with_rows_of_their_own(rows: int, columns: int) -> list[Adapter]:
    """Adapters with one row in place of the weight's, with some and other changes, with all of them."""
    plain, biased, long, vectors, _ = some_adapters(rows, columns)
    return [
        with_rows(Adapter(columns, []), rows, [rows - 1], "bf16"),
        with_rows(plain, rows, [0, 1, 17, 31, rows // 2, rows // 2 + 1], "i8"),
        with_rows(biased, rows, list(range(3, rows, 2)), "i8"),
        with_rows(long, rows, list(range(rows)), "bf16"),
        with_rows(vectors, rows, list(range(rows // 3)), "i8"),
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("tokens", [1, 7, 33])
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_rows_of_the_weight_that_adapters_replace(isa: str, kernel: str, tokens: int, epilogue: str) -> None:
    """Also the same bits for a row alone, on any number of threads."""
    problem = Problem(kernel, tokens, 74, 577, epilogue)
    adapters = with_rows_of_their_own(74, 577)
    slots = [(row * 5 + 1) % 6 - 1 for row in range(tokens - tokens // 3)] + [3] * (tokens // 3)
    together = run(problem, isa, adapters, slots, threads=3)
    assert relative_error(together, expected(problem, adapters, slots)) < GEMM_F32
    for row in range(0, tokens, 4):
        alone = run(problem, isa, adapters, slots, rows=slice(row, row + 1))
        assert torch.equal(alone, together[row : row + 1])
    base = [row for row, slot in enumerate(slots) if slot == NONE]
    assert torch.equal(together[base], problem.run(isa, "f32")[base])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_of_many_rows(isa: str, kernel: str) -> None:
    """A layer as wide as a head, whose results are written past the caches from the twelfth row on."""
    problem = Problem(kernel, 15, (1 << 14) + 5, 65)
    plain, biased, *_ = some_adapters(problem.rows, 65)
    adapters = [plain, biased, with_rows(Adapter(65, []), problem.rows, [0, 999, problem.rows - 1], "bf16")]
    slots = [row % 4 - 1 for row in range(15)]
    together = run(problem, isa, adapters, slots, threads=2)
    assert relative_error(together, expected(problem, adapters, slots)) < GEMM_F32
    for row in 2, 14:
        own = slice(row, row + 1)
        assert torch.equal(run(problem, isa, adapters, slots, rows=own), together[own])


@pytest.mark.parametrize(
    ("ids", "count", "rows", "text"),
    [
        ([0, 74], 2, 2, "not in order, or outside"),
        ([-1, 3], 2, 2, "not in order, or outside"),
        ([5, 5], 2, 2, "not in order, or outside"),
        ([7, 5], 2, 2, "not in order, or outside"),
        ([5], 2, 2, "has 4 bytes"),
        ([5, 7], 2, 17, "bytes, but its shape takes"),
        ([], 0, 0, "replaces no rows"),
        (list(range(75)), 75, 75, "replaces no rows, or more"),
        ([3], 1 << 62, 1, "or more than there are"),
    ],
)
def test_replaced_rows_that_do_not_fit(ids: list[int], count: int, rows: int, text: str) -> None:
    table = _cpu.Adapters([(74, 20, 0)], 1, MAX_RANK, 1, 1, 0)
    factor = np.zeros(-(-rows // 16) * 16 * 20 * 2, np.uint8), None
    with pytest.raises(ValueError, match=text):
        table.load(0, [], [(0, count, np.array(ids, np.int32), factor)])


@pytest.mark.parametrize("isa", ISAS)
def test_a_step_without_adapters_has_the_bits_of_the_base(isa: str) -> None:
    problem = Problem("gemm_bf16@1", 3, 74, 130)
    for slots in [NONE] * 3, [4, NONE, 4]:  # the adapter of slot 4 changes nothing
        assert torch.equal(run(problem, isa, some_adapters(74, 130), slots), problem.run(isa, "f32"))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pieces": [(0, 75, 1, 0)]}, "overlap, or leave their layer"),
        ({"pieces": [(0, 9, 1, 0), (8, 9, 1, 0)]}, "overlap, or leave their layer"),
        ({"pieces": [(0, 9, 2, 15)]}, "no such ranks"),
        ({"pieces": [(0, 9, 1, -1)]}, "no such ranks"),
        ({"pieces": [(0, 0, 1, 0)]}, "is empty"),
        ({"rank": 8}, "multiple of 16"),
        ({"rank": 368}, "rank 368, and at most 352 is possible"),
        ({"a": np.zeros(3, np.uint8)}, "has 3 bytes"),
        ({"scale": np.zeros(16, np.float32)}, "has 640 bytes, but its shape takes 320"),
        ({"a": np.zeros(320, np.int8), "scale": np.zeros(15, np.float32)}, "has 60 bytes"),
        ({"bias": np.zeros(73, np.float32)}, "has 292 bytes"),
        ({"site": 1}, "no site 1"),
        ({"slot": 2}, "no slot 2"),
        ({"experts": [0]}, "expert 0, and its layer has 0"),
    ],
)
def test_adapters_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    table = _cpu.Adapters([(74, 20, 0)], 2, MAX_RANK, 1, 1, 0)
    rank = change.get("rank", 16)
    a = change.get("a", np.zeros(rank * 20 * 2, np.uint8))
    pieces = [
        (begin, count, own, first, (np.zeros(max(-(-count // 16) * 16 * own * 2, 0), np.uint8), None))
        for begin, count, own, first in change.get("pieces", [(0, 9, 1, 0)])
    ]
    with pytest.raises(ValueError, match=text):
        factor = a, change.get("scale")
        of_site = change.get("site", 0), rank, factor, pieces, change.get("bias"), None, change.get("experts", ()), ""
        table.load(change.get("slot", 0), [of_site])


@pytest.mark.parametrize(("slot", "text"), [(1, "slot 1, where none is loaded"), (2, "slot 2"), (-2, "slot -2")])
def test_slots_of_a_step_that_do_not_exist(slot: int, text: str) -> None:
    problem = Problem("gemm_bf16@1", 3, 74, 130)
    with pytest.raises(ValueError, match=text):
        run_with_one_of_two(problem, [0, NONE, slot])


def run_with_one_of_two(problem: Problem, slots: list[int]) -> None:
    inputs = {
        "adapter_slots": (np.array(slots, np.int32), TOKEN_ROWS, ONE_COLUMN),
        "logit_rows": (np.zeros(1, np.int32), LOGIT_ROWS, ONE_COLUMN),
    }
    runner = KernelRunner("portable", tokens=3, inputs=inputs)
    table = _cpu.Adapters([(74, 130, 0)], 2, 16, 3, 1, 0)
    table.load(0, [random_adapter(1, 130, [(0, 74, 3)]).change()])
    operands, _ = problem.call_of(runner, problem.x)
    delta = {
        "adapters": _cpu.OperandSpec.adapters(table, 0),
        "delta": runner.buffer(3, 74, "f32"),
        "shrunk": runner.buffer(3, 16, "f32"),
    }
    runner.call("adapter_delta@1", {"x": operands["x"], **delta}, {"gated": 0})
