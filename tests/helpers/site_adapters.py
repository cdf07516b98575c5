"""Adapters of one linear layer, of random numbers: as kernels read them, and in float64."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from enginewright import adapter_file
from enginewright.adapter_file import AdapterPiece, SiteAdapter
from enginewright.builder.lower.pack import PackedForm, pack
from tests.helpers.gemm_problem import generator
from tests.helpers.kernel_runner import aligned

NONE = -1  # slot of a row without an adapter


@dataclass
class Factor:
    """A factor of what an adapter adds, as the kernel reads it: bf16, or int8 with scales of the rows."""

    values: torch.Tensor  # bf16 or int8 [rows, columns]
    scale: torch.Tensor | None = None  # fp32 [rows]

    def numbers(self) -> torch.Tensor:
        wide = self.values.double()
        return wide if self.scale is None else wide * self.scale.double()[:, None]

    def operand(self) -> tuple[np.ndarray, np.ndarray | None]:
        form = PackedForm("bf16" if self.scale is None else "i8", tuple(self.values.shape), "r16_columns")
        packed = aligned(b"".join(pack(self.values, form)))
        return packed, None if self.scale is None else self.scale.numpy()


def random_factor(rows: int, columns: int, dtype: str, *seed: int) -> Factor:
    if dtype == "bf16":
        return Factor(torch.randn(rows, columns, generator=generator(*seed)).bfloat16() / 8)
    codes = torch.randint(-127, 128, (rows, columns), generator=generator(*seed), dtype=torch.int8)
    return Factor(codes, torch.rand(rows, generator=generator(*seed, 1)) / 500)


@dataclass
class Piece:
    """Rows [begin, begin + count) of the weight, and the factors of what an adapter adds to them."""

    begin: int
    a: Factor  # [rank, columns]
    b: Factor  # [count, rank]


@dataclass
class Replaced:
    """Rows that an adapter has in place of some of a weight's."""

    ids: torch.Tensor  # int64 [count], ascending
    rows: Factor  # [count, columns]

    def change(self, site: int = 0) -> tuple[Any, ...]:
        """The form that `_cpu.Adapters.load` takes."""
        return site, len(self.ids), self.ids.int().numpy(), self.rows.operand()


@dataclass
class Adapter:
    """The changes of a layer with this number of columns by an adapter."""

    columns: int
    pieces: list[Piece]
    bias: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    replaced: Replaced | None = None

    def change(self, site: int = 0) -> tuple[Any, ...]:
        """The form that `_cpu.Adapters.load` takes."""
        a = [piece.a for piece in self.pieces]
        ranks = sum(len(one.values) for one in a)
        rest = -ranks % 16
        dtype = a[0].values.dtype if a else torch.bfloat16
        values = torch.cat([*(one.values for one in a), torch.zeros(rest, self.columns, dtype=dtype)])
        scales = [one.scale for one in a if one.scale is not None]
        whole = Factor(values, torch.cat([*scales, torch.zeros(rest)]) if scales else None)
        pieces, first = [], 0
        for piece in self.pieces:
            rank = len(piece.a.values)
            pieces.append((piece.begin, len(piece.b.values), rank, first, piece.b.operand()))
            first += rank
        vectors = [None if one is None else one.numpy() for one in (self.bias, self.gain)]
        factor = whole.operand() if ranks else (np.zeros(0, np.uint8), None)
        return site, ranks + rest, factor, pieces, *vectors, (), ""

    def site_adapter(self, rows: int) -> SiteAdapter:
        """The form in which an adapter's file gives it."""
        _, rank, a, pieces, bias, gain, *_ = self.change()

        def factor(packed: np.ndarray, scale: np.ndarray | None) -> adapter_file.Factor:
            return adapter_file.Factor(memoryview(packed), None if scale is None else memoryview(scale))

        found = tuple(AdapterPiece(*numbers, factor(*b)) for *numbers, b in pieces)
        vectors = [None if one is None else memoryview(one) for one in (bias, gain)]
        return SiteAdapter(rows, self.columns, rank, factor(*a), found, *vectors)

    def applied(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product of rows with this adapter, in float64: [rows, N]."""
        y = y.clone() if self.gain is None else y * self.gain.double()
        if self.bias is not None:
            y += self.bias.double()
        for piece in self.pieces:
            b = piece.b.numbers()
            y[:, piece.begin : piece.begin + len(b)] += x @ piece.a.numbers().T @ b.T
        if self.replaced is not None:
            rows = x @ self.replaced.rows.numbers().T
            y[:, self.replaced.ids] = rows if self.bias is None else rows + self.bias.double()[self.replaced.ids]
        return y


def random_adapter(
    seed: int, columns: int, parts: list[tuple[int, int, int]], dtype: str = "bf16", **vectors: int
) -> Adapter:
    """parts: begin, count and rank of each piece; vectors: rows of `bias` and `gain`."""
    pieces = [
        Piece(
            begin,
            random_factor(rank, columns, dtype, seed, begin, 1),
            random_factor(count, rank, dtype, seed, begin, 2),
        )
        for begin, count, rank in parts
    ]
    made = {name: torch.rand(rows, generator=generator(seed, len(name))) + 0.5 for name, rows in vectors.items()}
    return Adapter(columns, pieces, **made)


def with_rows(adapter: Adapter, rows: int, ids: list[int], dtype: str, seed: int = 7) -> Adapter:
    """The adapter, with random rows in place of those of a weight of `rows` rows."""
    gain = torch.ones(rows) if adapter.gain is None else adapter.gain
    gain[ids] = 0
    replaced = Replaced(torch.tensor(ids), random_factor(len(ids), adapter.columns, dtype, seed, 3))
    return Adapter(adapter.columns, adapter.pieces, adapter.bias, gain, replaced)


def some_adapters(rows: int, columns: int) -> list[Adapter]:
    """Adapters of ranks near each limit: of all rows, of parts in int8, of vectors alone, of nothing."""
    middle = rows // 3
    return [
        random_adapter(1, columns, [(0, rows, 1)]),
        random_adapter(2, columns, [(0, middle, 16), (middle, rows - middle, 7)], "i8", bias=rows),
        random_adapter(3, columns, [(middle, 5, 320)], gain=rows),
        random_adapter(4, columns, [], bias=rows, gain=rows),
        random_adapter(5, columns, []),
    ]
