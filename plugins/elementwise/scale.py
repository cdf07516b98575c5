"""Multiplies rows by one number of the checkpoint.

x: FLOAT [..., W]. factor: FLOAT [1]. out: FLOAT [..., W].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.elementwise.elementwise_cuda import by_element
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("scale@1", ("x", "factor"), ("out",), in_place={"out": 0})


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return [write.op("Mul", operand(node, 0), operand(node, 1))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, dims_of(operand(node, 0)))]


SCALE = Plugin(
    name="Scale",
    inputs=("x", "factor"),
    outputs=("out",),
    attributes={},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: by_element(KERNEL, "scale", other="factor")},
)
