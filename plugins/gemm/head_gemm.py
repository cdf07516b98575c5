"""The product of each head with its own weight: see head_linear.py. A head's weight has a multiple of 16 rows.

x: BFLOAT16 [..., heads·K]. weight: BFLOAT16 [heads·N, K]. The sum is FLOAT; out: `to` [..., heads·N].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.gemm.gemm_cuda import heads_on_cuda
from enginewright.plugins.gemm.head_linear import product_by_head, rows_of
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_attribute, int_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("head_gemm_bf16@1", ("x", "weight"), ("out",), ("heads",))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = (write.cast(operand(node, index), ir.DataType.FLOAT) for index in range(2))
    x.shape, weight.shape = operand(node, 0).shape, operand(node, 1).shape
    return [write.round_to(product_by_head(write, x, weight, int_of(node, "heads")), dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_attribute(node), (*dims_of(operand(node, 0))[:-1], rows_of(operand(node, 1))))]


def _cost(node: ir.Node) -> Cost:
    return Cost(of_token=2 * rows_of(operand(node, 1)) * width_of(operand(node, 1)))


HEAD_GEMM = Plugin(
    name="HeadGemm",
    inputs=("x", "weight"),
    outputs=("out",),
    attributes={"heads": int, "to": int},
    reference=_reference,
    infer=_infer,
    cost=_cost,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: heads_on_cuda(KERNEL)},
)
