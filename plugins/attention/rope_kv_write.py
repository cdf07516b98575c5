"""Rotary embedding of queries and keys, then the writes of kv_write.py: see rope.py and kv_write.py.

q: FLOAT [tokens, heads·D]. k, v: FLOAT [tokens, kv_heads·D]. cos, sin: FLOAT [tokens, R/2]. key_pool, value_pool:
[slots, kv_heads, D], as in kv_write.py. slots: INT32 [tokens]. q_out: BFLOAT16 [tokens, heads·D]. Without cos and
sin nothing is rotated.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.attention.kv_cuda import kv_constant
from enginewright.plugins.attention.kv_write import types_of, written
from enginewright.plugins.attention.rope import rotated
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.plugin import Plugin, int_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, k, v, key_pool, value_pool, slots = (operand(node, index) for index in (0, 1, 2, 5, 6, 7))
    cos, sin = node.inputs[3:5]
    if cos is not None and sin is not None:
        q, k = (rotated(write, x, cos, sin, int_of(node, heads)) for x, heads in ((q, "heads"), (k, "kv_heads")))
    return written(write, node, (q, k, v), (key_pool, value_pool), slots)


KERNEL = KernelBinding(
    "rope_kv_write@1",
    ("q", "k", "v", "cos", "sin", "key", "value", "slots"),
    ("q_out", "", ""),
    ("heads", "kv_heads", "head_dim"),
)
THREADS = 128  # threads of a block on a GPU
WARPS = THREADS // 32


def rope_constants(call: Call) -> dict[str, int]:
    """Returns the constants of queries and of the tables that they are rotated by."""
    q, q_out, cos = (call.operands.get(role) for role in ("q", "q_out", "cos"))
    assert q is not None and q_out is not None
    return {
        "heads": int(call.attributes["heads"]),
        "half": cos.columns if cos else 0,
        "q_stride": q.stride,
        "table_stride": cos.stride if cos else 0,
        "out_stride": q_out.stride,
        "padded": q_out.padded,
    }


def _launches(call: Call) -> tuple[Launch, ...]:
    operands = call.operands
    heads, kv_heads = int(call.attributes["heads"]), int(call.attributes["kv_heads"])
    kernel = expression(
        "rope_kv_write",
        "RopeKvWrite",
        kv=kv_constant(operands["key"], operands["value"], kv_heads),
        **rope_constants(call),
        k_stride=operands["k"].stride,
        v_stride=operands["v"].stride,
    )
    arguments = ("q", "k", "v", "cos", "sin", "slots", "key", "value", "q_out")
    grid = blocks(operands["q"].rows), blocks(heads + 2 * kv_heads, WARPS), ONE
    return (Launch(kernel, arguments, grid, THREADS),)


ROPE_KV_WRITE = Plugin(
    name="RopeKvWrite",
    inputs=("q", "k", "v", "cos?", "sin?", "key_pool", "value_pool", "slots"),
    outputs=("q_out", "key_pool", "value_pool"),
    attributes={"heads": int, "kv_heads": int, "head_dim": int, "stored": int},
    reference=_reference,
    infer=types_of,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, rope_kv_write="rope_kv_write")},
)
