"""Prepares new tokens for latent attention: joins queries, and writes latent vectors and rotated keys to their slots.

latent_attention.py says what these are.

q: FLOAT [tokens, heads·C]. q_rope: FLOAT [tokens, heads·R]. c: FLOAT [tokens, C]. k_rope: FLOAT [tokens, R].
cos, sin: FLOAT [tokens, R/2]. latent_pool: BFLOAT16 [slots, 1, C + R]. slots: INT32 [tokens].
q_out: BFLOAT16 [tokens, heads·(C + R)], each head q and then q_rope, rotated. Functional: the pool comes out changed; a
lowering works in place.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.attention.kv_cuda import kv_constant
from enginewright.plugins.attention.rope import rotated
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_of, int_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, q_rope, c, k_rope, cos, sin, pool, slots = (operand(node, index) for index in range(8))
    heads, latent_dim, rope_dim = int_of(node, "heads"), width_of(c), width_of(k_rope)
    rotated_q = rotated(write, q_rope, cos, sin, heads)
    queries = write.op(
        "Concat",
        write.op("Reshape", q, [-1, heads, latent_dim]),
        write.op("Reshape", rotated_q, [-1, heads, rope_dim]),
        axis=-1,
    )
    new = write.op("Concat", c, rotated(write, k_rope, cos, sin, 1), axis=-1)
    rows = write.cast(write.op("Reshape", new, [-1, 1, latent_dim + rope_dim]), ir.DataType.BFLOAT16)
    at = write.op("Unsqueeze", write.cast(slots, ir.DataType.INT64), [-1])
    joined = write.op("Reshape", queries, [-1, heads * (latent_dim + rope_dim)])
    return [write.cast(joined, ir.DataType.BFLOAT16), write.op("ScatterND", pool, at, rows)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    q, pool = operand(node, 0), operand(node, 6)
    width = int_of(node, "heads") * width_of(pool)
    return [(ir.DataType.BFLOAT16, (dims_of(q)[0], width)), (dtype_of(pool), dims_of(pool))]


KERNEL = KernelBinding(
    "latent_write@1",
    ("q", "q_rope", "c", "k_rope", "cos", "sin", "latent", "slots"),
    ("q_out", ""),
    ("heads",),
)
THREADS = 128  # threads of a block on a GPU
WARPS = THREADS // 32


def _launches(call: Call) -> tuple[Launch, ...]:
    operands, heads = call.operands, int(call.attributes["heads"])
    kernel = expression(
        "latent_write",
        "LatentWrite",
        kv=kv_constant(operands["latent"], operands["latent"], 1),
        heads=heads,
        latent=operands["c"].columns,
        half=operands["cos"].columns,
        **{f"{role}_stride": operands[role].stride for role in ("q", "q_rope", "c", "k_rope")},
        table_stride=operands["cos"].stride,
        out_stride=operands["q_out"].stride,
        padded=operands["q_out"].padded,
    )
    arguments = ("q", "q_rope", "c", "k_rope", "cos", "sin", "slots", "latent", "q_out")
    return (Launch(kernel, arguments, (blocks(operands["q"].rows), blocks(heads + 1, WARPS), ONE), THREADS),)


LATENT_WRITE = Plugin(
    name="LatentWrite",
    inputs=("q", "q_rope", "c", "k_rope", "cos", "sin", "latent_pool", "slots"),
    outputs=("q_out", "latent_pool"),
    attributes={"heads": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, latent_write="latent_write")},
)
