"""Linear layers of experts, each over its own rows: y = x weight[e]ᵀ (+ bias[e]), then an epilogue of gemm.py.

x: FLOAT [R, K], rows sorted by expert. weight: FLOAT [E · N, K], the experts' matrices one after another, each with its
gates first where the epilogue is gated. starts: INT32 [1, E + 1], as in route.py. bias: FLOAT [E · N]. Quantization
replaces it by a matrix product, with `starts` for its groups of rows.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm import gemm
from enginewright.plugins.plugin import Plugin, operand
from enginewright.plugins.writer import Writer

STARTS = 3  # index of the input


def _of_one(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return gemm.reference(write, node, operand(node, 0), operand(node, 1), None, 2)


GROUPED_LINEAR = Plugin(
    name="GroupedLinear",
    inputs=("x", "weight", "bias?", "starts"),
    outputs=("y",),
    attributes=gemm.ATTRIBUTES,
    reference=gemm.grouped(_of_one),
    infer=gemm.infer,
    by_rows=True,
)
