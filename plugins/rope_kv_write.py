"""Rotary embedding of queries and keys, and the write of keys and values to their slots: rope.py and kv_write.py.

q: FLOAT [tokens, heads·D]. k, v: FLOAT [tokens, kv_heads·D]. cos, sin: FLOAT [tokens, R/2]. key_pool, value_pool:
[slots, kv_heads, D], as kv_write.py has them. slots: INT32 [tokens]. q_out: BFLOAT16 [tokens, heads·D].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.kv_cuda import kv_constant
from enginewright.plugins.kv_write import written
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_of, int_of, operand
from enginewright.plugins.rope import rotated
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, k, v, cos, sin, key_pool, value_pool, slots = (operand(node, index) for index in range(8))
    keys = rotated(write, k, cos, sin, int_of(node, "kv_heads"))
    return [
        write.cast(rotated(write, q, cos, sin, int_of(node, "heads")), ir.DataType.BFLOAT16),
        written(write, node, key_pool, keys, slots),
        written(write, node, value_pool, v, slots),
    ]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    pools = [(dtype_of(pool), dims_of(pool)) for pool in (operand(node, 5), operand(node, 6))]
    return [(ir.DataType.BFLOAT16, dims_of(operand(node, 0))), *pools]


KERNEL = KernelBinding(
    "rope_kv_write@1",
    ("q", "k", "v", "cos", "sin", "key", "value", "slots"),
    ("q_out", "", ""),
    ("heads", "kv_heads", "head_dim"),
)
THREADS = 128  # of a block on a GPU
WARPS = THREADS // 32


def _launches(call: Call) -> tuple[Launch, ...]:
    operands = call.operands
    heads, kv_heads = int(call.attributes["heads"]), int(call.attributes["kv_heads"])
    kernel = expression(
        "rope_kv_write",
        "RopeKvWrite",
        kv=kv_constant(operands["key"], operands["value"], kv_heads),
        heads=heads,
        half=operands["cos"].columns,
        q_stride=operands["q"].stride,
        k_stride=operands["k"].stride,
        v_stride=operands["v"].stride,
        table_stride=operands["cos"].stride,
        out_stride=operands["q_out"].stride,
        padded=operands["q_out"].padded,
    )
    arguments = ("q", "k", "v", "cos", "sin", "slots", "key", "value", "q_out")
    grid = blocks(operands["q"].rows), blocks(heads + 2 * kv_heads, WARPS), ONE
    return (Launch(kernel, arguments, grid, THREADS),)


ROPE_KV_WRITE = Plugin(
    name="RopeKvWrite",
    inputs=("q", "k", "v", "cos", "sin", "key_pool", "value_pool", "slots"),
    outputs=("q_out", "key_pool", "value_pool"),
    attributes={"heads": int, "kv_heads": int, "head_dim": int, "stored": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, rope_kv_write="rope_kv_write")},
)
