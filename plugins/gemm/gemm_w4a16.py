"""Matrix product with weights of 4 bits and bfloat16 activations: see gemm.py, and gemm_w4a8.py for weights.

GPUs run it; `group` is that of the weights.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.gemm.gemm_w4a8 import weight_of
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand, optional
from enginewright.plugins.writer import Writer
from enginewright.targets import CUDA

KERNEL = KernelBinding(
    "gemm_w4a16@1",
    ("x", "weight", "scale", "zero", "bias", "starts"),
    ("out",),
    ("epilogue", "group"),
    packed={"weight": "u4"},
    layouts=gemm.GROUP_LAYOUTS,
)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x = write.cast(operand(node, 0), ir.DataType.FLOAT)
    weight = weight_of(write, node, operand(node, 2), optional(node, 3))
    return gemm.reference(write, node, x, weight, None, 4)


GEMM_W4A16 = Plugin(
    name="GemmW4A16",
    inputs=("x", "weight", "scale", "zero?", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CUDA: gemm_on_cuda(KERNEL, "w4a16")},
)
