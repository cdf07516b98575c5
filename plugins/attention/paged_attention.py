"""Attention of packed tokens to the KV pools, through a block table for each sequence.

q: BFLOAT16 [tokens, heads·D]. key_pool, value_pool: [slots, kv_heads, D], as in kv_write.py, and `stored`; where
`queries` is INT8, queries are rounded as such keys are. A slot is block · block_size + its position in the block.
query_start: INT32 [sequences + 1], first token of each sequence. kv_len: INT32 [sequences], positions after this step.
block_table: INT32 [sequences, kv_blocks]. out: `to` [tokens, heads·D]. Query heads h·heads/kv_heads … share kv head h.
window 0 and softcap 0 mean none. A query sees `lookahead` positions after its own, as far as there are keys: 0 is
causal; otherwise a sequence's tokens are all in the step. sinks: FLOAT [heads], as in window_attention.py.
https://arxiv.org/abs/2309.06180
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost, Linear, linear
from enginewright.plugins.attention.attention_cuda import attention_on_cuda
from enginewright.plugins.attention.kv_write import as_stored, padded_head_dim
from enginewright.plugins.attention.masked_attention import masked_attention
from enginewright.plugins.attention.paged_context import PagedContext
from enginewright.plugins.kernel import Call, KernelBinding
from enginewright.plugins.plugin import (
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_attribute,
    float_of,
    int_of,
    operand,
    optional,
)
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

PARTIAL_STATE = 16  # floats after a head's partial output: its maximum and its sum, and padding for alignment


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, key_pool, value_pool, *tables = (operand(node, index) for index in range(6))
    heads, kv_heads, head_dim = (int_of(node, name) for name in ("heads", "kv_heads", "head_dim"))
    context = PagedContext(write, q, tables, int_of(node, "block_size"))
    keys, values = context.of(key_pool), context.of(value_pool)
    visible = context.visible(keys, int_of(node, "window"), int_of(node, "lookahead"))
    grouped = write.op(
        "Reshape", write.cast(q, ir.DataType.FLOAT), [-1, kv_heads, heads // kv_heads, head_dim]
    )  # [tokens, kv_heads, group, head_dim]
    if dtype_attribute(node, "queries") == ir.DataType.INT8:  # bf16 queries are already rounded
        grouped = as_stored(write, grouped, key_pool, ir.DataType.INT8)
    scale, softcap = float_of(node, "scale"), float_of(node, "softcap")
    sinks = optional(node, 6)
    if sinks is not None:
        sinks = write.op("Reshape", sinks, [1, kv_heads, heads // kv_heads, 1])
    y = masked_attention(write, grouped, keys, values, visible, scale, softcap, sinks)
    return [write.round_to(write.op("Reshape", y, [-1, heads * head_dim]), dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_attribute(node), dims_of(operand(node, 0)))]


def _cost(node: ir.Node) -> Cost:
    """Counts Q Kᵀ and P V."""
    return Cost(of_position=2 * 2 * int_of(node, "heads") * int_of(node, "head_dim"), window=int_of(node, "window"))


def partials(call: Call) -> tuple[str, Linear, int]:
    """Returns the buffer for partial results: a row for each 256 positions of the longest sequence."""
    heads, head_dim = int(call.attributes["heads"]), int(call.attributes["head_dim"])
    return "partials", linear(kv_splits=1), heads * (padded_head_dim(head_dim) + PARTIAL_STATE)


KERNEL = KernelBinding(
    "paged_attention@1",
    ("q", "key", "value", "query_start", "kv_len", "block_table", "sinks"),
    ("out",),
    ("heads", "kv_heads", "head_dim", "scale", "window", "lookahead", "softcap"),
    scratch=partials,
)

PAGED_ATTENTION = Plugin(
    name="PagedAttention",
    inputs=("q", "key_pool", "value_pool", "query_start", "kv_len", "block_table", "sinks?"),
    outputs=("out",),
    attributes={
        "heads": int,
        "kv_heads": int,
        "head_dim": int,
        "scale": float,
        "window": int,
        "lookahead": int,
        "softcap": float,
        "block_size": int,
        "stored": int,
        "queries": int,
        "to": int,
    },
    reference=_reference,
    infer=_infer,
    cost=_cost,
    whole_texts=lambda node: int_of(node, "lookahead") > 0,
    kernels={CPU: KERNEL, CUDA: attention_on_cuda(KERNEL)},
)
