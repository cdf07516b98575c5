"""Matrix product with MXFP4 weights and int8 activations: see gemm.py.

weight: UINT8 [N, K], codes of E2M1 numbers, sign first. scale: BFLOAT16 [N, G], half of the groups' powers of two: a
code of group g represents DOUBLED[code] · scale[n, g].
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.quantize_rows import dequantized
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, int_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU

# Twice the numbers of E2M1, by code: integers, so that sums of their products with int8 are exact.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def weight_of(write: Writer, node: ir.Node, scale: ir.Value) -> ir.Value:
    """Restores the weight of a node, FLOAT [N, K].

    Args:
        write: writer of the graph.
        node: the node.
        scale: its scales.
    """
    codes = operand(node, 1)
    numbers = write.op("Gather", np.array(DOUBLED, np.int8), write.cast(codes, ir.DataType.INT32))
    numbers.shape = codes.shape
    return dequantized(write, numbers, write.cast(scale, ir.DataType.FLOAT), int_of(node, "group"))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return gemm.integers_reference(write, node, weight_of(write, node, operand(node, 3)), None, 4)


GEMM_MXFP4A8 = Plugin(
    name="GemmMxfp4A8",
    inputs=("x", "weight", "x_scale", "scale", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={
        CPU: KernelBinding(
            "gemm_mxfp4a8@1",
            ("x", "weight", "x_scale", "scale", "bias", "starts"),
            ("out",),
            ("epilogue", "group"),
            packed={"weight": "e2m1"},
            layouts=gemm.GROUP_LAYOUTS,
        )
    },
)
