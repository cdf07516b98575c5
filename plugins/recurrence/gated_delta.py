"""The gated delta rule: an associative memory for each head, which forgets, and corrects its value for a key.
https://arxiv.org/abs/2412.06464

query, key: FLOAT [1, T, key_heads·K] or [tokens, key_heads·K]. value, out: FLOAT [..., heads·V]. decay, beta: FLOAT
[..., heads]. log_a, dt_bias: FLOAT [heads]. state: FLOAT [slots, heads, K, V] (plugins/recurrence/recurrence.py). Heads
h·heads/key_heads … share head h of queries and keys. Where each row of a state has a decay of its own (Kimi's delta
attention, https://arxiv.org/abs/2510.26692), decay is FLOAT [..., heads·K] and dt_bias FLOAT [heads·K], and g below is
a diagonal matrix. For each token, with S the state of a head:

    g = exp(-exp(log_a) · softplus(decay + dt_bias))        k = key / √(|key|² + epsilon)
    b = sigmoid(beta)                                       q = scale · query / √(|query|² + epsilon)
    S ← g S;  S ← S + k (b (value - Sᵀ k))ᵀ;  out = Sᵀ q
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plan import Cost
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import (
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_of,
    float_of,
    int_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.recurrence.recurrence import STATE_INPUTS, STATE_ROLES, token_by_token
from enginewright.plugins.recurrence.recurrence_cuda import recurrence_on_cuda
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

OWN_INPUTS = ("query", "key", "value", "decay", "beta", "log_a", "dt_bias")


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    query, key, value, decay, beta, log_a, dt_bias = (operand(node, index) for index in range(7))
    heads, key_heads = int_of(node, "heads"), int_of(node, "key_heads")
    epsilon = float_of(node, "epsilon")
    rows, columns, shared = width_of(key) // key_heads, width_of(value) // heads, heads // key_heads

    def by_head(x: ir.Value, scale: float) -> ir.Value:
        """Normalizes heads of queries or keys: [tokens, heads, rows]."""
        split = write.op("Reshape", x, [-1, key_heads, 1, rows])
        square = write.op("ReduceSum", write.op("Mul", split, split), [-1], keepdims=1)
        normed = write.op("Div", split, write.op("Sqrt", write.op("Add", square, epsilon)))
        repeated = write.op("Tile", write.op("Mul", normed, scale), [1, 1, shared, 1])
        return write.op("Reshape", repeated, [-1, heads, rows])

    def step(inner: Writer, state: ir.Value, row: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        # [heads, rows, 1] both, [heads, 1, columns], [heads, 1 or rows, 1], [heads, 1, 1]
        q, k, v, g, b = row
        kept = inner.op("Mul", g, state)
        held = inner.op("ReduceSum", inner.op("Mul", k, kept), [1], keepdims=1)  # [heads, 1, columns]
        delta = inner.op("Mul", b, inner.op("Sub", v, held))
        new = inner.op("Add", kept, inner.op("Mul", k, delta))
        return new, inner.op("ReduceSum", inner.op("Mul", q, new), [1], keepdims=0)

    q, k = by_head(query, float_of(node, "scale")), by_head(key, 1.0)
    softplus = write.op("Softplus", write.op("Add", decay, dt_bias))
    by_row = width_of(decay) // heads  # 1, or rows
    rate = write.op("Reshape", write.op("Exp", log_a), [heads, 1])
    each = write.op("Mul", rate, write.op("Reshape", softplus, [-1, heads, by_row]))
    g = write.op("Exp", write.op("Neg", each))
    scanned = [
        write.op("Reshape", q, [-1, heads, rows, 1]),
        write.op("Reshape", k, [-1, heads, rows, 1]),
        write.op("Reshape", value, [-1, heads, 1, columns]),
        write.op("Reshape", g, [-1, heads, by_row, 1]),
        write.op("Reshape", write.op("Sigmoid", beta), [-1, heads, 1, 1]),
    ]
    states = [optional(node, index) for index in range(7, 10)]
    state, out = token_by_token(write, node, states, scanned, step)
    return [state, write.op("Reshape", out, write.op("Shape", value))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    state, value = operand(node, len(OWN_INPUTS)), operand(node, 2)
    return [(dtype_of(state), dims_of(state)), (dtype_of(value), dims_of(value))]


def _cost(node: ir.Node) -> Cost:
    """Counts the operations on the state: it is read with a key, decays, is corrected, and is read with a query."""
    key_width, width = width_of(operand(node, 1)), width_of(operand(node, 2))
    return Cost(of_token=7 * key_width // int_of(node, "key_heads") * width)


KERNEL = KernelBinding(
    "gated_delta@1", (*OWN_INPUTS, *STATE_ROLES), ("", "out"), ("heads", "key_heads", "scale", "epsilon")
)

GATED_DELTA = Plugin(
    name="GatedDelta",
    inputs=(*OWN_INPUTS, *STATE_INPUTS),
    outputs=("state", "out"),
    attributes={"heads": int, "key_heads": int, "scale": float, "epsilon": float},
    reference=_reference,
    infer=_infer,
    cost=_cost,
    kernels={CPU: KERNEL, CUDA: recurrence_on_cuda(KERNEL, delta=True)},
)
