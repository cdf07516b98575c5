"""The positions of a weight's numbers in the checkpoint, and the factors on them.

Engines have layers fused, reordered and scaled. An origin goes with a tensor:

    weight[i, j] = row_factors[i] · stored[rows[i], column_order[j]] · column_factors[j]

before rounding, stored as [out, in]. A weight may be several matrices of as many rows, one after another, each with
factors of columns of its own; or a matrix for each head, the transpose of its rows. A change that an origin cannot
express drops it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True, eq=False)
class Origin:
    """The positions of a weight [N, K] or bias [N] in the checkpoint."""

    rows: tuple[tuple[str, torch.Tensor], ...]  # (name of a tensor, its rows) that follow each other, N in all
    row_factors: torch.Tensor | None = None  # FLOAT [N]; None: all are 1
    # FLOAT [K], or [matrices, K], of each of the matrices that the weight consists of; None: all are 1
    column_factors: torch.Tensor | None = None
    column_order: torch.Tensor | None = None  # stored column of each column, INT64 [K]; None: the same
    # Heads whose rows, N / heads each, are transposed: the tensor is [heads · K, N / heads]. 0: it is as it is stored
    transposed_heads: int = 0

    @staticmethod
    def of(tensor: str, count: int) -> "Origin":
        """Makes the origin of a whole tensor.

        Args:
            tensor: its name in the checkpoint.
            count: its rows.
        """
        return Origin(((tensor, _all_rows(count)),))

    def scaled(self, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> "Origin | None":
        """The origin of the weight times factors.

        Args:
            rows: factors of rows, [N].
            columns: factors of columns, [K] or [matrices, K].
        """
        if self.transposed_heads:
            return None
        return replace(
            self,
            row_factors=_product(self.row_factors, rows),
            column_factors=_product(self.column_factors, columns),
        )

    def picked(self, index: torch.Tensor) -> "Origin | None":
        """The origin of some rows of the weight; index: their positions, in the new order."""
        if self._differs_by_matrix or self.transposed_heads:
            return None
        index = index.long()
        counts = torch.tensor([len(rows) for _, rows in self.rows])
        part_of = torch.repeat_interleave(torch.arange(len(counts)), counts)[index]
        rows = torch.cat([rows for _, rows in self.rows])[index]
        parts, lengths = torch.unique_consecutive(part_of, return_counts=True)
        runs = zip(parts.tolist(), torch.split(rows, lengths.tolist()), strict=True)
        factors = None if self.row_factors is None else self.row_factors[index]
        return replace(self, rows=tuple((self.rows[part][0], run) for part, run in runs), row_factors=factors)

    def transposed(self, heads: int) -> "Origin | None":
        """The origin of the weight with each head's rows transposed."""
        plain = self.row_factors is None and self.column_factors is None and self.column_order is None
        return replace(self, transposed_heads=heads) if plain and not self.transposed_heads else None

    def sorted_columns(self, order: torch.Tensor) -> "Origin | None":
        """The origin of the weight with other columns; order: current column of each of them."""
        if self.transposed_heads:
            return None
        factors = None if self.column_factors is None else self.column_factors[..., order]
        columns = order if self.column_order is None else self.column_order[order]
        return replace(self, column_factors=factors, column_order=columns)

    @property
    def _differs_by_matrix(self) -> bool:
        return self.column_factors is not None and self.column_factors.dim() > 1


def stacked_origin(origins: Sequence[Origin | None]) -> Origin | None:
    """The origin of weights that follow each other along the rows; None if one is unknown, or their columns differ."""
    known = [origin for origin in origins if origin is not None]
    alike = all(
        _same_columns(origin, known[0]) and not origin._differs_by_matrix and not origin.transposed_heads
        for origin in known
    )
    if len(known) < len(origins) or not alike:
        return None
    factors = None
    if any(origin.row_factors is not None for origin in known):
        factors = torch.cat([_factors(origin) for origin in known])
    return replace(known[0], rows=tuple(run for origin in known for run in origin.rows), row_factors=factors)


@lru_cache(maxsize=16)
def _all_rows(count: int) -> torch.Tensor:
    """The rows of a whole tensor, which is shared by tensors of this size, such as those of all experts."""
    return torch.arange(count, dtype=torch.int32)


def _factors(origin: Origin) -> torch.Tensor:
    return torch.ones(sum(len(rows) for _, rows in origin.rows)) if origin.row_factors is None else origin.row_factors


def _same_columns(one: Origin, other: Origin) -> bool:
    pairs = (one.column_factors, other.column_factors), (one.column_order, other.column_order)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def _product(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one * other
