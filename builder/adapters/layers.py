"""Linear layers of an engine, as adapters of the checkpoint's layers change them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from enginewright.adapter_file import RANK_ALIGN, FactorDType, PieceEntry, SiteEntry
from enginewright.adapter_sites import Site, unusable
from enginewright.builder.adapters.adapter import Adapter, ModuleUpdate
from enginewright.builder.lower import PackedForm, unpack_rows
from enginewright.engine_file import EngineFile
from enginewright.passes.quant.int8_wo import quantize_rows
from enginewright.passes.weights import RowReader
from enginewright.plan import KernelCall, WeightOperand
from enginewright.plugins.gemm.gemm_mxfp4a8 import DOUBLED
from enginewright.plugins.gemm.gemm_w4a8 import MIDDLE
from enginewright.runtime.engine import Engine

# dtype → the numbers of its codes, which scales multiply
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e2m1": lambda codes: torch.tensor(DOUBLED, dtype=torch.float32)[codes.int()],
    "u4": lambda codes: codes.float() - MIDDLE,
}
ROWS_AT_ONCE = 1024  # rows of a weight whose lengths are computed at once


@dataclass(frozen=True)
class Run:
    """Rows of an engine's layer that are of one of the checkpoint's layers, and follow each other."""

    module: str  # name of the checkpoint's layer
    begin: int  # first row in the engine's layer
    end: int  # row after the last
    rows: torch.Tensor  # their rows in the checkpoint's layer, INT64 [end - begin]


class EngineLayer:
    """A site of an engine.

    Args:
        file: the engine's file.
        site: the site.

    Attributes:
        site: as given.
        runs: its rows, in order.
        modules: names of the checkpoint's layers that it is made of.

    Raises:
        CorruptEngineError: the site's vectors are impossible.
    """

    def __init__(self, file: EngineFile, site: Site) -> None:
        def vector(name: str | None, dtype: str) -> torch.Tensor | None:
            return None if name is None else torch.from_numpy(np.frombuffer(file.read_section(name), dtype).copy())

        def order(name: str | None, count: int) -> torch.Tensor:
            found = vector(name, "<i4")
            if found is None:
                return torch.arange(count)
            if found.min() < 0 or found.max() >= count:
                raise unusable(f"{name} names what is not there")
            return found.long()

        def factors(name: str | None, count: int) -> torch.Tensor:
            found = vector(name, "<f4")
            return torch.ones(count) if found is None else found

        self.site = site
        self._row_factors = factors(site.row_factors, max(site.experts, 1) * site.rows)
        self._bias_factors = factors(site.bias_factors, site.rows)
        self._column_factors = factors(site.column_factors, site.columns)
        self._column_order = order(site.column_order, site.columns)
        names = list(dict.fromkeys(run.module for run in site.runs))
        self.modules = frozenset(names)
        *starts, total = accumulate((run.count for run in site.runs), initial=0)
        own = order(site.row_order, total)
        run_of = torch.searchsorted(torch.tensor(starts), own, right=True) - 1
        rows = own + torch.tensor([run.first - start for run, start in zip(site.runs, starts, strict=True)])[run_of]
        module_of = torch.tensor([names.index(run.module) for run in site.runs])[run_of]
        cuts = [0, *(module_of.diff().nonzero().flatten() + 1).tolist(), len(own)]
        self.runs = [Run(names[module_of[begin]], begin, end, rows[begin:end]) for begin, end in pairwise(cuts)]

    def is_changed_by(self, adapter: Adapter, update: ModuleUpdate) -> bool:
        """True if an update of an adapter changes this layer."""
        del adapter
        return update.experts_module is None and update.module in self.modules

    @property
    def names(self) -> Collection[str]:
        """Names in the checkpoint of the modules that it is made of, or of their parameters."""
        return self.modules | {run.module for run in self.runs}

    @property
    def stored_columns(self) -> int:
        """Columns of the checkpoint's layers that this one is made of."""
        return self.site.columns

    def rank_of(self, adapter: Adapter, update: ModuleUpdate) -> int:
        """Rank of an update that changes this layer, by the adapter's config."""
        return adapter.config.rank_of(update.module)

    def rows_of(self, module: str) -> set[int]:
        """Rows of one of the checkpoint's layers that are in this one."""
        return {row for run in self.runs if run.module == module for row in run.rows.tolist()}

    def changed(
        self, adapter: Adapter, weight: RowReader, bias: torch.Tensor | None, dtype: FactorDType
    ) -> tuple[SiteEntry, list[torch.Tensor]]:
        """Computes what an adapter changes.

        Args:
            adapter: the adapter, which fits.
            weight: reader of the engine's weight, FLOAT [N, K].
            bias: the engine's bias, FLOAT [N]; None if it has none that adapters can change.
            dtype: dtype of the matrices.

        Returns:
            The site's entry, and the numbers of its sections in their order, in FLOAT if they are not INT8.

        Raises:
            EngineError: numbers are not finite.
        """
        site, updates = self.site, [update for name, update in adapter.updates.items() if name in self.modules]
        a = {one.module: adapter.read(one, "a")[:, self._column_order] for one in updates if "a" in one.parts}
        first_ranks = dict(zip(a, np.cumsum([0, *map(len, a.values())]).tolist(), strict=False))
        gain = torch.ones(site.rows) if any("magnitude" in update.parts for update in updates) else None
        pieces, b = [], []
        for run in self.runs:
            if run.module in a:
                update, of_run = adapter.updates[run.module], slice(run.begin, run.end)
                values = adapter.config.scale_of(run.module) * adapter.read(update, "b")[run.rows]
                if gain is not None and "magnitude" in update.parts:
                    lengths = torch.cat(list(self._lengths(weight, run, a[run.module], values)))
                    gain[of_run] = adapter.read(update, "magnitude")[run.rows] / lengths
                    values *= gain[of_run, None]
                b.append(values * self._row_factors[of_run, None])
                piece = PieceEntry(run.begin, len(run.rows), len(a[run.module]), first_ranks[run.module])
                pieces.append(piece)
        tensors = [torch.cat(list(a.values())) * self._column_factors] if a else []
        rank = -(-sum(map(len, a.values())) // RANK_ALIGN) * RANK_ALIGN
        tensors = [torch.nn.functional.pad(one, (0, 0, 0, rank - len(one))) for one in tensors] + b
        if tensors and dtype == "i8":
            tensors = coded(tensors[0], b, [piece.first_rank for piece in pieces])
        added = None if bias is None else self._added(adapter, {one.module: one for one in updates}, bias)
        tensors += [vector for vector in (added, gain) if vector is not None]
        check_finite(adapter, site, tensors)
        entry = SiteEntry(
            site.weight, site.rows, site.columns, rank, tuple(pieces), dtype, added is not None, gain is not None
        )
        return entry, tensors

    def _lengths(self, weight: RowReader, run: Run, a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
        """Computes the lengths of rows of W + B · A, with W as the engine has it, without its factors."""
        for begin in range(run.begin, run.end, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, run.end)
            rows = weight(begin, end) / self._row_factors[begin:end, None] / self._column_factors
            # In fp64, so that the rounded length does not depend on the order of sums on a machine.
            rows = rows.double() + b[begin - run.begin : end - run.begin].double() @ a.double()
            yield torch.linalg.norm(rows, dim=1).float()

    def _added(self, adapter: Adapter, updates: Mapping[str, ModuleUpdate], bias: torch.Tensor) -> torch.Tensor | None:
        """Computes what is added to the engine's bias; None if that is nothing."""
        if not any(update.changes_bias for update in updates.values()):
            return None
        added = torch.zeros(self.site.rows)
        for run in self.runs:
            update, of_run = updates.get(run.module), slice(run.begin, run.end)
            if update is not None and "bias" in update.parts:
                added[of_run] = adapter.read(update, "bias")[run.rows] * self._bias_factors[of_run] - bias[of_run]
            if update is not None and "b_bias" in update.parts:
                scaled = adapter.config.scale_of(run.module) * adapter.read(update, "b_bias")[run.rows]
                added[of_run] += scaled * self._bias_factors[of_run]
        return added


def check_finite(adapter: Adapter, site: Site, tensors: Sequence[torch.Tensor]) -> None:
    """Refuses numbers of a site that are not finite in BFLOAT16.

    Raises:
        EngineError: there are some.
    """
    if not all(bool(torch.isfinite(values.bfloat16()).all()) for values in tensors):
        raise adapter.error(f"what it adds to {site.weight} has numbers that are not finite")


def coded(a: torch.Tensor, b: Sequence[torch.Tensor], first_ranks: Sequence[int]) -> list[torch.Tensor]:
    """Quantizes matrices to INT8 by rows.

    Columns of B are divided by their largest number first, which A's scales take, so that none is lost in B's rows.

    Args:
        a: FLOAT [R, K].
        b: FLOAT [count, rank] of each piece.
        first_ranks: first row of A that each of them is multiplied with.

    Returns:
        Each matrix with its scales: a, that of a, the first of b, that of it, ….
    """
    largest = torch.zeros(len(a))
    own = [slice(first, first + one.shape[1]) for first, one in zip(first_ranks, b, strict=True)]
    for ranks, one in zip(own, b, strict=True):
        largest[ranks] = torch.maximum(largest[ranks], one.abs().amax(dim=0))
    largest[largest == 0] = 1.0
    codes, scale = quantize_rows(a)
    coded = [codes, scale * largest]
    for ranks, one in zip(own, b, strict=True):
        coded += quantize_rows(one / largest[ranks])
    return coded


def open_weight(engine: Engine, call: KernelCall) -> RowReader:
    """Opens the weight of a linear layer, or a table, for reading by rows, in FLOAT.

    Args:
        engine: the engine, open.
        call: call of the plan with the layer's product, or that looks up embeddings.
    """
    role, of_scale = ("weight", "scale") if "weight" in call.operands else ("table", "table_scale")
    codes, dtype = _part(engine, call, role)
    if of_scale not in call.operands:
        return lambda begin, end: codes(begin, end).float()
    scale, _ = _part(engine, call, of_scale)
    zero = _part(engine, call, "zero")[0] if "zero" in call.operands else None
    group = int(call.attributes.get("group", 0))

    def rows(begin: int, end: int) -> torch.Tensor:
        found = codes(begin, end)
        columns = found.shape[1]

        def wide(values: torch.Tensor) -> torch.Tensor:
            values = values.float()
            return values[:, None] if values.dim() == 1 else values.repeat_interleave(group or columns, 1)[:, :columns]

        if zero is not None:
            return (found.float() - wide(zero(begin, end))) * wide(scale(begin, end))
        return NUMBERS.get(dtype, torch.Tensor.float)(found) * wide(scale(begin, end))

    return rows


def open_section(engine: Engine, name: str) -> tuple[RowReader, str]:
    """Opens the elements of a weight or a vector for reading by rows.

    Args:
        engine: the engine, open.
        name: name in the plan.

    Returns:
        The reader, and the dtype of the section.
    """
    data, form = engine.weight(name)
    assert form.dtype is not None and form.shape is not None and form.layout is not None
    return unpack_rows(data, PackedForm(form.dtype, form.shape, form.layout)), form.dtype


def _part(engine: Engine, call: KernelCall, role: str) -> tuple[RowReader, str]:
    operand = call.operands[role]
    assert isinstance(operand, WeightOperand)
    return open_section(engine, operand.name)
