"""Attention with a window, a lookahead or sinks, which the standard op lacks.

A query sees the last `window` positions, its own included, or all of them, and `lookahead` positions after its own.

The signature is that of ONNX's Attention (opset 24) with 3-D inputs and a past: q FLOAT [1, T, heads·D],
k, v FLOAT [1, T, kv_heads·D], past_key, past_value FLOAT [1, kv_heads, P, D] → y FLOAT [1, T, heads·D],
present_key, present_value FLOAT [1, kv_heads, P + T, D]. window 0 and softcap 0 mean none. sinks FLOAT [heads]: a logit
of each head that belongs to no position and joins the softmax's sum (https://arxiv.org/abs/2309.17453).
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.attention.masked_attention import in_window, masked_attention
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, int_of, operand, optional, width_of
from enginewright.plugins.writer import Writer


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, k, v, past_key, past_value = (operand(node, index) for index in range(5))
    heads, kv_heads = int_of(node, "q_num_heads"), int_of(node, "kv_num_heads")
    head_dim = width_of(q) // heads

    def present(past: ir.Value, new: ir.Value) -> ir.Value:
        split = write.op("Reshape", new, [1, -1, kv_heads, head_dim])
        return write.op("Concat", past, write.op("Transpose", split, perm=[0, 2, 1, 3]), axis=2)

    keys, values = present(past_key, k), present(past_value, v)  # [1, kv_heads, P + T, head_dim]
    past_tokens = write.op("Shape", past_key, start=2, end=3)  # [1]
    all_tokens = write.op("Shape", keys, start=2, end=3)
    zero, one = write.constant(0), write.constant(1)
    key_at = write.op("Range", zero, write.op("Squeeze", all_tokens), one)  # [P + T]
    sees = int_of(node, "window"), int_of(node, "lookahead")
    query_at = write.op("Range", write.op("Squeeze", past_tokens), write.op("Squeeze", all_tokens), one)  # [T]
    # [T, P + T]
    visible = in_window(write, write.op("Unsqueeze", query_at, [1]), key_at, *sees)

    sinks = optional(node, 5)
    if sinks is not None:
        sinks = write.op("Reshape", sinks, [kv_heads, heads // kv_heads, 1, 1])
    grouped = write.op("Reshape", q, [-1, kv_heads, heads // kv_heads, head_dim])
    y = masked_attention(
        write,
        write.op("Transpose", grouped, perm=[1, 2, 0, 3]),  # [kv_heads, group, T, head_dim]
        write.op("Transpose", keys, perm=[1, 0, 2, 3]),  # [kv_heads, 1, P + T, head_dim]
        write.op("Transpose", values, perm=[1, 0, 2, 3]),
        visible,
        float_of(node, "scale"),
        float_of(node, "softcap"),
        sinks,
    )
    joined = write.op("Reshape", write.op("Transpose", y, perm=[2, 0, 1, 3]), [1, -1, heads * head_dim])
    return [joined, keys, values]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    q, past = operand(node, 0), operand(node, 3)
    batch, kv_heads, before, head_dim = dims_of(past)
    present = (batch, kv_heads, ir.SymbolicDim(f"{before} + {dims_of(q)[1]}"), head_dim)
    return [(ir.DataType.FLOAT, dims_of(q)), (ir.DataType.FLOAT, present), (ir.DataType.FLOAT, present)]


WINDOW_ATTENTION = Plugin(
    name="WindowAttention",
    inputs=("q", "k", "v", "past_key", "past_value", "sinks?"),
    outputs=("y", "present_key", "present_value"),
    attributes={
        "q_num_heads": int,
        "kv_num_heads": int,
        "scale": float,
        "softcap": float,
        "window": int,
        "lookahead": int,
    },
    reference=_reference,
    infer=_infer,
)
