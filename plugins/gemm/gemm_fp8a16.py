"""Matrix product with FP8 weights and bfloat16 activations: see gemm.py.

weight: FLOAT8E4M3FN [N, K], no NaN. scale: FLOAT [N]; row n of the weight represents weight[n] · scale[n]. Or, where
`group` is not 0, FLOAT [N, G]: a number for each quantization group of `group` columns (a multiple of 32 up to 256),
the last one perhaps shorter.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.gemm.quantize_rows import spread
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, int_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = (write.cast(operand(node, index), ir.DataType.FLOAT) for index in (0, 1))
    group, scale = int_of(node, "group"), operand(node, 2)
    if group == 0:
        return gemm.reference(write, node, x, weight, scale, 3)
    weight = write.op("Mul", weight, spread(write, scale, width_of(operand(node, 1)), group))
    return gemm.reference(write, node, x, weight, None, 3)


KERNEL = KernelBinding(
    "gemm_fp8a16@1",
    ("x", "weight", "scale", "bias", "starts"),
    ("out",),
    ("epilogue", "group"),
    layouts=gemm.GROUP_LAYOUTS,
)

GEMM_FP8A16 = Plugin(
    name="GemmFp8A16",
    inputs=("x", "weight", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CPU: KERNEL, CUDA: gemm_on_cuda(KERNEL, "fp8a16")},
)
