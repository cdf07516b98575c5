"""RMSNormalization of heads, with a gate: applied to the result of a recurrence, before it is projected.

x, z: FLOAT [..., C]. weight: FLOAT [run], or [C]. Each group of `run` columns is normalized by itself: with gate
"after", out = RMSNormalization(x, weight) · silu(z), and with "before", RMSNormalization(x · silu(z), weight). out is
`to`, and with `to` one of CODES a row is quantized as in quantize_rows.py.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.norm.norm_cuda import gated_norm_on_cuda
from enginewright.plugins.plugin import Plugin, dims_of, float_of, int_of, operand, optional, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding(
    "gated_rms_norm@1",
    ("x", "z", "weight", "largest"),
    ("out", "scale"),
    ("epsilon", "group", "run", "gate"),
    in_place={"out": 0},
)


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, z, weight = (operand(node, index) for index in range(3))
    outer, columns, run = [0] * (len(dims_of(x)) - 1), width_of(x), int_of(node, "run")
    gate = write.op("Mul", z, write.op("Sigmoid", z))
    gates_first = node.attributes["gate"].as_string() == "before"
    value = write.op("Mul", x, gate) if gates_first else x
    by_run = write.op("Reshape", value, [*outer, columns // run, run])
    mean = write.op("ReduceMean", write.op("Mul", by_run, by_run), [-1], keepdims=1)
    normed = write.op("Div", by_run, write.op("Sqrt", write.op("Add", mean, float_of(node, "epsilon"))))
    if width_of(weight) == run:
        normed = write.op("Mul", normed, weight)
    value = write.op("Reshape", normed, [*outer, columns])
    if width_of(weight) != run:
        value = write.op("Mul", value, weight)
    return written_as(write, node, value if gates_first else write.op("Mul", value, gate), optional(node, 3))


GATED_RMS_NORM = Plugin(
    name="GatedRmsNorm",
    inputs=("x", "z", "weight", "largest?"),
    outputs=("out", "scale?"),
    attributes={"epsilon": float, "run": int, "gate": str, **TO_ATTRIBUTES},
    reference=_reference,
    infer=types_as,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: gated_norm_on_cuda(KERNEL)},
)
