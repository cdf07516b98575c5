"""Reads paged pools in standard ops: for the references of ops that attend to them."""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.attention.masked_attention import in_window
from enginewright.plugins.plugin import dims_of, width_of
from enginewright.plugins.writer import Writer


class PagedContext:
    """A step's sequences, and the pools that their tokens see through block tables."""

    def __init__(self, write: Writer, q: ir.Value, tables: Sequence[ir.Value], block_size: int) -> None:
        """Keeps the tables.

        Args:
            write: writer of the graph.
            q: [tokens, …].
            tables: query_start, kv_len and block_table, as in paged_attention.py.
            block_size: slots of a block.
        """
        query_start, self._kv_len, self._block_table = (write.cast(table, ir.DataType.INT64) for table in tables)
        self._write, self._block_size = write, block_size
        tokens = write.op("Squeeze", write.op("Shape", q, start=0, end=1))
        token = write.op("Range", write.constant(0), tokens, write.constant(1))  # [tokens]
        ends = write.op("Slice", query_start, [1], [1 << 30], [0])  # [sequences]
        over = write.cast(write.op("LessOrEqual", ends, write.op("Unsqueeze", token, [1])), ir.DataType.INT64)
        self._sequence = write.op("ReduceSum", over, [1], keepdims=0)  # [tokens]
        left = write.op("Sub", write.op("Gather", ends, self._sequence), token)  # tokens up to the sequence's end
        self._query_at = write.op("Sub", write.op("Gather", self._kv_len, self._sequence), left)

    def of(self, pool: ir.Value) -> ir.Value:
        """Gathers each token's own copy of its sequence's rows in a pool: FLOAT [tokens, heads, positions, dim]."""
        write, (_, heads, _), dim = self._write, dims_of(pool), width_of(pool)
        assert isinstance(heads, int)
        whole = write.cast(pool, ir.DataType.FLOAT)
        blocks = write.op("Reshape", whole, [-1, self._block_size, heads, dim])
        by_sequence = write.op("Gather", blocks, self._block_table, axis=0)
        sequences = write.op("Shape", self._kv_len)
        flat = write.op("Reshape", by_sequence, write.op("Concat", sequences, [-1, heads, dim], axis=0))
        return write.op("Transpose", write.op("Gather", flat, self._sequence, axis=0), perm=[0, 2, 1, 3])

    def visible(self, keys: ir.Value, window: int = 0, lookahead: int = 0) -> ir.Value:
        """Computes which keys a token sees, BOOL [tokens, 1, 1, positions].

        Args:
            keys: keys, as `of` returns them.
            window: positions that a query sees, its own included; 0 is no limit.
            lookahead: positions after its own that a query sees.
        """
        write = self._write
        positions = write.op("Squeeze", write.op("Shape", keys, start=2, end=3))
        key_at = write.op("Range", write.constant(0), positions, write.constant(1))
        seen = in_window(write, write.op("Unsqueeze", self._query_at, [1, 2, 3]), key_at, window, lookahead)
        if not lookahead:
            return seen
        ends = write.op("Unsqueeze", write.op("Gather", self._kv_len, self._sequence), [1, 2, 3])
        return write.op("And", seen, write.op("Less", key_at, ends))
