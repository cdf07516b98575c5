"""Matrix product with int8 weights and int8 activations: see gemm.py.

weight: INT8 [N, K] in [-127, 127]. scale: FLOAT [N].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding(
    "gemm_w8a8@1", ("x", "weight", "x_scale", "scale", "bias", "starts"), ("out",), ("epilogue", "group")
)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    weight = write.cast(operand(node, 1), ir.DataType.FLOAT)
    return gemm.integers_reference(write, node, weight, operand(node, 3), 4)


GEMM_W8A8 = Plugin(
    name="GemmW8A8",
    inputs=("x", "weight", "x_scale", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CPU: KERNEL, CUDA: gemm_on_cuda(KERNEL, "w8a8")},
)
