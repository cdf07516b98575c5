"""Token embeddings, the start of the residual stream."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from enginewright.builder.config import MAX_COLUMNS, MAX_TOKENS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, T, short
from enginewright.plugins.embed.embed_positions import EMBED_POSITIONS


@dataclass(frozen=True)
class Embedding:
    """Rows of a table, by token: [1, T, hidden]."""

    vocab: int  # rows of the table
    hidden: int  # columns of the table
    scale: float | None = None  # scale of the rows; None: unscaled
    positions: int = 0  # rows of the table of position embeddings; 0: there is none
    types: int = 0  # rows of the table of token types (first or second text); 0: there is none

    @staticmethod
    def read(config: ConfigReader) -> "Embedding":
        """Reads the sizes of the table."""
        return Embedding(
            vocab=config.read_size("vocab_size", maximum=MAX_TOKENS),
            hidden=config.read_size("hidden_size", maximum=MAX_COLUMNS),
        )

    def write(self, graph: GraphWriter, tensor: str, positions_tensor: str = "", types_tensor: str = "") -> ir.Value:
        """Writes the embedding of the tokens.

        Args:
            graph: graph to write into.
            tensor: name of the table.
            positions_tensor: name of the table of positions.
            types_tensor: name of the table of token types.
        """
        rows = self._rows(graph, tensor)
        if self.positions:
            rows = self._with(graph, rows, graph.positions, positions_tensor, self.positions)
        if self.types:
            rows = self._with(graph, rows, graph.token_types(), types_tensor, self.types)
        return rows

    def _with(self, graph: GraphWriter, rows: ir.Value, indices: ir.Value, tensor: str, size: int) -> ir.Value:
        """Adds rows of another table of `size` rows."""
        table = graph.weights.tensor(f"{tensor}.weight", (size, self.hidden))
        return graph.add(rows, graph.plugin(EMBED_POSITIONS, [indices, table], short(tensor)).outputs[0])

    def _rows(self, graph: GraphWriter, tensor: str) -> ir.Value:
        name, dims = short(tensor), (1, T, self.hidden)
        table = graph.weights.table(f"{tensor}.weight", (self.vocab, self.hidden))
        rows = graph.op("Gather", [table, graph.tokens], name, dims, axis=0)
        if self.scale is None:
            return rows
        factor = graph.constant(f"{name}.scale", np.array(self.scale, np.float32))
        return graph.op("Mul", [rows, factor], f"{name}.scaled", dims)
