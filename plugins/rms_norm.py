"""RMSNormalization over the last dimension, rounded to `to` on the way out. https://arxiv.org/abs/1910.07467

x: FLOAT [..., W]. weight: FLOAT [W]. out: `to` [..., W]. With `to` INT8 a row is quantized as quantize_rows.py has it,
and scale: FLOAT [..., 1] is there, too.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_attribute, float_of, operand
from enginewright.plugins.quantize_rows import types_as, written_as
from enginewright.plugins.writer import Writer

KERNEL = KernelBinding("rms_norm@1", ("x", "weight"), ("out", "scale"), ("epsilon",), in_place={"out": 0})


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = operand(node, 0), operand(node, 1)
    normed = write.op("RMSNormalization", x, weight, axis=-1, epsilon=float_of(node, "epsilon"))
    return written_as(write, normed, dtype_attribute(node))


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return types_as(dtype_attribute(node), dims_of(operand(node, 0)))


RMS_NORM = Plugin(
    name="RmsNorm",
    inputs=("x", "weight"),
    outputs=("out", "scale?"),
    attributes={"epsilon": float, "to": int},
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={"cpu": KERNEL},
)
