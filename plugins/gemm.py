"""What the GEMMs share: y = x weightᵀ (· scales) (+ bias), then an epilogue.

x: BFLOAT16 or INT8 [..., K]. weight: [N, K]. bias: FLOAT [N]. The sum is FLOAT; out has dtype `to`.
epilogue: "none" gives [..., N]; "swiglu" and "geglu" take the weight's rows as N/2 gates, then N/2 ups, and give
act(gate) · up, [..., N/2] (https://arxiv.org/abs/2002.05202; the Gelu is the tanh approximation).
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.plugin import TypeAndDims, dims_of, dtype_attribute, operand, optional
from enginewright.plugins.writer import Writer

GATED = ("swiglu", "geglu")
ATTRIBUTES = {"epilogue": str, "to": int}


def reference(write: Writer, node: ir.Node, scales: Sequence[ir.Value], bias_index: int) -> Sequence[ir.Value]:
    """scales: what the sum is multiplied by, one after the other. Products of INT8 are summed in INT32."""
    sums = ir.DataType.INT32 if operand(node, 0).dtype == ir.DataType.INT8 else ir.DataType.FLOAT
    x, weight = (write.cast(operand(node, index), sums) for index in (0, 1))
    y = write.op("MatMul", x, write.op("Transpose", weight, perm=[1, 0]))
    if sums == ir.DataType.INT32:
        y = write.cast(y, ir.DataType.FLOAT)
    for scale in scales:
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
