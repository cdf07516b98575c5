"""Rotary embedding of packed tokens: RotaryEmbedding without a batch, first half of a head against the second.

x: FLOAT [tokens, heads·D]. cos, sin: FLOAT [tokens, R/2], R ≤ D; dimensions from R on pass. Where nothing is between it
and attention, fusion/rope_kv_write.py replaces it. https://arxiv.org/abs/2104.09864
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, int_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("rope@1", ("x", "cos", "sin"), ("out",), ("heads",))
THREADS = 128  # threads of a block on a GPU


def rotated(write: Writer, x: ir.Value, cos: ir.Value, sin: ir.Value, heads: int) -> ir.Value:
    """Rotates the heads of packed tokens.

    Args:
        write: writer of the graph.
        x: FLOAT [tokens, heads·D].
        cos: FLOAT [tokens, R/2].
        sin: FLOAT [tokens, R/2].
        heads: number of heads.
    """
    batched = [write.op("Unsqueeze", value, [0]) for value in (x, cos, sin)]
    rotary = 2 * width_of(cos)
    partial = {} if rotary == width_of(x) // heads else {"rotary_embedding_dim": rotary}
    return write.op("Squeeze", write.op("RotaryEmbedding", *batched, num_heads=heads, **partial), [0])


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return [rotated(write, operand(node, 0), operand(node, 1), operand(node, 2), int_of(node, "heads"))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, dims_of(operand(node, 0)))]


def _launches(call: Call) -> tuple[Launch, ...]:
    x, cos, out = (call.operands[role] for role in ("x", "cos", "out"))
    kernel = expression(
        "rope",
        "Rope",
        rows=call.rows("x"),
        columns=out.columns,
        head_dim=out.columns // int(call.attributes["heads"]),
        half=cos.columns,
        x_stride=x.stride,
        table_stride=cos.stride,
        out_stride=out.stride,
    )
    return (Launch(kernel, ("x", "cos", "sin", "out"), (blocks(x.rows), ONE, ONE), THREADS),)


ROPE = Plugin(
    name="Rope",
    inputs=("x", "cos", "sin"),
    outputs=("out",),
    attributes={"heads": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, rope="rope_kv_write")},
)
