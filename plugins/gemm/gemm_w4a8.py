"""Matrix product with weights of 4 bits and int8 activations: see gemm.py.

weight: UINT8 [N, K], codes in [0, 15]. scale: BFLOAT16 [N, G] and zero: INT8 [N, G] in [0, 15], or 8 without it; a code
of group g represents (code - zero[n, g]) · scale[n, g].
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.quantize_rows import dequantized
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, dims_of, int_of, operand, optional
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU

MIDDLE = 8  # offset of the codes of symmetric weights


def weight_of(write: Writer, node: ir.Node, scale: ir.Value, zero: ir.Value | None) -> ir.Value:
    """Restores the weight of a node, FLOAT [N, K].

    Args:
        write: writer of the graph.
        node: the node.
        scale: its scales.
        zero: its zero points; None is MIDDLE for all.
    """
    if zero is None:
        rows, groups = dims_of(scale)
        assert isinstance(rows, int) and isinstance(groups, int)
        zeros: ir.Value = write.constant(np.full((rows, groups), MIDDLE, np.uint8))
    else:
        zeros = write.cast(zero, ir.DataType.UINT8)
    scales = write.cast(scale, ir.DataType.FLOAT)
    return dequantized(write, operand(node, 1), scales, int_of(node, "group"), zeros)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    weight = weight_of(write, node, operand(node, 3), optional(node, 4))
    return gemm.integers_reference(write, node, weight, None, 5)


GEMM_W4A8 = Plugin(
    name="GemmW4A8",
    inputs=("x", "weight", "x_scale", "scale", "zero?", "bias?", "starts?"),
    outputs=("out",),
    attributes=gemm.GROUP_ATTRIBUTES,
    reference=gemm.grouped(_reference),
    infer=gemm.infer,
    cost=gemm.cost,
    by_rows=True,
    weight_rows=gemm.weight_rows,
    kernels={
        CPU: KernelBinding(
            "gemm_w4a8@1",
            ("x", "weight", "x_scale", "scale", "zero", "bias", "starts"),
            ("out",),
            ("epilogue", "group"),
            packed={"weight": "u4"},
            layouts=gemm.GROUP_LAYOUTS,
        )
    },
)
