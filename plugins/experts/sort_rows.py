"""Sorts copies of rows by expert, as route.py numbers them: out[places[..., j]] = x[...] for every j, rounded to `to`.

x: FLOAT [..., K]. places: INT32 [..., top], each row of R once. out: `to` [R, K]. With `to` one of CODES a row is
quantized as in quantize_rows.py, by `group` and `largest`, and there is also scale: FLOAT [R, G].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.experts.experts_cuda import sort_rows_on_cuda
from enginewright.plugins.experts.route import in_order, rows_of
from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, groups_of, quantized
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import (
    CODES,
    Plugin,
    TypeAndDims,
    dtype_attribute,
    int_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, places = operand(node, 0), operand(node, 1)
    width, to = width_of(x), dtype_attribute(node)
    _, copy = in_order(write, places)
    tokens = write.op("Div", copy, width_of(places))
    rows = write.op("Gather", write.op("Reshape", x, [-1, width]), tokens, axis=0)
    if to in CODES:
        return quantized(write, rows, (rows_of(places), width), int_of(node, "group"), to, optional(node, 2))
    return [write.round_to(rows, to)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    x, places, to = operand(node, 0), operand(node, 1), dtype_attribute(node)
    rows, width = rows_of(places), width_of(x)
    out = (to, (rows, width))
    return [out, (ir.DataType.FLOAT, (rows, groups_of(width, int_of(node, "group"))))] if to in CODES else [out]


KERNEL = KernelBinding("sort_rows@1", ("x", "places", "largest"), ("out", "scale"), ("group",))

SORT_ROWS = Plugin(
    name="SortRows",
    inputs=("x", "places", "largest?"),
    outputs=("out", "scale?"),
    attributes=TO_ATTRIBUTES,
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: sort_rows_on_cuda(KERNEL)},
)
