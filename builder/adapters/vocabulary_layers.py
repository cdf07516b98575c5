"""Layers of an engine with a row for each token, as adapters change them: the table of embeddings and the output head.

An adapter adds to them, or has rows of its own: those of `trainable_token_indices`, or the whole matrix, of which rows
that the engine has are left out. Rows of the adapter are what PEFT computes with: the matrix that it has saved, or the
rows of tokens, and the product of its factors added to them. Rows of an embedding are those of a tied head, too.
"""

import torch
from msgspec.structs import replace

from enginewright.adapter_file import RANK_ALIGN, FactorDType, PieceEntry, SiteEntry
from enginewright.adapter_sites import Site
from enginewright.builder.adapters.adapter import Adapter, ModuleUpdate
from enginewright.builder.adapters.layers import ROWS_AT_ONCE, EngineLayer, check_finite, coded
from enginewright.engine_file import EngineFile
from enginewright.errors import UnsupportedModelError
from enginewright.manifest import WEIGHTS
from enginewright.passes.quant.int8_wo import quantize_rows
from enginewright.passes.weights import RowReader


class VocabularyLayer(EngineLayer):
    """A site of an engine with a row for each token, in the order of their ids.

    Args:
        file: the engine's file.
        site: the site.
        table: name of the embedding whose table is the weight of this layer, too; None: there is none.

    Raises:
        CorruptEngineError: the site's vectors are impossible.
    """

    def __init__(self, file: EngineFile, site: Site, table: str | None = None) -> None:
        super().__init__(file, site)
        (self._module,) = self.modules
        self._table = table
        self._dtype = file.sections[f"{WEIGHTS}{site.weight}"].dtype

    def is_changed_by(self, adapter: Adapter, update: ModuleUpdate) -> bool:
        """True if an update of an adapter changes this layer."""
        return update is adapter.updates.get(self._module) or update is self._tokens(adapter)

    def _tokens(self, adapter: Adapter) -> ModuleUpdate | None:
        """The update with rows of tokens that this layer gets; None if it gets none."""
        own = adapter.updates.get(self._module)
        of_table = None if self._table is None else adapter.updates.get(self._table)
        if own is not None and "token_rows" in own.parts:
            return own
        return of_table if of_table is not None and "token_rows" in of_table.parts else None

    def _replaced(self, adapter: Adapter, weight: RowReader) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Finds the rows that differ from the engine's by more than what is added to all of them.

        Args:
            adapter: the adapter.
            weight: reader of the engine's weight, FLOAT [N, K].

        Returns:
            Their numbers, ascending, INT64 [n], and the adapter's rows in FLOAT [n, K]; None if there are none.

        Raises:
            UnsupportedModelError: there are some, and tokens invoke the adapter; or PEFT does not compute them.
            EngineError: numbers are not finite.
        """
        ids, rows = torch.empty(0, dtype=torch.long), torch.empty(0, self.site.columns)
        update, tokens = adapter.updates.get(self._module), self._tokens(adapter)
        if update is not None and "weight" in update.parts:
            whole = adapter.read(update, "weight")
            ids = torch.cat([self._differing(whole, weight, begin) for begin in range(0, len(whole), ROWS_AT_ONCE)])
            rows = whole[ids]
        if tokens is not None:
            self._check_tokens(adapter, update)
            own = torch.tensor(adapter.config.tokens_of(tokens.module), dtype=torch.long)
            is_kept = ~torch.isin(ids, own)
            ids, order = torch.cat([ids[is_kept], own]).sort()
            rows = torch.cat([rows[is_kept], adapter.read(tokens, "token_rows")])[order]
        if not len(ids):
            return None
        if adapter.config.invocation_tokens:
            raise UnsupportedModelError(
                f"the adapter {adapter.name} has rows of its own in {self._module}",
                "tokens invoke it, and PEFT would change the tokens before them, too",
                "Save it without its embeddings: save_pretrained(…, save_embedding_layers=False).",
            )
        if update is not None:
            rows = self._with_product(adapter, update, ids, rows)
        return ids, self._as_stored(rows, ids)

    def _check_tokens(self, adapter: Adapter, update: ModuleUpdate | None) -> None:
        """Refuses rows of a tied embedding with lengths of the head's rows."""
        if update is not None and "magnitude" in update.parts:
            raise UnsupportedModelError(
                f"the adapter {adapter.name} changes rows of {self._table} and {self._module}, which share a weight",
                "the head has lengths (DoRA), which PEFT does not compute with them",
                "Train it without use_dora, or without trainable_token_indices.",
            )

    def _differing(self, whole: torch.Tensor, weight: RowReader, begin: int) -> torch.Tensor:
        """The numbers of rows of a matrix, ROWS_AT_ONCE from `begin` on, that rounded are not the engine's."""
        end = min(begin + ROWS_AT_ONCE, len(whole))
        # The builder rounds every weight to bfloat16 first.
        rows = self._as_stored(whole[begin:end].bfloat16().float(), torch.arange(begin, end))
        if self._dtype == "i8":
            codes, scale = quantize_rows(rows)
            rows = codes.float() * scale[:, None]
        elif self._dtype == "bf16":
            rows = rows.bfloat16().float()
        return (rows != weight(begin, end)).any(dim=1).nonzero().flatten() + begin

    def _as_stored(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of the checkpoint's matrix, as the engine's weight has them before it is rounded."""
        return rows[:, self._column_order] * self._column_factors * self._row_factors[ids, None]

    def _with_product(
        self, adapter: Adapter, update: ModuleUpdate, ids: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Rows of the checkpoint's matrix with the product of the factors, and its lengths (DoRA)."""
        if "a" in update.parts:
            a, b = adapter.read(update, "a"), adapter.read(update, "b")[ids]
        elif "embedding_a" in update.parts:
            a, b = adapter.read(update, "embedding_b").t(), adapter.read(update, "embedding_a")[:, ids].t()
        else:
            return rows
        # In fp64, so that the rounded rows do not depend on the order of sums on a machine.
        rows = rows.double() + adapter.config.scale_of(update.module) * (b.double() @ a.double())
        if "magnitude" in update.parts:
            rows *= (adapter.read(update, "magnitude")[ids] / torch.linalg.norm(rows, dim=1))[:, None]
        return rows.float()

    def _sections(
        self, adapter: Adapter, ids: torch.Tensor, rows: torch.Tensor, dtype: FactorDType
    ) -> list[torch.Tensor]:
        """The sections of replaced rows."""
        check_finite(adapter, self.site, [rows])
        return [ids.int(), *(quantize_rows(rows) if dtype == "i8" else [rows])]


class OutputHead(VocabularyLayer):
    """The layer that makes logits."""

    def changed(
        self, adapter: Adapter, weight: RowReader, bias: torch.Tensor | None, dtype: FactorDType
    ) -> tuple[SiteEntry, list[torch.Tensor]]:
        """Computes what an adapter changes; as in the base class.

        Raises:
            EngineError: numbers are not finite.
        """
        entry, tensors = super().changed(adapter, weight, bias, dtype)
        found = self._replaced(adapter, weight)
        if found is None:
            return entry, tensors
        ids, rows = found
        gain = tensors.pop() if entry.gain else torch.ones(self.site.rows)
        gain[ids] = 0.0
        entry = replace(entry, gain=True, replaced=len(ids))
        return entry, [*tensors, gain, *self._sections(adapter, ids, rows, dtype)]


class Table(VocabularyLayer):
    """A table of embeddings."""

    def changed(
        self, adapter: Adapter, weight: RowReader, bias: torch.Tensor | None, dtype: FactorDType
    ) -> tuple[SiteEntry, list[torch.Tensor]]:
        """Computes what an adapter changes; as in the base class.

        Raises:
            EngineError: numbers are not finite.
        """
        del bias
        site, tensors, pieces, rank = self.site, list[torch.Tensor](), tuple[PieceEntry, ...](), 0
        update = adapter.updates[self._module]
        if "embedding_a" in update.parts:
            a = adapter.read(update, "embedding_a")
            b = adapter.config.scale_of(update.module) * adapter.read(update, "embedding_b")
            pieces, rank = (PieceEntry(0, site.columns, len(a), 0),), -(-len(a) // RANK_ALIGN) * RANK_ALIGN
            tensors = [torch.nn.functional.pad(a, (0, 0, 0, rank - len(a))), b]
            if dtype == "i8":
                tensors = coded(tensors[0], [b], [0])
            check_finite(adapter, site, tensors)
        found = self._replaced(adapter, weight)
        if found is not None:
            tensors += self._sections(adapter, *found, dtype)
        count = 0 if found is None else len(found[0])
        return SiteEntry(site.weight, site.rows, site.columns, rank, pieces, dtype, table=True, replaced=count), tensors
