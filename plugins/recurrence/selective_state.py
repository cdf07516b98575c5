"""Mamba-2's state space: a state for each head, which decays, adds a value under a key, and is read with a query.
https://arxiv.org/abs/2405.21060

query, key: FLOAT [1, T, key_heads·K] or [tokens, key_heads·K], which the paper calls C and B. value, out: FLOAT
[..., heads·V]. decay: FLOAT [..., heads]. log_a, dt_bias, skip: FLOAT [heads]. state: FLOAT [slots, heads, K, V]
(recurrence.py). Heads h·heads/key_heads … share head h of queries and keys. For each token, with S the state of
a head:

    dt = max(softplus(decay + dt_bias), dt_min)
    S ← exp(-exp(log_a) · dt) S + key (dt · value)ᵀ;  out = Sᵀ query + skip · value
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

OWN_INPUTS = ("query", "key", "value", "decay", "log_a", "dt_bias", "skip")


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    query, key, value, decay, log_a, dt_bias, skip = (operand(node, index) for index in range(7))
    heads, key_heads = int_of(node, "heads"), int_of(node, "key_heads")
    rows, columns, shared = width_of(key) // key_heads, width_of(value) // heads, heads // key_heads

    def by_head(x: ir.Value) -> ir.Value:
        repeated = write.op("Tile", write.op("Reshape", x, [-1, key_heads, 1, rows]), [1, 1, shared, 1])
        return write.op("Reshape", repeated, [-1, heads, rows, 1])

    def step(inner: Writer, state: ir.Value, row: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        q, k, v, g = row  # [heads, rows, 1], [heads, rows, 1], [heads, 1, columns], [heads, 1, 1]
        new = inner.op("Add", inner.op("Mul", g, state), inner.op("Mul", k, v))
        return new, inner.op("ReduceSum", inner.op("Mul", q, new), [1], keepdims=0)

    softplus = write.op("Softplus", write.op("Add", decay, dt_bias))
    dt = write.op("Max", softplus, float_of(node, "dt_min"))
    g = write.op("Exp", write.op("Neg", write.op("Mul", write.op("Exp", log_a), dt)))
    by_column = write.op("Reshape", value, [-1, heads, columns])
    scanned = [
        by_head(query),
        by_head(key),
        write.op("Unsqueeze", write.op("Mul", by_column, write.op("Reshape", dt, [-1, heads, 1])), [2]),
        write.op("Reshape", g, [-1, heads, 1, 1]),
    ]
    states = [optional(node, index) for index in range(7, 10)]
    state, out = token_by_token(write, node, states, scanned, step)
    skipped = write.op("Add", out, write.op("Mul", by_column, write.op("Reshape", skip, [heads, 1])))
    return [state, write.op("Reshape", skipped, write.op("Shape", value))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    state, value = operand(node, len(OWN_INPUTS)), operand(node, 2)
    return [(dtype_of(state), dims_of(state)), (dtype_of(value), dims_of(value))]


def _cost(node: ir.Node) -> Cost:
    """Counts the operations on the state: it decays, adds a value, and is read with a query."""
    key_width, width = width_of(operand(node, 1)), width_of(operand(node, 2))
    return Cost(of_token=5 * key_width // int_of(node, "key_heads") * width)


KERNEL = KernelBinding("selective_state@1", (*OWN_INPUTS, *STATE_ROLES), ("", "out"), ("heads", "key_heads", "dt_min"))

SELECTIVE_STATE = Plugin(
    name="SelectiveState",
    inputs=(*OWN_INPUTS, *STATE_INPUTS),
    outputs=("state", "out"),
    attributes={"heads": int, "key_heads": int, "dt_min": float},
    reference=_reference,
    infer=_infer,
    cost=_cost,
    kernels={CPU: KERNEL, CUDA: recurrence_on_cuda(KERNEL, delta=False)},
)
