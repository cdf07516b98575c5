"""Matrix product with FP4 weights (E2M1) and bfloat16 activations: see gemm.py, and gemm_mxfp4a8.py for weights.

GPUs run it; `group` is that of the weights.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.gemm.gemm_mxfp4a8 import weight_of
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CUDA

KERNEL = KernelBinding(
    "gemm_mxfp4a16@1",
    ("x", "weight", "scale", "bias", "starts"),
    ("out",),
    ("epilogue", "group"),
    packed={"weight": "e2m1"},
    layouts=gemm.GROUP_LAYOUTS,
)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x = write.cast(operand(node, 0), ir.DataType.FLOAT)
    return gemm.reference(write, node, x, weight_of(write, node, operand(node, 2)), None, 3)


GEMM_MXFP4A16 = Plugin(
    name="GemmMxfp4A16",
    inputs=("x", "weight", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CUDA: gemm_on_cuda(KERNEL, "mxfp4a16")},
)
