"""Shared parts of the GEMMs: y = x weightᵀ (· scales) (+ bias), then an epilogue.

x: BFLOAT16, INT8 or FLOAT8E4M3FN [..., K]. weight: [N, K]. bias: FLOAT [N]. The sum is FLOAT; out has dtype `to`. Codes
have x_scale: FLOAT [..., G], as QuantizeRows writes them for `group`; products of a quantization group are summed first
(those of integers exactly), and the groups' sums, scaled, in FLOAT.
epilogue: "none" gives [..., N]; "swiglu" and "geglu" take the weight's rows as N/2 gates, then N/2 ups, and give
act(gate) · up, [..., N/2] (https://arxiv.org/abs/2002.05202; the Gelu is the tanh approximation). "swiglu_clamped"
gives (up + 1) · gate · sigmoid(1.702 gate), gate being 7 at most and up in ±7 (https://arxiv.org/abs/2508.10925, 2.2).

starts: INT32 [1, E + 1]. With it the product is that of E experts: rows [starts[e], starts[e + 1]) of x, [R, K], are
multiplied with matrix e of the E matrices in weight, [E · N, K], and with its scales, zero points and biases
(plugins/experts/route.py).
"""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.gemm.quantize_rows import dequantized
from enginewright.plugins.plugin import (
    TypeAndDims,
    WeightRows,
    dims_of,
    dtype_attribute,
    int_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.writer import Writer

GATED = ("swiglu", "geglu", "swiglu_clamped")
CLAMPED_SLOPE, CLAMPED_LIMIT = 1.702, 7.0  # constants of "swiglu_clamped"
ATTRIBUTES = {"epilogue": str, "to": int}
GROUP_ATTRIBUTES = {**ATTRIBUTES, "group": int}
GROUP_LAYOUTS = {"scale": "r16_columns", "zero": "r16_columns"}  # of matrices with a column for each group of K


def reference(
    write: Writer, node: ir.Node, x: ir.Value, weight: ir.Value, scale: ir.Value | None, bias_index: int
) -> Sequence[ir.Value]:
    """Computes a product in standard ops.

    Args:
        write: writer of the graph.
        node: the GEMM.
        x: FLOAT, as it is multiplied.
        weight: FLOAT, as it is multiplied.
        scale: FLOAT [N], factor on the sum; None is 1.
        bias_index: index of the input with the bias.
    """
    y = write.op("MatMul", x, write.op("Transpose", weight, perm=[1, 0]))
    if scale is not None:
        y = write.op("Mul", y, scale)
    bias = optional(node, bias_index)
    if bias is not None:
        y = write.op("Add", y, bias)
    epilogue = node.attributes["epilogue"].as_string()
    if epilogue in GATED:
        gate, up = write.ops("Split", y, outputs=2, axis=-1, num_outputs=2)
        if epilogue == "swiglu":
            active = write.op("Mul", gate, write.op("Sigmoid", gate))
        elif epilogue == "swiglu_clamped":
            gate = write.op("Min", gate, CLAMPED_LIMIT)
            active = write.op("Mul", gate, write.op("Sigmoid", write.op("Mul", gate, CLAMPED_SLOPE)))
            up = write.op("Add", write.op("Clip", up, -CLAMPED_LIMIT, CLAMPED_LIMIT), 1.0)
        else:
            active = write.op("Gelu", gate, approximate="tanh")
        y = write.op("Mul", active, up)
    return [write.round_to(y, dtype_attribute(node))]


def starts_of(node: ir.Node) -> ir.Value | None:
    """Returns the starts of experts' rows, the last input; None if there is one matrix for all rows."""
    last = node.inputs[-1]
    return last if last is not None and last.dtype == ir.DataType.INT32 else None


def matrix_rows(node: ir.Node) -> int:
    """Returns N: rows of the weight, or of an expert's part of it."""
    rows, starts = dims_of(operand(node, 1))[0], starts_of(node)
    assert isinstance(rows, int)
    return rows if starts is None else rows // (width_of(starts) - 1)


def weight_rows(node: ir.Node) -> WeightRows:
    """Returns the order of rows in the weight, and in its scales and zero points."""
    starts = starts_of(node)
    gated = node.attributes["epilogue"].as_string() in GATED
    return WeightRows(None if starts is None else width_of(starts) - 1, gated)


def outputs_of(node: ir.Node) -> int:
    """Returns the columns of the result."""
    rows = matrix_rows(node)
    return rows // 2 if node.attributes["epilogue"].as_string() in GATED else rows


def infer(node: ir.Node) -> Sequence[TypeAndDims]:
    """Infers the output of a GEMM."""
    return [(dtype_attribute(node), (*dims_of(operand(node, 0))[:-1], outputs_of(node)))]


def cost(node: ir.Node) -> Cost:
    """Counts the operations of a GEMM for a token."""
    return Cost(of_token=2 * matrix_rows(node) * width_of(operand(node, 0)))


Reference = Callable[[Writer, ir.Node], Sequence[ir.Value]]


def grouped(reference: Reference) -> Reference:
    """Extends a product's reference to nodes with starts: one expert after another, over its own rows."""

    def either(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
        starts = starts_of(node)
        return reference(write, node) if starts is None else [_by_expert(write, node, starts, reference)]

    return either


def _by_expert(write: Writer, node: ir.Node, starts: ir.Value, reference: Reference) -> ir.Value:
    """Writes a loop over experts, whose results follow each other as their rows do."""
    experts, (output,) = width_of(starts) - 1, node.outputs
    assert output.dtype is not None
    of_experts = [_divided(write, value, experts) for value in node.inputs[:-1]]
    body = Writer()
    index, going, before = (ir.Value(name=f"{output.name}.{name}") for name in ("expert", "going", "before"))
    index.type, going.type = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)
    index.shape = going.shape = ir.Shape([])
    before.type = ir.TensorType(output.dtype)
    before.shape = ir.Shape([None, width_of(output)])
    bounds = write.op("Reshape", starts, [-1])  # [E + 1]
    begin = body.op("Gather", bounds, body.op("Unsqueeze", index, [0]), axis=0)
    end = body.op("Gather", bounds, body.op("Unsqueeze", body.op("Add", index, 1), [0]), axis=0)
    own: list[ir.Value | None] = []
    for value, divided in zip(node.inputs[:-1], of_experts, strict=True):
        if value is None or divided is None:
            own.append(None)
            continue
        if not isinstance(dims_of(value)[0], int):  # rows of x, or their scales
            part = body.op("Slice", divided, begin, end, np.zeros(1, np.int32))
            part.shape = ir.Shape([None, *dims_of(value)[1:]])
        else:
            part = body.op("Gather", divided, index, axis=0)
            part.shape = ir.Shape(dims_of(divided)[1:])
        part.type = divided.type
        own.append(part)
    attributes = [ir.convenience.convert_attribute(name, one.value) for name, one in node.attributes.items()]
    (result,) = reference(body, ir.Node(node.domain, node.op_type, own, attributes, num_outputs=1))
    joined = body.op("Concat", before, result, axis=0)
    joined.type, joined.shape = before.type, before.shape
    still = body.op("Identity", going)
    still.type, still.shape = going.type, going.shape
    inner = (value for one in body.nodes for value in one.outputs)
    for number, value in enumerate(inner):  # names within a graph and around it differ
        value.name = f"{output.name}.expert.{number}"
    graph = ir.Graph([index, going, before], [still, joined], nodes=body.nodes, name=f"{output.name}.one_expert")
    nothing = write.constant(np.zeros((0, width_of(output)), np.float32))
    (rows,) = write.append(
        "Loop",
        [write.constant(experts), None, write.round_to(nothing, output.dtype)],
        [ir.AttrGraph("body", graph)],
    )
    return write.op("Reshape", rows, [-1, width_of(output)])  # a loop's results have no rank


def _divided(write: Writer, value: ir.Value | None, experts: int) -> ir.Value | None:
    """Reshapes a weight, its scales or biases from [E · N, …] to [E, N, …]; leaves values with rows of tokens."""
    if value is None:
        return None
    rows, shape = dims_of(value)[0], value.shape
    if value.dtype == ir.DataType.FLOAT8E4M3FN:  # onnxruntime neither gathers nor slices these
        value = write.cast(value, ir.DataType.FLOAT)
        value.dtype, value.shape = ir.DataType.FLOAT, shape
    if not isinstance(rows, int):
        return value
    dims = (experts, rows // experts, *dims_of(value)[1:])
    apart = write.op("Reshape", value, np.array(dims, np.int64))
    apart.type, apart.shape = value.type, ir.Shape(dims)
    return apart


def floats_reference(
    write: Writer, node: ir.Node, bias_index: int, scale: ir.Value | None = None
) -> Sequence[ir.Value]:
    """Computes a product of inputs x and weight that FLOAT holds exactly.

    Args:
        write: writer of the graph.
        node: the GEMM.
        bias_index: index of the input with the bias.
        scale: FLOAT [N], factor on the sum; None is 1.
    """
    x, weight = (write.cast(operand(node, index), ir.DataType.FLOAT) for index in (0, 1))
    return reference(write, node, x, weight, scale, bias_index)


def integers_reference(
    write: Writer, node: ir.Node, weight: ir.Value, scale: ir.Value | None, bias_index: int
) -> Sequence[ir.Value]:
    """Computes a product of INT8 activations, with inputs x, weight and x_scale.

    Args:
        write: writer of the graph.
        node: the GEMM.
        weight: FLOAT, as it is multiplied.
        scale: FLOAT [N], factor on the sum; None is 1.
        bias_index: index of the input with the bias.
    """
    x = dequantized(write, operand(node, 0), operand(node, 2), int_of(node, "group"))
    return reference(write, node, x, weight, scale, bias_index)
