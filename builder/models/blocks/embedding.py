"""Token embeddings: where the residual stream begins."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from enginewright.builder.config import MOST_COLUMNS, MOST_TOKENS, ConfigReader
from enginewright.builder.models.blocks.graph import GraphWriter, T, short
from enginewright.plugins.embed_positions import EMBED_POSITIONS


@dataclass(frozen=True)
class Embedding:
    """Rows of a table, by token: [1, T, hidden]."""

    vocab: int  # rows of the table
    hidden: int  # its columns
    scale: float | None = None  # of the rows, None where they are taken as they are
    positions: int = 0  # rows of a table that is added by position; 0 where there is none

    @staticmethod
    def read(config: ConfigReader) -> "Embedding":
        return Embedding(
            vocab=config.read_size("vocab_size", most=MOST_TOKENS),
            hidden=config.read_size("hidden_size", most=MOST_COLUMNS),
        )

    def write(self, graph: GraphWriter, tensor: str, positions_tensor: str = "") -> ir.Value:
        """positions_tensor: of the table by position."""
        rows = self._rows(graph, tensor)
        if not self.positions:
            return rows
        table = graph.weights.tensor(f"{positions_tensor}.weight", (self.positions, self.hidden))
        node = graph.plugin(EMBED_POSITIONS, [graph.positions, table], short(positions_tensor))
        return graph.add(rows, node.outputs[0])

    def _rows(self, graph: GraphWriter, tensor: str) -> ir.Value:
        name, dims = short(tensor), (1, T, self.hidden)
        table = graph.weights.table(f"{tensor}.weight", (self.vocab, self.hidden))
        rows = graph.op("Gather", [table, graph.tokens], name, dims, axis=0)
        if self.scale is None:
            return rows
        factor = graph.constant("embedding_scale", np.array(self.scale, np.float32))
        return graph.op("Mul", [rows, factor], f"{name}.scaled", dims)
