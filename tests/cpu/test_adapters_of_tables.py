"""Embeddings with adapters against float64, with the same bits on every instruction set of this machine."""

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.cpu.test_adapters import ISAS, LOGIT_ROWS, MAX_RANK, ONE_COLUMN, TOKEN_ROWS
from tests.helpers.gemm_problem import generator, relative_error
from tests.helpers.kernel_runner import KernelRunner, Operands
from tests.helpers.site_adapters import NONE, Adapter, Piece, Replaced, random_factor
from tests.tolerances import GEMM_F32

TOKENS, HIDDEN, SCALE = 307, 74, 6.25  # rows and columns of the table


def factors(seed: int, rank: int, dtype: str) -> list[Piece]:
    a, b = random_factor(rank, TOKENS, dtype, seed, 1), random_factor(HIDDEN, rank, dtype, seed, 2)
    return [Piece(0, a, b)]


def rows(seed: int, ids: list[int], dtype: str) -> Replaced:
    return Replaced(torch.tensor(ids), random_factor(len(ids), HIDDEN, dtype, seed, 3))


ADAPTERS = [
    Adapter(TOKENS, factors(1, 1, "bf16")),
    Adapter(TOKENS, factors(2, 23, "i8"), replaced=rows(2, [0, 5, 17, 306], "i8")),
    Adapter(TOKENS, [], replaced=rows(3, [100], "bf16")),
    Adapter(TOKENS, factors(4, 320, "bf16"), replaced=rows(4, list(range(TOKENS)), "bf16")),
]
IDS = [0, 5, 17, 306, 100, 3, 5, 99, 101, 1, 305]


def run(isa: str, tokens: list[int], slots: list[int], x: torch.Tensor, threads: int = 1) -> torch.Tensor:
    inputs = {
        "tokens": (np.array(tokens, np.int32), TOKEN_ROWS, ONE_COLUMN),
        "adapter_slots": (np.array(slots, np.int32), TOKEN_ROWS, ONE_COLUMN),
        "logit_rows": (np.zeros(1, np.int32), LOGIT_ROWS, ONE_COLUMN),
    }
    runner = KernelRunner(isa, threads, tokens=len(tokens), inputs=inputs)
    table = _cpu.Adapters([(TOKENS, HIDDEN, 0)], len(ADAPTERS), MAX_RANK, len(tokens), 1, 0, [0])
    for slot, adapter in enumerate(ADAPTERS):
        replaced = [] if adapter.replaced is None else [adapter.replaced.change()]
        table.load(slot, [adapter.change()], replaced)
    out = runner.filled(x)
    operands: Operands = {"adapters": _cpu.OperandSpec.adapters(table, 0), "out": out}
    runner.call("adapter_embed@1", {"tokens": _cpu.OperandSpec.step("tokens"), **operands}, {"scale": SCALE})
    return runner.read(out)


def expected(tokens: list[int], slots: list[int], x: torch.Tensor) -> torch.Tensor:
    y = x.double()
    for row, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
        if slot == NONE:
            continue
        adapter = ADAPTERS[slot]
        for piece in adapter.pieces:
            y[row] += SCALE * piece.b.numbers() @ piece.a.numbers()[:, token]
        if adapter.replaced is not None and token in adapter.replaced.ids:
            y[row] = SCALE * adapter.replaced.rows.numbers()[adapter.replaced.ids.tolist().index(token)]
    return y


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_with_adapters(isa: str) -> None:
    tokens = IDS * 4
    slots = [number % 5 - 1 for number in range(len(tokens))]
    x = torch.randn(len(tokens), HIDDEN, generator=generator(1))
    together = run(isa, tokens, slots, x, threads=3)
    assert relative_error(together, expected(tokens, slots, x)) < GEMM_F32
    assert torch.equal(together, run(ISAS[-1], tokens, slots, x)), "the same bits by all instruction sets"
    base = [row for row, slot in enumerate(slots) if slot == NONE]
    assert torch.equal(together[base], x[base])
    for row in range(0, len(tokens), 5):
        own = slice(row, row + 1)
        assert torch.equal(run(isa, tokens[own], slots[own], x[own]), together[own])
    assert torch.equal(run(isa, tokens, [NONE] * len(tokens), x), x)


def test_tokens_and_operands_that_do_not_fit() -> None:
    x = torch.zeros(2, HIDDEN)
    for token in -1, TOKENS:
        with pytest.raises(ValueError, match=f"is {token}, outside 0 … {TOKENS - 1}"):
            run(ISAS[0], [3, token], [0, NONE], x)
    tokens = np.zeros(2, np.int32), TOKEN_ROWS, ONE_COLUMN
    runner = KernelRunner(ISAS[0], tokens=2, inputs={"tokens": tokens})
    out = runner.filled(x)
    for tables, columns, text in ([], HIDDEN, "of no table"), ([0], HIDDEN - 1, f"must have {HIDDEN - 1} columns"):
        table = _cpu.Adapters([(TOKENS, columns, 0)], 1, MAX_RANK, 2, 1, 0, tables)
        operands: Operands = {"adapters": _cpu.OperandSpec.adapters(table, 0), "out": out}
        with pytest.raises(ValueError, match=text):
            runner.add("adapter_embed@1", {"tokens": _cpu.OperandSpec.step("tokens"), **operands}, {"scale": 1.0})


def test_tables_that_do_not_fit() -> None:
    for sites, tables, text in ([(9, 16, 0)], [1], "no site"), ([(9, 16, 2)], [0], "no experts"):
        with pytest.raises(ValueError, match=text):
            _cpu.Adapters(sites, 1, MAX_RANK, 2, 1, 0, tables)
    table = _cpu.Adapters([(TOKENS, HIDDEN, 0)], 1, MAX_RANK, 2, 1, 0, [0])
    empty = np.zeros(0, np.uint8), None
    with pytest.raises(ValueError, match="no bias and no gain"):
        table.load(0, [(0, 0, empty, [], np.zeros(TOKENS, np.float32), None, (), "")])
    piece = 60, HIDDEN - 59, 1, 0, (np.zeros(16 * 2, np.uint8), None)
    with pytest.raises(ValueError, match="overlap, or leave their layer"):
        table.load(0, [(0, 16, (np.zeros(16 * TOKENS * 2, np.uint8), None), [piece], None, None, (), "")])
