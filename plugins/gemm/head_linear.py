"""A linear layer with a weight of its own for each head: head h of y is head h of x times weight hᵀ.

x: FLOAT [..., heads·K]. weight: FLOAT [heads·N, K], the heads' weights one after another. y: FLOAT [..., heads·N].
No target has a kernel for it: quantization replaces it by a HeadGemm.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, int_of, operand, width_of
from enginewright.plugins.writer import Writer


def product_by_head(write: Writer, x: ir.Value, weight: ir.Value, heads: int) -> ir.Value:
    """Computes the product of each head with its own weight.

    Args:
        write: writer of the graph.
        x: FLOAT [..., heads·K].
        weight: FLOAT [heads·N, K].
        heads: number of heads.
    """
    columns, outputs = width_of(weight), rows_of(weight) // heads
    by_head = write.op("Reshape", x, [-1, heads, 1, columns])
    across = write.op("Transpose", write.op("Reshape", weight, [heads, outputs, columns]), perm=[0, 2, 1])
    leading = [1, -1] if len(dims_of(x)) == 3 else [-1]
    return write.op("Reshape", write.op("MatMul", by_head, across), [*leading, heads * outputs])


def rows_of(weight: ir.Value) -> int:
    """Returns the number of a weight's rows, which must be known."""
    rows = dims_of(weight)[0]
    assert isinstance(rows, int), f"{weight.name} has an unknown number of rows"
    return rows


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return [product_by_head(write, operand(node, 0), operand(node, 1), int_of(node, "heads"))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (*dims_of(operand(node, 0))[:-1], rows_of(operand(node, 1))))]


HEAD_LINEAR = Plugin(
    name="HeadLinear",
    inputs=("x", "weight"),
    outputs=("y",),
    attributes={"heads": int},
    reference=_reference,
    infer=_infer,
    by_rows=True,
)
