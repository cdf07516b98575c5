"""The mean of the rows of each sequence's tokens.

x: FLOAT [tokens, W]. query_start: INT32 [sequences + 1], first token of each sequence. out: FLOAT [sequences, W].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, query_start = operand(node, 0), write.cast(operand(node, 1), ir.DataType.INT64)
    starts = write.op("Unsqueeze", write.op("Slice", query_start, [0], [-1], [0]), [1])  # [sequences, 1]
    ends = write.op("Unsqueeze", write.op("Slice", query_start, [1], [1 << 30], [0]), [1])
    tokens = write.op("Squeeze", write.op("Shape", x, start=0, end=1))
    token = write.op("Range", write.constant(0), tokens, write.constant(1))
    own = write.op("And", write.op("GreaterOrEqual", token, starts), write.op("Less", token, ends))
    total = write.op("MatMul", write.cast(own, ir.DataType.FLOAT), x)
    return [write.op("Div", total, write.cast(write.op("Sub", ends, starts), ir.DataType.FLOAT))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (ir.SymbolicDim("sequences"), width_of(operand(node, 0))))]


KERNEL = KernelBinding("mean_rows@1", ("x", "query_start"), ("out",))

MEAN_ROWS = Plugin(
    name="MeanRows",
    inputs=("x", "query_start"),
    outputs=("out",),
    attributes={},
    reference=_reference,
    infer=_infer,
    whole_texts=lambda _: True,
    kernels={CPU: KERNEL},
)
