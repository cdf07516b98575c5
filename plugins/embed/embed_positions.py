"""Looks up rows of a table of learned positions.

positions: INT64 or INT32 [...]. table: FLOAT [P, H]. out: FLOAT [..., H].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.elementwise.elementwise_cuda import by_element
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("gather_rows@1", ("rows", "x"), ("out",), layouts={"x": "plain"})


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return [write.op("Gather", operand(node, 1), operand(node, 0), axis=0)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (*dims_of(operand(node, 0)), width_of(operand(node, 1))))]


EMBED_POSITIONS = Plugin(
    name="EmbedPositions",
    inputs=("positions", "table"),
    outputs=("out",),
    attributes={},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: by_element(KERNEL, "gather", source="rows")},
)
