"""Products of heads with adapters against float64, on every instruction set of this machine."""

from typing import Any

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.cpu.test_adapters import ISAS, LOGIT_ROWS, MAX_RANK, ONE_COLUMN, TOKEN_ROWS
from tests.cpu.test_adapters_of_experts import operand
from tests.helpers.gemm_problem import generator, relative_error
from tests.helpers.kernel_runner import KernelRunner, Operands, weight
from tests.helpers.site_adapters import NONE, Factor, random_factor
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32


class Adapter:
    """A and B of each head, of which one or the other is the same for all heads."""

    def __init__(self, seed: int, heads: int, columns: int, rows: int, rank: int, shared: str, dtype: str) -> None:
        self.rank, self.rows, self.shared = rank, rows, shared
        self.a = [random_factor(rank, columns, dtype, seed, 1, head * (shared != "a")) for head in range(heads)]
        self.b = [random_factor(rows, rank, dtype, seed, 2, head * (shared != "b")) for head in range(heads)]

    def change(self) -> tuple[Any, ...]:
        """The form that `_cpu.Adapters.load` takes."""
        heads, rest = len(self.a), -self.rank % 16
        a = [
            Factor(
                torch.nn.functional.pad(one.values, (0, 0, 0, rest)),
                None if one.scale is None else torch.nn.functional.pad(one.scale, (0, rest)),
            )
            for one in self.a
        ]
        a, b = (factors[: 1 if self.shared == name else heads] for name, factors in (("a", a), ("b", self.b)))
        pieces = [(0, self.rows, self.rank, 0, operand(b))]
        return 0, self.rank + rest, operand(a), pieces, None, None, range(heads), self.shared

    def applied(self, x: torch.Tensor) -> torch.Tensor:
        """Computes what rows x, [rows, heads, columns], get in float64: [rows, heads · N]."""
        heads = [x[:, h] @ a.numbers().T @ b.numbers().T for h, (a, b) in enumerate(zip(self.a, self.b, strict=True))]
        return torch.cat(heads, dim=1)


class Problem:
    """Rows x with an adapter or none each, and the weights of all heads."""

    def __init__(self, tokens: int, heads: int, columns: int, rows: int) -> None:
        self.heads, self.columns, self.rows = heads, columns, rows
        self.x = torch.randn(tokens, heads * columns, generator=generator(tokens, 1)).bfloat16()
        self.weight = torch.randn(heads * rows, columns, generator=generator(rows, 2)).bfloat16()
        sizes = heads, columns, rows
        self.adapters = [
            Adapter(1, *sizes, 1, "a", "bf16"),
            Adapter(2, *sizes, 23, "b", "i8"),
            Adapter(3, *sizes, 64, "b", "bf16"),
        ]
        self.slots = [(token * 3 + 1) % 5 - 1 for token in range(tokens)]
        self.slots = [NONE if slot == 3 else slot for slot in self.slots]

    def run(
        self, isa: str, *, dtype: str = "f32", threads: int = 1, rows: slice = slice(None), has_adapters: bool = True
    ) -> torch.Tensor:
        x, slots = self.x[rows], np.array(self.slots[rows], np.int32)
        inputs = {
            "adapter_slots": (slots, TOKEN_ROWS, ONE_COLUMN),
            "logit_rows": (np.zeros(1, np.int32), LOGIT_ROWS, ONE_COLUMN),
        }
        runner = KernelRunner(isa, threads, tokens=len(x), inputs=inputs)
        out = runner.buffer(len(x), self.heads * self.rows, dtype)
        operands: Operands = {"x": runner.filled(x), "weight": weight(self.weight, "r16"), "out": out}
        if has_adapters:
            size = self.rows, self.columns, self.heads
            table = _cpu.Adapters([size], len(self.adapters), MAX_RANK, len(x), 1, 0)
            for slot, adapter in enumerate(self.adapters):
                table.load(slot, [adapter.change()])
            added: Operands = {
                "adapters": _cpu.OperandSpec.adapters(table, 0),
                "delta": runner.buffer(len(x), self.heads * self.rows, "f32"),
            }
            runner.add("head_adapter_delta@1", {"x": operands["x"], **added})
            operands |= added
        runner.call("head_gemm_bf16@1", operands, {"heads": self.heads})
        return runner.read(out)

    def expected(self) -> torch.Tensor:
        x = self.x.double().view(-1, self.heads, self.columns)
        y = torch.einsum("thk,hnk->thn", x, self.weight.double().view(self.heads, self.rows, -1)).flatten(1)
        for slot, adapter in enumerate(self.adapters):
            own = [row for row, of_row in enumerate(self.slots) if of_row == slot]
            y[own] += adapter.applied(x[own])
        return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 6, 33])
@pytest.mark.parametrize(("heads", "columns", "rows"), [(3, 64, 48), (5, 16, 32), (2, 192, 80)])
def test_products_of_heads(isa: str, tokens: int, heads: int, columns: int, rows: int) -> None:
    problem = Problem(tokens, heads, columns, rows)
    right = problem.expected()
    assert relative_error(problem.run(isa, threads=2), right) < GEMM_F32
    assert relative_error(problem.run(isa, dtype="bf16"), right) < GEMM_BF16_OUT


@pytest.mark.parametrize("isa", ISAS)
def test_bits_of_a_row_depend_on_its_own_adapter_alone(isa: str) -> None:
    problem = Problem(40, 3, 64, 48)
    together = problem.run(isa)
    for first, count, threads in (0, 1, 1), (3, 1, 2), (7, 2, 3), (9, 31, 2):
        rows = slice(first, first + count)
        assert torch.equal(problem.run(isa, threads=threads, rows=rows), together[rows])
    base = [row for row, slot in enumerate(problem.slots) if slot == NONE]
    without = problem.run(isa, has_adapters=False)
    assert torch.equal(together[base], without[base]), "rows without an adapter have the base's bits"
    problem.slots = [NONE] * 40
    assert torch.equal(problem.run(isa), without)


def test_operands_that_do_not_fit() -> None:
    runner = KernelRunner(ISAS[0], tokens=2)
    x = runner.filled(torch.ones(2, 128).bfloat16())
    delta = runner.buffer(2, 96, "f32")

    def site(*sizes: int) -> _cpu.OperandSpec:
        return _cpu.OperandSpec.adapters(_cpu.Adapters([sizes], 1, MAX_RANK, 2, 1, 0), 0)  # type: ignore[list-item]

    for sizes, text in [
        ((48, 64, 0), "no layer of heads"),
        ((47, 64, 2), "multiples of 16"),
        ((48, 64, 3), "must have 192 columns"),
        ((32, 64, 2), "must have 64 columns"),
    ]:
        with pytest.raises(ValueError, match=text):
            runner.add("head_adapter_delta@1", {"x": x, "delta": delta, "adapters": site(*sizes)})
    operands: Operands = {
        "x": x,
        "weight": weight(torch.ones(96, 64).bfloat16(), "r16"),
        "out": runner.buffer(2, 96, "f32"),
        "delta": delta,
    }
    for sizes in (48, 64, 0), (48, 64, 4), (96, 64, 2):
        with pytest.raises(ValueError, match="for a weight of another size"):
            runner.add("head_gemm_bf16@1", {**operands, "adapters": site(*sizes)}, {"heads": 2})
