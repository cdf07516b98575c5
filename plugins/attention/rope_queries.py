"""Rotary embedding of queries alone, for attention to keys and values that another layer has written.

It is the part of rope_kv_write.py that concerns queries.

q: FLOAT [tokens, heads·D]. cos, sin: FLOAT [tokens, R/2]. stored: dtype of the pools that are read. q_out: BFLOAT16
[tokens, heads·D]. Without cos and sin nothing is rotated.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.attention.kv_cuda import kv_constant
from enginewright.plugins.attention.kv_write import queries_as_read
from enginewright.plugins.attention.rope import rotated
from enginewright.plugins.attention.rope_kv_write import THREADS, WARPS, rope_constants
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, int_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    q, (cos, sin) = operand(node, 0), node.inputs[1:3]
    if cos is not None and sin is not None:
        q = rotated(write, q, cos, sin, int_of(node, "heads"))
    return [queries_as_read(write, node, q)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.BFLOAT16, dims_of(operand(node, 0)))]


KERNEL = KernelBinding(
    "rope_queries@1", ("q", "cos", "sin", "key", "value"), ("q_out",), ("heads", "kv_heads", "head_dim")
)


def _launches(call: Call) -> tuple[Launch, ...]:
    heads, kv_heads = int(call.attributes["heads"]), int(call.attributes["kv_heads"])
    kernel = expression(
        "rope_queries",
        "RopeQueries",
        kv=kv_constant(call.operands["key"], call.operands["value"], kv_heads),
        **rope_constants(call),
    )
    grid = blocks(call.operands["q"].rows), blocks(heads, WARPS), ONE
    return (Launch(kernel, ("q", "cos", "sin", "q_out"), grid, THREADS),)


ROPE_QUERIES = Plugin(
    name="RopeQueries",
    inputs=("q", "cos?", "sin?", "key_pool", "value_pool"),
    outputs=("q_out",),
    attributes={"heads": int, "kv_heads": int, "head_dim": int, "stored": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, rope_queries="rope_kv_write")},
)
