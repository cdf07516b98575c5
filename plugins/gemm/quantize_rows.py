"""Quantizes rows with a scale for each quantization group of columns: symmetric, rounded half to even.

x: FLOAT or BFLOAT16 [..., K]. largest: FLOAT [G], an initializer, or absent. q: `to` [..., K], INT8 in [-127, 127] or
FLOAT8E4M3FN in [-448, 448]. scale: FLOAT [..., G]: one for each group of `group` columns (a multiple of 32), the last
one perhaps shorter; with group 0 the whole row is one. With amax = max|x| of a group (dynamic), or the number in
`largest` for that group of all rows (static; larger numbers are clipped), and max_code the largest code, scale is amax
/ max_code and q is x · (max_code / amax), in fp32. An amax below `tiny` of the codes' dtype counts as 0: scale 0, codes
0. A NaN or an infinity makes the group's scale NaN; its codes mean nothing then. Rows of a KV pool are quantized in the
same way.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm.rows_cuda import quantize_rows_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import (
    CODES,
    Dims,
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_attribute,
    int_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def groups_of(width: int, group: int) -> int:
    """Returns the number of quantization groups in a row, the last one perhaps shorter.

    Args:
        width: columns of the row.
        group: columns of a group; 0 is the whole row.
    """
    return -(-width // group) if group else 1


def quantized(
    write: Writer,
    x: ir.Value,
    dims: Dims,
    group: int,
    dtype: ir.DataType,
    given: ir.Value | None = None,
) -> list[ir.Value]:
    """Quantizes a FLOAT value.

    Args:
        write: writer of the graph.
        x: the value.
        dims: its dimensions.
        group: columns of a group; 0 is the whole row.
        dtype: dtype of the codes.
        given: fixed amax of each group; None computes it.

    Returns:
        q and scale.
    """
    width, max_code = dims[-1], CODES[dtype].largest
    assert isinstance(width, int)
    groups, outer = groups_of(width, group), [0] * (len(dims) - 1)  # in a Reshape, 0 is the dimension as it is
    if groups > 1:  # [..., G, group], zeros after the last column
        x = write.op("Pad", x, [0, groups * group - width], None, [-1])
        x = write.op("Reshape", x, [*outer, groups, group])
    amax = write.op("ReduceMax", write.op("Abs", x), [-1], keepdims=1)
    if given is not None:
        each = write.op("Unsqueeze", given, [-1]) if groups > 1 else given
        amax = write.op("Expand", each, write.op("Shape", amax))
    tiny = write.op("Less", amax, CODES[dtype].tiny)
    factor = write.op("Where", tiny, 0.0, write.op("Div", max_code, amax))
    q = write.op("Clip", write.op("Mul", x, factor), -max_code, max_code)
    if dtype == ir.DataType.INT8:  # a Cast would truncate
        q = write.op("Round", q)
    scale = write.op("Where", tiny, 0.0, write.op("Div", amax, max_code))
    nan_or_zero = write.op("ReduceSum", write.op("Mul", x, 0.0), [-1], keepdims=1)
    scale = write.op("Add", scale, nan_or_zero)
    if groups > 1:
        q = write.op("Slice", write.op("Reshape", q, [*outer, groups * group]), [0], [width], [-1])
        scale = write.op("Squeeze", scale, [-1])
    return [write.cast(q, dtype), scale]


def dequantized(write: Writer, q: ir.Value, scale: ir.Value, group: int, zero: ir.Value | None = None) -> ir.Value:
    """Restores FLOAT: (q - zero) · scale, by quantization groups.

    Args:
        write: writer of the graph.
        q: codes.
        scale: scales of groups.
        group: columns of a group; 0 is the whole row.
        zero: zero points of groups; None is 0.
    """
    width = width_of(q)
    return write.op("DequantizeLinear", q, scale, zero, axis=-1, block_size=min(group, width) or width)


def spread(write: Writer, scale: ir.Value, width: int, group: int) -> ir.Value:
    """Repeats scales of groups for their columns; scales of whole rows stay as they are.

    Args:
        write: writer of the graph.
        scale: scales [..., G].
        width: columns of the row.
        group: columns of a group; 0 is the whole row.
    """
    if group == 0:
        return scale
    outer = len(dims_of(scale)) - 1
    each = write.op("Expand", write.op("Unsqueeze", scale, [-1]), [*[1] * (outer + 1), group])  # [..., G, group]
    wide = write.op("Reshape", each, [*[0] * outer, groups_of(width, group) * group])
    return write.op("Slice", wide, [0], [width], [-1])


# Attributes of ops whose result may be codes: the dtype, and the columns that share a scale. Their last input is
# `largest`, which is absent where the result is no code, or its amax is computed from it.
TO_ATTRIBUTES = {"to": int, "group": int}


def written_as(
    write: Writer, node: ir.Node, value: ir.Value, amax: ir.Value | None, width: int | None = None
) -> list[ir.Value]:
    """Computes the last outputs of such an op: the FLOAT value as `to`, and its scale.

    Args:
        write: writer of the graph.
        node: the node.
        value: its result, FLOAT.
        amax: fixed amax of each group; None computes it.
        width: columns of the value; None where its dimensions are those of input 0.
    """
    to = dtype_attribute(node)
    if to in CODES:
        return quantized(write, value, _dims_as(node, width), int_of(node, "group"), to, amax)
    return [write.round_to(value, to)]


def types_as(node: ir.Node, width: int | None = None) -> list[TypeAndDims]:
    """Infers the last outputs of such an op.

    Args:
        node: the node.
        width: columns of the result; None where its dimensions are those of input 0.
    """
    to, dims = dtype_attribute(node), _dims_as(node, width)
    if to not in CODES:
        return [(to, dims)]
    columns = dims[-1]
    assert isinstance(columns, int)
    return [(to, dims), (ir.DataType.FLOAT, (*dims[:-1], groups_of(columns, int_of(node, "group"))))]


def _dims_as(node: ir.Node, width: int | None) -> Dims:
    dims = dims_of(operand(node, 0))
    return dims if width is None else (*dims[:-1], width)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return written_as(write, node, write.cast(operand(node, 0), ir.DataType.FLOAT), optional(node, 1))


KERNEL = KernelBinding("quantize_rows@1", ("x", "largest"), ("q", "scale"), ("group",))

QUANTIZE_ROWS = Plugin(
    name="QuantizeRows",
    inputs=("x", "largest?"),
    outputs=("q", "scale"),
    attributes=TO_ATTRIBUTES,
    reference=_reference,
    infer=types_as,
    kernels={CPU: KERNEL, CUDA: quantize_rows_on_cuda(KERNEL)},
    by_rows=True,
)
