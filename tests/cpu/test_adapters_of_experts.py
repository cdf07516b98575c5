"""Products of experts with adapters against float64, on every instruction set of this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from enginewright import _cpu
from enginewright.builder.lower.pack import PackedForm, pack
from tests.cpu.test_adapters import ISAS, LOGIT_ROWS, MAX_RANK, ONE_COLUMN, TOKEN_ROWS
from tests.helpers.gemm_problem import KERNELS, Problem, generator, relative_error, scales_of
from tests.helpers.kernel_runner import ONE_ROW, Buffer, KernelRunner, Operands, aligned, weight
from tests.helpers.site_adapters import NONE, Factor, random_factor
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32


@dataclass
class Piece:
    """Rows [begin, begin + count) of an expert's matrix, and the factors of what is added to those of each expert."""

    begin: int
    a: list[Factor]  # [rank, columns] of each changed expert
    b: list[Factor]  # [count, rank] of each


@dataclass
class Adapter:
    """The changes of some experts' matrices."""

    columns: int
    experts: list[int]
    pieces: list[Piece]

    def change(self) -> tuple[Any, ...]:
        """The form that `_cpu.Adapters.load` takes."""
        ranks = sum(len(piece.a[0].values) for piece in self.pieces)
        rest = Factor(torch.zeros(-ranks % 16, self.columns), torch.zeros(-ranks % 16))
        a = [joined([*(piece.a[i] for piece in self.pieces), rest]) for i in range(len(self.experts))]
        pieces, first = [], 0
        for piece in self.pieces:
            (count, rank), b = piece.b[0].values.shape, operand(piece.b)
            pieces.append((piece.begin, count, rank, first, b))
            first += rank
        return 0, ranks + len(rest.values), operand(a), pieces, None, None, self.experts, ""

    def applied(self, y: torch.Tensor, x: torch.Tensor, expert: int) -> torch.Tensor:
        """An expert's product of a row with this adapter, in float64: [N]."""
        if expert not in self.experts:
            return y
        index, y = self.experts.index(expert), y.clone()
        for piece in self.pieces:
            b = piece.b[index].numbers()
            y[piece.begin : piece.begin + len(b)] += b @ (piece.a[index].numbers() @ x)
        return y


def joined(factors: Sequence[Factor]) -> Factor:
    values = torch.cat([factor.values.to(factors[0].values.dtype) for factor in factors])
    if factors[0].scale is None:
        return Factor(values)
    return Factor(values, torch.cat([factor.scale for factor in factors if factor.scale is not None]))


def operand(factors: Sequence[Factor]) -> tuple[np.ndarray, np.ndarray | None]:
    """Factors of experts, one after another."""
    values = torch.stack([factor.values for factor in factors])
    form = PackedForm("bf16" if factors[0].scale is None else "i8", tuple(values.shape), "r16_columns")
    scales = [factor.scale for factor in factors if factor.scale is not None]
    return aligned(b"".join(pack(values, form))), torch.stack(scales).numpy() if scales else None


def random_adapter(
    seed: int, columns: int, experts: list[int], parts: list[tuple[int, int, int]], dtype: str = "bf16"
) -> Adapter:
    """parts: begin, count and rank of each piece."""
    pieces = [
        Piece(
            begin,
            [random_factor(rank, columns, dtype, seed, begin, expert, 1) for expert in experts],
            [random_factor(count, rank, dtype, seed, begin, expert, 2) for expert in experts],
        )
        for begin, count, rank in parts
    ]
    return Adapter(columns, experts, pieces)


class Mixture:
    """Tokens that have `top` of the experts each, with a matrix of [rows, columns] for each expert."""

    def __init__(
        self, kernel: str, tokens: int, experts: int, top: int, rows: int, columns: int, epilogue: str, bias: bool
    ) -> None:
        self.experts, self.top, self.rows, self.columns, self.epilogue = experts, top, rows, columns, epilogue
        self.all = Problem(kernel, tokens, experts * rows, columns, bias=bias)
        self.of_one = Problem(kernel, 1, rows, columns, epilogue)
        self.chosen = torch.stack([torch.randperm(experts, generator=generator(t, 9))[:top] for t in range(tokens)])

    def expected(self, adapters: list[Adapter], slots: list[int]) -> torch.Tensor:
        """The right results, [tokens, top, outputs], in float64."""
        y, x = self.all.product().view(-1, self.experts, self.rows), self.all.inputs()
        bias = self.all.vectors.get("bias", torch.zeros(self.experts * self.rows)).double().view(-1, self.rows)
        results = []
        for token, slot in enumerate(slots):
            for expert in self.chosen[token].tolist():
                own = y[token, expert]
                own = own if slot == NONE else adapters[slot].applied(own, x[token], expert)
                results.append(self.of_one.finished((own + bias[expert])[None]))
        return torch.cat(results).view(len(slots), self.top, -1)

    def run(
        self, isa: str, adapters: list[Adapter], slots: list[int], *, dtype: str = "f32", threads: int = 1,
        tokens: slice = slice(None), has_adapters: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """The results of some tokens, [tokens, top, outputs]."""
        chosen, own = self.chosen[tokens], np.array(slots[tokens], np.int32)
        order = torch.sort(chosen.flatten(), stable=True).indices  # of copies, sorted by expert
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order))).view_as(chosen)
        starts = torch.bincount(chosen.flatten(), minlength=self.experts).cumsum(0)
        x, gated = self.all.x[tokens][order // self.top], self.epilogue != "none"
        inputs = {
            "adapter_slots": (own, TOKEN_ROWS, ONE_COLUMN),
            "logit_rows": (np.zeros(1, np.int32), LOGIT_ROWS, ONE_COLUMN),
        }
        runner = KernelRunner(isa, threads, tokens=len(own), inputs=inputs, arena_bytes=1 << 23)
        copies = (0, self.top, 0, 0, 0, 0)

        def matrices(values: torch.Tensor, layout: str, dtype: str | None = None) -> _cpu.OperandSpec:
            apart = values.view(self.experts, self.rows, -1)
            return weight(apart, f"{layout}_pairs" if gated else layout, dtype)

        read: Operands = {"x": runner.filled(x, copies)}
        attributes: dict[str, int | float | str] = {}
        if x.dtype == torch.int8:
            read["x_scale"] = runner.filled(scales_of(x, self.all.group), copies)
            attributes["group"] = self.all.group
        routed: Operands = {"starts": runner.filled(torch.cat([torch.zeros(1), starts])[None].int(), ONE_ROW)}
        out = runner.buffer(len(x), self.of_one.outputs, dtype, copies)
        packed = "e2m1" if self.all.kernel == "gemm_mxfp4a8@1" else None
        operands: Operands = {
            **read,
            **routed,
            "weight": matrices(self.all.weight, "r16", packed),
            **{name: weight(vector) for name, vector in self.all.vectors.items()},
            **{name: matrices(values, "r16_columns") for name, values in self.all.of_groups.items()},
            "out": out,
        }
        if has_adapters:
            table = _cpu.Adapters(
                [(self.rows, self.columns, self.experts)], len(adapters), MAX_RANK, len(own), 1, self.top
            )
            for slot, adapter in enumerate(adapters):
                table.load(slot, [adapter.change()] if adapter.experts else [])
            site = _cpu.OperandSpec.adapters(table, 0)
            delta: dict[str, Buffer | _cpu.OperandSpec] = {
                "adapters": site,
                "delta": runner.buffer(len(x), self.rows, "f32", copies),
            }
            by_token = runner.filled(places.int())
            runner.add("adapter_rows@1", {**routed, "places": by_token, "adapters": site})
            shrunk = runner.buffer(len(x), MAX_RANK, "f32", copies)
            delta_of = {**read, **delta, "places": by_token, "shrunk": shrunk}
            runner.add("adapter_delta@1", delta_of, {**attributes, "gated": int(gated)})
            operands |= delta
        if self.all.weight.dtype == torch.float8_e4m3fn:
            attributes["group"] = self.all.group
        runner.call(self.all.kernel, operands, {**attributes, "epilogue": self.epilogue})
        return runner.read(out)[places]


def some_adapters(rows: int, columns: int, experts: int) -> list[Adapter]:
    """Adapters of all experts, of some with parts in int8, of one, and of none."""
    half = rows // 2
    every = list(range(experts))
    return [
        random_adapter(1, columns, every, [(0, rows, 1)]),
        random_adapter(2, columns, every[1::2], [(0, half, 7), (half, rows - half, 64)], "i8"),
        random_adapter(3, columns, every[-1:], [(half, rows - half, 64)]),
        Adapter(columns, [], []),
    ]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("tokens", "experts", "top"), [(1, 3, 3), (5, 8, 2), (19, 3, 2)])
@pytest.mark.parametrize("epilogue", ["none", "swiglu"])
def test_products_of_experts(isa: str, kernel: str, tokens: int, experts: int, top: int, epilogue: str) -> None:
    mixture = Mixture(kernel, tokens, experts, top, 42, 131, epilogue, bias=experts == 8)
    adapters = some_adapters(42, 131, experts)
    slots = [(token * 3) % 5 - 1 if tokens > 1 else 0 for token in range(tokens)]
    right = mixture.expected(adapters, slots)
    assert relative_error(mixture.run(isa, adapters, slots, threads=2), right) < GEMM_F32
    assert relative_error(mixture.run(isa, adapters, slots, dtype="bf16"), right) < GEMM_BF16_OUT


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_bits_of_a_token_depend_on_its_own_adapter_alone(isa: str, kernel: str) -> None:
    mixture, adapters = Mixture(kernel, 37, 3, 2, 58, 203, "swiglu", bias=False), some_adapters(58, 203, 3)
    slots = [max(token % 7 - 3, NONE) for token in range(24)] + [1] * 13  # rows that pass alone, and four at once
    together = mixture.run(isa, adapters, slots)
    for first, count, threads in (0, 1, 1), (4, 1, 2), (5, 3, 3), (9, 28, 2):
        tokens = slice(first, first + count)
        alone = mixture.run(isa, adapters, slots, threads=threads, tokens=tokens)
        assert torch.equal(alone, together[tokens])
    base = [token for token, slot in enumerate(slots) if slot in (NONE, 3)]
    without = mixture.run(isa, [], slots, has_adapters=False)
    assert torch.equal(together[base], without[base]), "tokens without an adapter have the base's bits"
    unchanged = (mixture.chosen == 0) & (torch.tensor(slots) == 1)[:, None]
    assert unchanged.any() and torch.equal(together[unchanged], without[unchanged]), "an expert that is not changed"
    for slots in [NONE] * 37, [3, NONE] * 18 + [3]:
        assert torch.equal(mixture.run(isa, adapters, slots), without)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"experts": [3]}, "expert 3, and its layer has 3"),
        ({"experts": [-1]}, "expert -1"),
        ({"experts": [1, 1]}, "an expert twice"),
        ({"experts": [0, 1]}, "has 640 bytes, but its shape takes 1280"),
        ({"bias": np.zeros(42, np.float32)}, "no bias and no gain"),
        ({"gain": np.zeros(42, np.float32)}, "no bias and no gain"),
    ],
)
def test_adapters_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    table = _cpu.Adapters([(42, 20, 3)], 1, MAX_RANK, 1, 1, 2)
    a, b = (np.zeros(16 * 20 * 2, np.uint8), None), (np.zeros(48 * 2, np.uint8), None)
    of_site = 0, 16, a, [(0, 42, 1, 0, b)], change.get("bias"), change.get("gain"), change.get("experts", [1]), ""
    with pytest.raises(ValueError, match=text):
        table.load(0, [of_site])


def test_operands_that_do_not_fit() -> None:
    mixture = Mixture("gemm_bf16@1", 4, 3, 2, 42, 20, "none", bias=False)
    runner = KernelRunner(ISAS[0], tokens=4)
    copies = (0, 2, 0, 0, 0, 0)
    x, places = runner.filled(mixture.all.x.repeat(2, 1), copies), runner.buffer(4, 2, "i32")
    starts = runner.buffer(1, 4, "i32", ONE_ROW)
    given: Operands = {
        "x": x,
        "delta": runner.buffer(8, 42, "f32", copies),
        "shrunk": runner.buffer(8, MAX_RANK, "f32", copies),
    }

    def site(rows: int, experts: int, top: int) -> _cpu.OperandSpec:
        return _cpu.OperandSpec.adapters(_cpu.Adapters([(rows, 20, experts)], 1, MAX_RANK, 4, 1, top), 0)

    for name, operands, text in [
        ("adapter_rows@1", {"places": places, "starts": starts, "adapters": site(42, 0, 2)}, "no layer of experts"),
        ("adapter_rows@1", {"places": places, "starts": starts, "adapters": site(42, 3, 1)}, "have room for"),
        ("adapter_rows@1", {"places": places, "starts": starts, "adapters": site(42, 4, 2)}, "must have 5 columns"),
        ("adapter_delta@1", {**given, "adapters": site(42, 3, 2)}, "'places' belong to layers of experts"),
        ("adapter_delta@1", {**given, "places": places, "adapters": site(42, 0, 2)}, "'places' belong to"),
        ("adapter_delta@1", {**given, "places": places, "adapters": site(42, 3, 1)}, "have room for"),
    ]:
        with pytest.raises(ValueError, match=text):
            runner.add(name, operands, {"gated": 0} if "delta" in name else {})
    with pytest.raises(ValueError, match="2 rows for each of 'places'"):
        runner.add("adapter_delta@1", {**given, "x": runner.filled(mixture.all.x), "places": places,
                                       "adapters": site(42, 3, 2), "delta": runner.buffer(4, 42, "f32"),
                                       "shrunk": runner.buffer(4, MAX_RANK, "f32")}, {"gated": 0})  # fmt: skip
