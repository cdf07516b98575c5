"""Cosine and sine of every position times every inverse frequency, for rotary embeddings.

positions: INT64 or INT32 [...]. inv_freq: FLOAT [R/2]. cos, sin: FLOAT [..., R/2], both times `scale` (yarn's
attention factor; 1.0 for others). The product of position and frequency is computed in fp32.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Launch
from enginewright.plugins.kernel import ONE, Call, KernelBinding, blocks, expression
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("rope_table@1", ("positions", "inv_freq"), ("cos", "sin"), ("scale",))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    positions, inv_freq, scale = operand(node, 0), operand(node, 1), float_of(node, "scale")
    column = write.op("Unsqueeze", write.cast(positions, ir.DataType.FLOAT), [-1])
    angles = write.op("Mul", column, inv_freq)
    return [write.op("Mul", write.op("Cos", angles), scale), write.op("Mul", write.op("Sin", angles), scale)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    table = (ir.DataType.FLOAT, (*dims_of(operand(node, 0)), width_of(operand(node, 1))))
    return [table, table]


def _launches(call: Call) -> tuple[Launch, ...]:
    cos = call.operands["cos"]
    scale = float(call.attributes["scale"])
    kernel = expression("rope_table", "RopeTable", columns=cos.columns, stride=cos.stride, scale=scale)
    arguments = ("positions", "inv_freq", "cos", "sin")
    return (Launch(kernel, arguments, (blocks(cos.rows), ONE, ONE), threads=64),)


ROPE_TABLE = Plugin(
    name="RopeTable",
    inputs=("positions", "inv_freq"),
    outputs=("cos", "sin"),
    attributes={"scale": float},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: KERNEL.on_cuda(_launches, rope_table="rope_table")},
)
