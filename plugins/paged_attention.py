"""Causal attention of packed tokens to the KV pools, through a block table a sequence.

q: BFLOAT16 [tokens, heads·D]. key_pool, value_pool: [slots, kv_heads, D], as kv_write.py has them, and `stored`; where
`queries` is INT8, queries are rounded as such keys are. A slot is block · block_size + its place in the block.
query_start: INT32 [sequences + 1], where each sequence's tokens begin. kv_len: INT32 [sequences], positions after this
step. block_table: INT32 [sequences, kv_blocks]. out: `to` [tokens, heads·D]. Query heads h·heads/kv_heads … share kv
head h. window 0 and softcap 0 mean none. https://arxiv.org/abs/2309.06180
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost, Linear, linear
from enginewright.plugins.attention_cuda import attention_on_cuda
from enginewright.plugins.kernel import Call, KernelBinding
from enginewright.plugins.kv_write import as_stored, padded_head_dim
from enginewright.plugins.masked_attention import in_window, masked_attention
from enginewright.plugins.plugin import (
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_attribute,
    float_of,
    int_of,
    operand,
)
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

PARTIAL_STATE = 16  # floats beside a head's partial output: its maximum and its sum, and room to stay aligned


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, key_pool, value_pool, *tables = (operand(node, index) for index in range(6))
    query_start, kv_len, block_table = (write.cast(table, ir.DataType.INT64) for table in tables)
    heads, kv_heads, head_dim = (int_of(node, name) for name in ("heads", "kv_heads", "head_dim"))

    tokens = write.op("Squeeze", write.op("Shape", q, start=0, end=1))
    token = write.op("Range", write.constant(0), tokens, write.constant(1))  # [tokens]
    ends = write.op("Slice", query_start, [1], [1 << 30], [0])  # [sequences]
    over = write.cast(write.op("LessOrEqual", ends, write.op("Unsqueeze", token, [1])), ir.DataType.INT64)
    sequence = write.op("ReduceSum", over, [1], keepdims=0)  # [tokens]
    behind = write.op("Sub", write.op("Gather", ends, sequence), token)  # tokens up to the sequence's end
    query_at = write.op("Sub", write.op("Gather", kv_len, sequence), behind)

    def context(pool: ir.Value) -> ir.Value:
        """[tokens, kv_heads, positions, head_dim]: each token's own copy of its sequence's keys or values."""
        whole = write.cast(pool, ir.DataType.FLOAT)
        blocks = write.op("Reshape", whole, [-1, int_of(node, "block_size"), kv_heads, head_dim])
        by_sequence = write.op("Gather", blocks, block_table, axis=0)
        flat = write.op("Reshape", by_sequence, write.op("Concat", sequences, [-1, kv_heads, head_dim], axis=0))
        return write.op("Transpose", write.op("Gather", flat, sequence, axis=0), perm=[0, 2, 1, 3])

    sequences = write.op("Shape", kv_len)
    keys, values = context(key_pool), context(value_pool)
    positions = write.op("Squeeze", write.op("Shape", keys, start=2, end=3))
    key_at = write.op("Range", write.constant(0), positions, write.constant(1))
    visible = in_window(write, write.op("Unsqueeze", query_at, [1, 2, 3]), key_at, int_of(node, "window"))
    grouped = write.op(
        "Reshape", write.cast(q, ir.DataType.FLOAT), [-1, kv_heads, heads // kv_heads, head_dim]
    )  # [tokens, kv_heads, group, head_dim]
    if dtype_attribute(node, "queries") == ir.DataType.INT8:  # bf16 queries are bf16 already
        grouped = as_stored(write, grouped, key_pool, ir.DataType.INT8)
    scale, softcap = float_of(node, "scale"), float_of(node, "softcap")
    y = masked_attention(write, grouped, keys, values, visible, scale, softcap)
    return [write.round_to(write.op("Reshape", y, [-1, heads * head_dim]), dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_attribute(node), dims_of(operand(node, 0)))]


def _cost(node: ir.Node) -> Cost:
    """Q Kᵀ and P V."""
    return Cost(of_position=2 * 2 * int_of(node, "heads") * int_of(node, "head_dim"), window=int_of(node, "window"))


def _partials(call: Call) -> tuple[str, Linear, int]:
    """A row for each 256 positions of the longest sequence: what its blocks give, before they are combined."""
    heads, head_dim = int(call.attributes["heads"]), int(call.attributes["head_dim"])
    return "partials", linear(kv_splits=1), heads * (padded_head_dim(head_dim) + PARTIAL_STATE)


KERNEL = KernelBinding(
    "paged_attention@1",
    ("q", "key", "value", "query_start", "kv_len", "block_table"),
    ("out",),
    ("heads", "kv_heads", "head_dim", "scale", "window", "softcap"),
    scratch=_partials,
)

PAGED_ATTENTION = Plugin(
    name="PagedAttention",
    inputs=("q", "key_pool", "value_pool", "query_start", "kv_len", "block_table"),
    outputs=("out",),
    attributes={
        "heads": int,
        "kv_heads": int,
        "head_dim": int,
        "scale": float,
        "window": int,
        "softcap": float,
        "block_size": int,
        "stored": int,
        "queries": int,
        "to": int,
    },
    reference=_reference,
    infer=_infer,
    cost=_cost,
    kernels={CPU: KERNEL, CUDA: attention_on_cuda(KERNEL)},
)
