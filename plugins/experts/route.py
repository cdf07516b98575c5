"""Routes tokens to experts: chooses experts, computes their shares, and numbers the rows when sorted by expert.

x: FLOAT [..., K]. weight: FLOAT or BFLOAT16 [E, K]. bias: FLOAT [E], of the products. correction: FLOAT [E].
Scores are softmax(x weightᵀ + bias) or its sigmoid, in fp32 ("softmax", "sigmoid"); x is not rounded. The `top` experts
with the largest score + correction are chosen, of two equal ones the lower one. With `groups` > 1 they are chosen from
those `chosen_groups` groups of E / groups adjacent experts whose `group_best` largest have the largest sum
(https://arxiv.org/abs/2412.19437, 2.1.2). share: FLOAT [..., top], the scores (without correction) of the chosen
experts in the order of choice, divided by their sum if `normalized` is 1, times `scale`.

Rows are copies of the tokens, `top` of each, R in all, sorted by expert and for each expert in the tokens' order.
places: INT32 [..., top], row of a token for each of its experts. starts: INT32 [1, E + 1], first row of each expert;
    the
last is R.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.experts.experts_cuda import route_on_cuda
from enginewright.plugins.kernel import KernelBinding, ceil_div
from enginewright.plugins.plugin import (
    Dims,
    Plugin,
    TypeAndDims,
    dims_of,
    float_of,
    int_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

MIN_SUM = 1e-20  # lower limit of the sum that shares are divided by


def experts_of(starts: ir.Value) -> int:
    """Returns the number of experts, from the starts of their rows."""
    return width_of(starts) - 1


def rows_of(places: ir.Value) -> int | ir.SymbolicDim:
    """Returns R: `top` rows for each token."""
    *outer, top = dims_of(places)
    (tokens,) = (size for size in outer if size != 1) if len(outer) > 1 else outer
    return tokens * top if isinstance(tokens, int) else copies(tokens, top)


def copies(tokens: ir.SymbolicDim, top: int | ir.SymbolicDim) -> ir.SymbolicDim:
    """Makes the dimension that has `top` rows for each of `tokens`.

    Args:
        tokens: dimension of tokens.
        top: experts of a token.
    """
    return ir.SymbolicDim(f"{top} * {tokens}")


def renamed(size: int | ir.SymbolicDim, old: str, new: ir.SymbolicDim) -> int | ir.SymbolicDim:
    """Renames a dimension of rows, or of copies of rows.

    Args:
        size: the dimension.
        old: name that it follows.
        new: dimension that it follows afterwards.
    """
    times, _, tokens = str(size).rpartition(" * ")
    if isinstance(size, int) or tokens != old:
        return size
    return copies(new, int(times)) if times else new


def in_order(write: Writer, places: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Computes the order of sorted rows.

    Args:
        write: writer of the graph.
        places: rows of each token, [..., top].

    Returns:
        The places of all rows, [R], and for each place the copy that has it: INT64 [R].
    """
    flat = write.op("Reshape", write.cast(places, ir.DataType.INT64), [-1])
    count = write.op("Reshape", write.op("Size", flat), [1])
    _, copy = write.ops("TopK", flat, count, outputs=2, axis=-1, largest=0)
    return flat, copy


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = operand(node, 0), write.cast(operand(node, 1), ir.DataType.FLOAT)
    logits = write.op("MatMul", x, write.op("Transpose", weight, perm=[1, 0]))
    if (bias := optional(node, 2)) is not None:
        logits = write.op("Add", logits, bias)
    softmax = node.attributes["scores"].as_string() == "softmax"
    scores = write.op("Softmax", logits, axis=-1) if softmax else write.op("Sigmoid", logits)
    choice = scores if (correction := optional(node, 3)) is None else write.op("Add", scores, correction)
    experts, top = dims_of(operand(node, 1))[0], int_of(node, "top")
    assert isinstance(experts, int)
    if int_of(node, "groups") > 1:
        choice = _within_groups(write, node, choice, experts)
    _, chosen = write.ops("TopK", choice, [top], outputs=2, axis=-1)
    share = write.op("GatherElements", scores, chosen, axis=-1)
    if int_of(node, "normalized"):
        total = write.op("Max", write.op("ReduceSum", share, [-1], keepdims=1), MIN_SUM)
        share = write.op("Div", share, total)
    flat = write.op("Reshape", chosen, [-1])  # [R]
    count = write.op("Size", flat)
    keys = write.op("Add", write.op("Mul", flat, count), write.op("Range", 0, count, 1))
    rows = write.op("Reshape", count, [1])
    _, copy = write.ops("TopK", keys, rows, outputs=2, axis=-1, largest=0)
    _, place = write.ops("TopK", copy, rows, outputs=2, axis=-1, largest=0)
    before = write.op("Less", write.op("Unsqueeze", flat, [0]), np.arange(experts + 1)[:, None])  # [E + 1, R]
    starts = write.op("ReduceSum", write.cast(before, ir.DataType.INT64), [1], keepdims=0)
    return [
        write.cast(write.op("Reshape", place, write.op("Shape", chosen)), ir.DataType.INT32),
        write.op("Mul", share, float_of(node, "scale")),
        write.cast(write.op("Unsqueeze", starts, [0]), ir.DataType.INT32),
    ]


def _within_groups(write: Writer, node: ir.Node, choice: ir.Value, experts: int) -> ir.Value:
    """Replaces the scores of experts in groups that are not chosen by -infinity."""
    groups, chosen, best = (int_of(node, name) for name in ("groups", "chosen_groups", "group_best"))
    outer = [0] * (len(dims_of(operand(node, 0))) - 1)
    by_group = write.op("Reshape", choice, [*outer, groups, experts // groups])
    largest, _ = write.ops("TopK", by_group, [best], outputs=2, axis=-1)
    _, of_token = write.ops("TopK", write.op("ReduceSum", largest, [-1], keepdims=0), [chosen], outputs=2, axis=-1)
    hits = write.op("Equal", write.op("Unsqueeze", of_token, [-1]), np.arange(groups))  # [..., chosen, groups]
    is_chosen = write.op("ReduceMax", write.cast(hits, ir.DataType.INT32), [-2], keepdims=0)
    inside = write.op("Unsqueeze", write.cast(is_chosen, ir.DataType.BOOL), [-1])
    return write.op("Reshape", write.op("Where", inside, by_group, -np.inf), [*outer, experts])


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    experts = dims_of(operand(node, 1))[0]
    assert isinstance(experts, int)
    dims: Dims = (*dims_of(operand(node, 0))[:-1], int_of(node, "top"))
    return [
        (ir.DataType.INT32, dims),
        (ir.DataType.FLOAT, dims),
        (ir.DataType.INT32, (1, experts + 1)),
    ]


def _cost(node: ir.Node) -> Cost:
    experts = dims_of(operand(node, 1))[0]
    assert isinstance(experts, int)
    return Cost(of_token=2 * experts * width_of(operand(node, 0)))


ATTRIBUTES = {
    "top": int,
    "scores": str,
    "groups": int,
    "chosen_groups": int,
    "group_best": int,
    "normalized": int,
    "scale": float,
}

KERNEL = KernelBinding(
    "route@1",
    ("x", "weight", "bias", "correction"),
    ("places", "share", "starts"),
    tuple(ATTRIBUTES),
    scratch=lambda call: ("scores", call.operands["x"].rows, ceil_div(call.operands["weight"].rows.constant, 16) * 16),
    layouts={"weight": "r16_columns"},  # x is not rounded, so that K is not in pairs
)

ROUTE = Plugin(
    name="Route",
    inputs=("x", "weight", "bias?", "correction?"),
    outputs=("places", "share", "starts"),
    attributes=ATTRIBUTES,
    reference=_reference,
    infer=_infer,
    cost=_cost,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: route_on_cuda(KERNEL)},
)
