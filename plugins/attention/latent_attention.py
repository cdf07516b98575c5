"""Multi-head latent attention of one dense sequence: all heads attend to one latent vector for each position.

The result of a head is a weighted sum of latent vectors. https://arxiv.org/abs/2405.04434, with the projections of keys
and values absorbed into those of queries and outputs.

q: FLOAT [1, T, heads·C], queries in the latent space. q_rope: FLOAT [1, T, heads·R], the parts of them that have a
position, not rotated yet. c: FLOAT [1, T, C], the latent vectors of the new tokens. k_rope: FLOAT [1, T, R], the key
that all heads share, not rotated yet. cos, sin: FLOAT [1, T, R/2]. past_latent: FLOAT [1, 1, P, C + R], of all tokens
before, each the latent vector and then the rotated key. y: FLOAT [1, T, heads·C]. present_latent: FLOAT [1, 1, P + T,
C + R].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.attention.masked_attention import in_window, masked_attention
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, int_of, operand, width_of
from enginewright.plugins.writer import Writer


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, q_rope, c, k_rope, cos, sin, past = (operand(node, index) for index in range(7))
    heads, latent_dim, rope_dim = int_of(node, "heads"), width_of(c), width_of(k_rope)
    width = latent_dim + rope_dim
    rotated_q = write.op("RotaryEmbedding", q_rope, cos, sin, num_heads=heads)
    rotated_k = write.op("RotaryEmbedding", k_rope, cos, sin, num_heads=1)
    new = write.op("Reshape", write.op("Concat", c, rotated_k, axis=-1), [1, 1, -1, width])
    keys = write.op("Concat", past, new, axis=2)  # [1, 1, P + T, C + R]
    queries = write.op(
        "Concat",
        write.op("Reshape", q, [1, -1, heads, latent_dim]),
        write.op("Reshape", rotated_q, [1, -1, heads, rope_dim]),
        axis=-1,
    )
    before = write.op("Squeeze", write.op("Shape", past, start=2, end=3))
    total = write.op("Squeeze", write.op("Shape", keys, start=2, end=3))
    zero, one = write.constant(0), write.constant(1)
    key_at, query_at = write.op("Range", zero, total, one), write.op("Range", before, total, one)
    visible = in_window(write, write.op("Unsqueeze", query_at, [1]), key_at, 0)
    y = masked_attention(
        write,
        write.op("Transpose", queries, perm=[0, 2, 1, 3]),  # [1, heads, T, C + R]
        keys,
        write.op("Slice", keys, [0], [latent_dim], [3]),
        visible,
        float_of(node, "scale"),
        softcap=0.0,
    )
    joined = write.op("Reshape", write.op("Transpose", y, perm=[0, 2, 1, 3]), [1, -1, heads * latent_dim])
    return [joined, keys]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    q, past = operand(node, 0), operand(node, 6)
    batch, one, before, width = dims_of(past)
    present = (batch, one, ir.SymbolicDim(f"{before} + {dims_of(q)[1]}"), width)
    return [(ir.DataType.FLOAT, dims_of(q)), (ir.DataType.FLOAT, present)]


LATENT_ATTENTION = Plugin(
    name="LatentAttention",
    inputs=("q", "q_rope", "c", "k_rope", "cos", "sin", "past_latent"),
    outputs=("y", "present_latent"),
    attributes={"heads": int, "scale": float},
    reference=_reference,
    infer=_infer,
)
