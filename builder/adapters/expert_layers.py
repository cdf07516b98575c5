"""Layers of experts of an engine, as adapters change them.

An adapter changes a parameter with the matrices of all experts (experts.py has its form), or the linear layers of
single experts. What is prepared is the same: A and B for each changed expert, of one rank, with zeros where an expert
has a smaller one.
"""

from collections.abc import Sequence

import torch

from enginewright.adapter_file import RANK_ALIGN, FactorDType, PieceEntry, SiteEntry
from enginewright.adapter_sites import EXPERT, Site
from enginewright.builder.adapters.adapter import Adapter, ModuleUpdate
from enginewright.builder.adapters.experts import GATE_UP, MATRICES
from enginewright.builder.adapters.layers import EngineLayer, Run, check_finite, coded
from enginewright.engine_file import EngineFile
from enginewright.passes.weights import RowReader


class ExpertsLayer(EngineLayer):
    """A site of an engine with the matrices of all experts. `runs` are the rows of each of them.

    Args:
        file: the engine's file.
        site: the site.

    Attributes:
        path: name of the module with the experts, in the checkpoint.
        parameter: name of the parameter with these matrices, in transformers.

    Raises:
        CorruptEngineError: the site's vectors are impossible.
    """

    def __init__(self, file: EngineFile, site: Site) -> None:
        super().__init__(file, site)
        names = list(dict.fromkeys(run.module for run in self.runs))
        self.modules = frozenset(
            name.replace(EXPERT, str(expert)) for name in names if EXPERT in name for expert in range(site.experts)
        )
        self._row_factors = self._row_factors.view(site.experts, site.rows)
        self._column_factors = self._column_factors.view(-1, site.columns)
        self.path = names[0].partition(f".{EXPERT}")[0] if EXPERT in names[0] else names[0].rpartition(".")[0]
        matrices = [name.rpartition(".")[2] for name in names]
        self.parameter = matrices[0]
        if EXPERT in names[0] and (len(names) > 1 or MATRICES.get(matrices[0], ("", 0))[1] is None):
            self.parameter = MATRICES.get(matrices[0], (matrices[0], None))[0]

    def rows_of(self, module: str) -> set[int]:
        """Rows of one of the checkpoint's layers, of one expert, that are in this one."""
        return {row for run in self.runs if _is_of(module, run.module) for row in run.rows.tolist()}

    def is_changed_by(self, adapter: Adapter, update: ModuleUpdate) -> bool:
        """True if an update of an adapter changes this layer: by its name, and the shapes of the factors of experts."""
        module = update.experts_module
        if module is None:
            return super().is_changed_by(adapter, update)
        rank, experts = self.rank_of(adapter, update), self.site.experts
        wanted = (experts * rank, self.site.columns), (self.site.rows, experts * rank)
        return self.path == module and (adapter.shape(update, "a"), adapter.shape(update, "b")) == wanted

    def rank_of(self, adapter: Adapter, update: ModuleUpdate) -> int:
        """Rank of an update that changes this layer, by the adapter's config."""
        if update.experts_module is None:
            return super().rank_of(adapter, update)
        return adapter.config.rank_of(f"{update.experts_module}.{self.parameter}")

    def changed(
        self, adapter: Adapter, weight: RowReader, bias: torch.Tensor | None, dtype: FactorDType
    ) -> tuple[SiteEntry, list[torch.Tensor]]:
        """Computes what an adapter changes; as in the base class. Neither weights nor biases matter: there is no DoRA.

        Raises:
            EngineError: numbers are not finite, or two updates change an expert.
        """
        del weight, bias
        site = self.site
        updates = [update for update in adapter.updates.values() if self.is_changed_by(adapter, update)]
        of_all = [update for update in updates if update.experts_module is not None]
        if len(of_all) > 1 or (of_all and len(updates) > 1):
            raise adapter.error(f"two of its updates change {site.weight}")
        parts = self._of_all(adapter, of_all[0]) if of_all else self._of_each(adapter, updates)
        experts, a, pieces, b = parts
        index = torch.tensor(experts)
        columns = self._column_factors[index] if len(self._column_factors) > 1 else self._column_factors
        a = a[..., self._column_order] * columns[:, None]
        a = torch.nn.functional.pad(a, (0, 0, 0, -a.shape[1] % RANK_ALIGN))
        rows = self._row_factors[index]
        b = [one * rows[:, piece.begin : piece.begin + piece.count, None] for one, piece in zip(b, pieces, strict=True)]
        tensors = [a, *b]
        check_finite(adapter, site, tensors)
        if dtype == "i8":
            first_ranks = [piece.first_rank for piece in pieces]
            each = [coded(a[i], [one[i] for one in b], first_ranks) for i in range(len(experts))]
            tensors = [torch.stack(same) for same in zip(*each, strict=True)]
        entry = SiteEntry(site.weight, site.rows, site.columns, a.shape[1], pieces, dtype, experts=tuple(experts))
        return entry, tensors

    def _of_all(self, adapter: Adapter, update: ModuleUpdate) -> "Parts":
        """The factors of an update of the parameter with all experts, which all rows share."""
        site, rank = self.site, self.rank_of(adapter, update)
        scale = adapter.config.scale_of(f"{update.experts_module}.{self.parameter}")
        a = adapter.read(update, "a").view(site.experts, rank, site.columns)
        b = scale * adapter.read(update, "b").view(site.rows, rank, site.experts).permute(2, 0, 1)
        pieces = tuple(PieceEntry(run.begin, len(run.rows), rank, 0) for run in self.runs)
        return list(range(site.experts)), a, pieces, [b[:, self._in_parameter(run)] for run in self.runs]

    def _in_parameter(self, run: Run) -> torch.Tensor:
        """The rows of a run in transformers' parameter, where gates are before ups."""
        half = MATRICES.get(run.module.rpartition(".")[2], ("", None))[1] if self.parameter == GATE_UP else None
        return run.rows + (half or 0) * (self.site.rows // 2)

    def _of_each(self, adapter: Adapter, updates: Sequence[ModuleUpdate]) -> "Parts":
        """The factors of updates of single experts' layers."""
        site, of_module = self.site, {update.module: update for update in updates}
        names = list(dict.fromkeys(run.module for run in self.runs))
        experts = [
            expert
            for expert in range(site.experts)
            if any(name.replace(EXPERT, str(expert)) in of_module for name in names)
        ]
        ranks = {
            name: max((self.rank_of(adapter, update) for update in updates if _is_of(update.module, name)), default=0)
            for name in names
        }
        first_ranks, total = dict[str, int](), 0
        for name, rank in ranks.items():
            first_ranks[name], total = total, total + rank
        a = torch.zeros(len(experts), total, site.columns)
        changed = [run for run in self.runs if ranks[run.module]]
        b = [torch.zeros(len(experts), len(run.rows), ranks[run.module]) for run in changed]
        for index, expert in enumerate(experts):
            for run, own in zip(changed, b, strict=True):
                update = of_module.get(_of(run, expert))
                if update is not None:
                    first, rank = first_ranks[run.module], self.rank_of(adapter, update)
                    a[index, first : first + rank] = adapter.read(update, "a")
                    values = adapter.config.scale_of(update.module) * adapter.read(update, "b")
                    own[index, :, :rank] = values[run.rows]
        pieces = tuple(
            PieceEntry(run.begin, len(run.rows), ranks[run.module], first_ranks[run.module]) for run in changed
        )
        return experts, a, pieces, b


# Changed experts; A of each, [experts, ranks, K]; pieces; B of each piece, [experts, count, rank]
Parts = tuple[list[int], torch.Tensor, tuple[PieceEntry, ...], list[torch.Tensor]]


def _of(run: Run, expert: int) -> str:
    """Name of an expert's layer."""
    return run.module.replace(EXPERT, str(expert))


def _is_of(module: str, name: str) -> bool:
    """True if a layer is that of some expert; name: that of all of them, with `{}`."""
    before, _, after = name.partition(EXPERT)
    return module.startswith(before) and module.endswith(after)
