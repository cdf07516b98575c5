"""Multiplies rows by a factor that grows with the logarithm of their position, beyond the original length.

out = x · (1 + beta · log(1 + floor(position / original))). https://ai.meta.com/blog/llama-4-multimodal-intelligence

x: FLOAT [..., W]. positions: INT64 or INT32 [...]. out: FLOAT [..., W].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.elementwise.elementwise_cuda import position_scale_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, int_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("position_scale@1", ("x", "positions"), ("out",), ("beta", "original"), in_place={"out": 0})


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    lengths = write.op("Div", write.cast(operand(node, 1), ir.DataType.FLOAT), float(int_of(node, "original")))
    logarithm = write.op("Log", write.op("Add", write.op("Floor", lengths), 1.0))
    factor = write.op("Add", write.op("Mul", logarithm, float_of(node, "beta")), 1.0)
    return [write.op("Mul", operand(node, 0), write.op("Unsqueeze", factor, [-1]))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, dims_of(operand(node, 0)))]


POSITION_SCALE = Plugin(
    name="PositionScale",
    inputs=("x", "positions"),
    outputs=("out",),
    attributes={"beta": float, "original": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: position_scale_on_cuda(KERNEL)},
)
