"""What the GEMMs share: y = x weightᵀ (· scales) (+ bias), then an epilogue.

x: BFLOAT16, INT8 or FLOAT8E4M3FN [..., K]. weight: [N, K]. bias: FLOAT [N]. The sum is FLOAT; out has dtype `to`. Codes
have x_scale: FLOAT [..., G], as QuantizeRows gives them for `group`; products of a run of `group` are summed first
(those of integers exactly), and the runs' sums, scaled, in FLOAT.
epilogue: "none" gives [..., N]; "swiglu" and "geglu" take the weight's rows as N/2 gates, then N/2 ups, and give
act(gate) · up, [..., N/2] (https://arxiv.org/abs/2002.05202; the Gelu is the tanh approximation).
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.plugin import TypeAndDims, dims_of, dtype_attribute, int_of, operand, optional, width_of
from enginewright.plugins.quantize_rows import dequantized
from enginewright.plugins.writer import Writer

GATED = ("swiglu", "geglu")
ATTRIBUTES = {"epilogue": str, "to": int}
GROUP_ATTRIBUTES = {**ATTRIBUTES, "group": int}


def reference(
    write: Writer, node: ir.Node, x: ir.Value, weight: ir.Value, scale: ir.Value | None, bias_index: int
) -> Sequence[ir.Value]:
    """x and weight: FLOAT, as they are multiplied. scale: FLOAT [N], what the sum is multiplied by."""
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
        else:
            active = write.op("Gelu", gate, approximate="tanh")
        y = write.op("Mul", active, up)
    return [write.round_to(y, dtype_attribute(node))]


def infer(node: ir.Node) -> Sequence[TypeAndDims]:
    rows = dims_of(operand(node, 1))[0]
    assert isinstance(rows, int)
    width = rows // 2 if node.attributes["epilogue"].as_string() in GATED else rows
    return [(dtype_attribute(node), (*dims_of(operand(node, 0))[:-1], width))]


def cost(node: ir.Node) -> Cost:
    rows = dims_of(operand(node, 1))[0]
    assert isinstance(rows, int)
    return Cost(of_token=2 * rows * width_of(operand(node, 0)))


def floats_reference(
    write: Writer, node: ir.Node, bias_index: int, scale: ir.Value | None = None
) -> Sequence[ir.Value]:
    """Of inputs x, weight that FLOAT holds exactly."""
    x, weight = (write.cast(operand(node, index), ir.DataType.FLOAT) for index in (0, 1))
    return reference(write, node, x, weight, scale, bias_index)


def integers_reference(
    write: Writer, node: ir.Node, weight: ir.Value, scale: ir.Value | None, bias_index: int
) -> Sequence[ir.Value]:
    """Of inputs x: INT8, weight, x_scale. weight: FLOAT, as it is multiplied."""
    x = dequantized(write, operand(node, 0), operand(node, 2), int_of(node, "group"))
    return reference(write, node, x, weight, scale, bias_index)
