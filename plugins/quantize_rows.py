"""Rows as INT8 with a scale a row: symmetric, codes in [-127, 127], rounded half to even.

x: FLOAT or BFLOAT16 [..., K]. q: INT8 [..., K]. scale: FLOAT [..., 1]. With largest = max|x| of a row, scale is
largest / 127 and q is x · (127 / largest), in fp32. A largest below TINY counts as 0: scale 0, codes 0. A NaN or an
infinity makes the row's scale NaN; its codes mean nothing then.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Dims, Plugin, TypeAndDims, dims_of, operand
from enginewright.plugins.writer import Writer

LARGEST_CODE = 127.0
TINY = 2.0**-120  # below about 2^-121, 127 / largest is infinite


def quantized(write: Writer, x: ir.Value) -> list[ir.Value]:
    """q and scale of a FLOAT value."""
    largest = write.op("ReduceMax", write.op("Abs", x), [-1], keepdims=1)
    tiny = write.op("Less", largest, TINY)
    factor = write.op("Where", tiny, 0.0, write.op("Div", LARGEST_CODE, largest))
    held = write.op("Clip", write.op("Round", write.op("Mul", x, factor)), -LARGEST_CODE, LARGEST_CODE)
    scale = write.op("Where", tiny, 0.0, write.op("Div", largest, LARGEST_CODE))
    nan_or_zero = write.op("ReduceSum", write.op("Mul", x, 0.0), [-1], keepdims=1)
    return [write.cast(held, ir.DataType.INT8), write.op("Add", scale, nan_or_zero)]


def quantized_types(dims: Dims) -> list[TypeAndDims]:
    return [(ir.DataType.INT8, dims), (ir.DataType.FLOAT, (*dims[:-1], 1))]


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return quantized(write, write.cast(operand(node, 0), ir.DataType.FLOAT))


QUANTIZE_ROWS = Plugin(
    name="QuantizeRows",
    inputs=("x",),
    outputs=("q", "scale"),
    attributes={},
    reference=_reference,
    infer=lambda node: quantized_types(dims_of(operand(node, 0))),
    kernels={"cpu": KernelBinding("quantize_rows@1", ("x",), ("q", "scale"))},
    by_rows=True,
)


def written_as(write: Writer, value: ir.Value, to: ir.DataType) -> list[ir.Value]:
    """The last outputs of an op whose result may be INT8: the FLOAT value as `to`, and its scale if that is INT8."""
    return quantized(write, value) if to == ir.DataType.INT8 else [write.round_to(value, to)]


def types_as(to: ir.DataType, dims: Dims) -> list[TypeAndDims]:
    return quantized_types(dims) if to == ir.DataType.INT8 else [(to, dims)]
