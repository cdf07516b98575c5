"""Combines the results of a token's experts: out[...] = Σ share[..., j] · y[places[..., j]] over j, ascending.

Then shared[...] is added, if there is one, and with a gate multiplied by sigmoid(gate[...]). The order is the token's
own, so that a sum has the same bits whatever else is computed. y: FLOAT [R, H]. places: INT32
[..., top] and share: FLOAT [..., top], as in route.py. shared: FLOAT [..., H]. gate: FLOAT [..., 1]. out: FLOAT
[..., H].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.experts.experts_cuda import combine_experts_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, operand, optional, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    y, places, share = (operand(node, index) for index in range(3))
    rows = write.op("Gather", y, places, axis=0)  # [..., top, H]
    weighted = write.op("Mul", rows, write.op("Unsqueeze", share, [-1]))
    mixed = write.op("ReduceSum", weighted, [-2], keepdims=0)
    shared, gate = optional(node, 3), optional(node, 4)
    if shared is not None:
        own = shared if gate is None else write.op("Mul", shared, write.op("Sigmoid", gate))
        mixed = write.op("Add", mixed, own)
    return [mixed]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (*dims_of(operand(node, 1))[:-1], width_of(operand(node, 0))))]


KERNEL = KernelBinding("combine_experts@1", ("y", "places", "share", "shared", "gate"), ("out",))

COMBINE_EXPERTS = Plugin(
    name="CombineExperts",
    inputs=("y", "places", "share", "shared?", "gate?"),
    outputs=("out",),
    attributes={},
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: combine_experts_on_cuda(KERNEL)},
)
