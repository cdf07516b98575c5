"""RMSNormalization over the last dimension, rounded to `to` on the way out. https://arxiv.org/abs/1910.07467

x: FLOAT [..., W]. weight: FLOAT [W]. out: `to` [..., W].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_attribute, float_of, operand
from enginewright.plugins.writer import Writer

KERNEL = KernelBinding("rms_norm@1", ("x", "weight"), ("out",), ("epsilon",), in_place={"out": 0})


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = operand(node, 0), operand(node, 1)
    normed = write.op("RMSNormalization", x, weight, axis=-1, epsilon=float_of(node, "epsilon"))
    return [write.round_to(normed, dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_attribute(node), dims_of(operand(node, 0)))]


RMS_NORM = Plugin(
    name="RmsNorm",
    inputs=("x", "weight"),
    outputs=("out",),
    attributes={"epsilon": float, "to": int},
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={"cpu": KERNEL},
)
