"""Layers with a matrix for each head of an engine, as adapters of the checkpoint's layer change them.

They are parts of one layer, `kv_b_proj` of latent attention, whose rows are keys and values of all heads. A is of one
matrix for all heads, and B has rows of each; where a head's rows are transposed, so are A and B, and change places.
"""

import torch

from enginewright.adapter_file import RANK_ALIGN, FactorDType, PieceEntry, SharedFactor, SiteEntry
from enginewright.builder.adapters.adapter import Adapter
from enginewright.builder.adapters.layers import EngineLayer, check_finite
from enginewright.passes.weights import RowReader


class HeadsLayer(EngineLayer):
    """A site of an engine with a matrix for each head. Its rows are those of all heads in the checkpoint's layer."""

    @property
    def stored_columns(self) -> int:
        """Columns of the checkpoint's layer."""
        return self.site.rows if self.site.transposed else self.site.columns

    def changed(
        self, adapter: Adapter, weight: RowReader, bias: torch.Tensor | None, dtype: FactorDType
    ) -> tuple[SiteEntry, list[torch.Tensor]]:
        """Computes what an adapter changes; as in the base class. Matrices are BFLOAT16, as the weights are.

        Raises:
            EngineError: numbers are not finite.
        """
        del weight, bias, dtype
        site = self.site
        (update,) = (update for update in adapter.updates.values() if self.is_changed_by(adapter, update))
        rows = torch.cat([run.rows for run in self.runs])
        a, rank = adapter.read(update, "a"), self.rank_of(adapter, update)
        b = (adapter.config.scale_of(update.module) * adapter.read(update, "b")[rows]).view(site.heads, -1, rank)
        shared: SharedFactor = "a"
        if site.transposed:
            a, b, shared = b.transpose(1, 2), a.t(), "b"
        a = torch.nn.functional.pad(a, (0, 0, 0, -rank % RANK_ALIGN))
        check_finite(adapter, site, [a, b])
        piece = PieceEntry(0, site.rows, rank, 0)
        entry = SiteEntry(site.weight, site.rows, site.columns, a.shape[-2], (piece,), heads=site.heads, shared=shared)
        return entry, [a, b.contiguous()]
