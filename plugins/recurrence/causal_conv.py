"""Depthwise causal convolution over the tokens of a sequence, with the last inputs as its state.

x: FLOAT [1, T, C] or [tokens, C], as `before` and `behind`. taps: FLOAT [C, W]. bias: FLOAT [C]. With u = before · x,
each channel of out is behind · f(bias + Σ taps[j] · u at j - (W - 1) tokens from it), where f is silu or, with
activation "none", the identity. state: FLOAT [slots, W - 1, C], u of the earlier tokens, the oldest first
(recurrence.py). out: `to`, as x. LFM2 has both gates (https://arxiv.org/abs/2511.23404); Mamba and the gated delta net
have none.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import (
    Plugin,
    TypeAndDims,
    dims_of,
    dtype_attribute,
    dtype_of,
    operand,
    optional,
    width_of,
)
from enginewright.plugins.recurrence.recurrence import STATE_INPUTS, STATE_ROLES, token_by_token
from enginewright.plugins.recurrence.recurrence_cuda import conv_on_cuda
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

OWN_INPUTS = ("x", "taps", "bias", "before", "behind")


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, taps = operand(node, 0), operand(node, 1)
    bias, before, after, *states = (optional(node, index) for index in range(2, 8))
    channels = width_of(x)
    u = x if before is None else write.op("Mul", before, x)
    weights = write.op("Transpose", taps, perm=[1, 0])  # [W, C]

    def step(inner: Writer, state: ir.Value, rows: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
        seen = inner.op("Concat", state, inner.op("Unsqueeze", rows[0], [0]), axis=0)  # [W, C]
        summed = inner.op("ReduceSum", inner.op("Mul", seen, weights), [0], keepdims=0)
        return inner.op("Slice", seen, [1], [1 << 30], [0]), summed

    state, rows = token_by_token(write, node, states, [write.op("Reshape", u, [-1, channels])], step)
    y = write.op("Reshape", rows, write.op("Shape", x))
    if bias is not None:
        y = write.op("Add", y, bias)
    if node.attributes["activation"].as_string() == "silu":
        y = write.op("Mul", y, write.op("Sigmoid", y))
    if after is not None:
        y = write.op("Mul", after, y)
    return [state, write.round_to(y, dtype_attribute(node))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    state = operand(node, len(OWN_INPUTS))
    return [(dtype_of(state), dims_of(state)), (dtype_attribute(node), dims_of(operand(node, 0)))]


KERNEL = KernelBinding(
    "causal_conv@1",
    (*OWN_INPUTS, *STATE_ROLES),
    ("", "out"),
    ("activation",),
    layouts={"taps": "r16_columns"},
)

CAUSAL_CONV = Plugin(
    name="CausalConv",
    inputs=("x", "taps", "bias?", "before?", "behind?", *STATE_INPUTS),
    outputs=("state", "out"),
    attributes={"activation": str, "to": int},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: conv_on_cuda(KERNEL)},
)
