"""Adds a part of the layer to the residual, and normalizes the sum for the next part.

x, delta: FLOAT [..., W]. weight: FLOAT [W]. sum = x + delta: FLOAT. normed = RMSNormalization(sum, weight): `to`,
and scale: FLOAT [..., G] if `to` is one of CODES, by `group` and `largest` (quantize_rows.py).
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.norm.norm_cuda import norm_on_cuda
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, operand, optional
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding(
    "add_rms_norm@1",
    ("x", "delta", "weight", "largest"),
    ("sum", "normed", "scale"),
    ("epsilon", "group"),
    in_place={"sum": 0},
)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    total = write.op("Add", operand(node, 0), operand(node, 1))
    normed = write.op("RMSNormalization", total, operand(node, 2), axis=-1, epsilon=float_of(node, "epsilon"))
    return [total, *written_as(write, node, normed, optional(node, 3))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, dims_of(operand(node, 0))), *types_as(node)]


ADD_RMS_NORM = Plugin(
    name="AddRmsNorm",
    inputs=("x", "delta", "weight", "largest?"),
    outputs=("sum", "normed", "scale?"),
    attributes={"epsilon": float, **TO_ATTRIBUTES},
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: norm_on_cuda(KERNEL, "normed")},
)
