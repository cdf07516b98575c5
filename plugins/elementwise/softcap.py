"""Keeps x within ±cap: cap · tanh(x / cap).

x, out: FLOAT, any shape.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.elementwise.elementwise_cuda import by_element
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, dtype_of, float_of, operand
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("softcap@1", ("x",), ("out",), ("cap",))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    cap = float_of(node, "cap")
    return [write.op("Mul", write.op("Tanh", write.op("Div", operand(node, 0), cap)), cap)]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(dtype_of(operand(node, 0)), dims_of(operand(node, 0)))]


SOFTCAP = Plugin(
    name="Softcap",
    inputs=("x",),
    outputs=("out",),
    attributes={"cap": float},
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: by_element(KERNEL, "softcap")},
)
