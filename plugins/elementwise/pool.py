"""Pooling: one row for all rows of a text, their mean, or the first or the last of them. It is in dense graphs only.

x: FLOAT [1, T, W]. out: FLOAT [1, S, W], where S is one row for each text.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.plugin import Plugin, TypeAndDims, operand, width_of
from enginewright.plugins.writer import Writer

POOLINGS = ("first", "last", "mean")


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, pooling = operand(node, 0), node.attributes["pooling"].as_string()
    if pooling == "mean":
        return [write.op("ReduceMean", x, [1])]
    first, end = {"first": (0, 1), "last": (-1, 1 << 30)}[pooling]
    return [write.op("Slice", x, [first], [end], [1])]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (1, ir.SymbolicDim("S"), width_of(operand(node, 0))))]


POOL = Plugin(
    name="Pool", inputs=("x",), outputs=("out",), attributes={"pooling": str}, reference=_reference, infer=_infer
)
