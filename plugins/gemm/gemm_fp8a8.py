"""Matrix product with FP8 weights and FP8 activations: see gemm.py.

weight: FLOAT8E4M3FN [N, K], no NaN. scale: FLOAT [N], or, where `group` is not 0, FLOAT [N, G]: of the same
quantization groups as x_scale's. https://arxiv.org/abs/2412.19437, 3.3.2
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_cuda import gemm_on_cuda
from enginewright.plugins.gemm.quantize_rows import spread
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, int_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    group, width, scale = int_of(node, "group"), width_of(operand(node, 1)), operand(node, 3)
    x, weight = (write.cast(operand(node, index), ir.DataType.FLOAT) for index in (0, 1))
    x = write.op("Mul", x, spread(write, operand(node, 2), width, group))
    if group == 0:
        return gemm.reference(write, node, x, weight, scale, 4)
    return gemm.reference(write, node, x, write.op("Mul", weight, spread(write, scale, width, group)), None, 4)


KERNEL = KernelBinding(
    "gemm_fp8a8@1",
    ("x", "weight", "x_scale", "scale", "bias", "starts"),
    ("out",),
    ("epilogue", "group"),
    layouts=gemm.GROUP_LAYOUTS,
)

GEMM_FP8A8 = Plugin(
    name="GemmFp8A8",
    inputs=("x", "weight", "x_scale", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={CUDA: gemm_on_cuda(KERNEL, "fp8a8")},
)
