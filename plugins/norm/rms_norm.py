"""RMSNormalization over the last dimension, rounded to `to`. https://arxiv.org/abs/1910.07467

x: FLOAT [..., W]. weight: FLOAT [W]. out: `to` [..., W]. With `to` one of CODES a row is quantized as in
    quantize_rows.py,
by `group` and `largest`, and there is also scale: FLOAT [..., G].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.norm.norm_cuda import norm_on_cuda
from enginewright.plugins.plugin import Plugin, float_of, operand, optional
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding(
    "rms_norm@1", ("x", "weight", "largest"), ("out", "scale"), ("epsilon", "group"), in_place={"out": 0}
)


def norms_rows(node: ir.Node) -> bool:
    """Checks if an RMSNormalization is over the last dimension only, whatever the number of dimensions."""
    return node.attributes.get_int("axis", -1) == -1


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight = operand(node, 0), operand(node, 1)
    normed = write.op("RMSNormalization", x, weight, axis=-1, epsilon=float_of(node, "epsilon"))
    return written_as(write, node, normed, optional(node, 2))


RMS_NORM = Plugin(
    name="RmsNorm",
    inputs=("x", "weight", "largest?"),
    outputs=("out", "scale?"),
    attributes={"epsilon": float, **TO_ATTRIBUTES},
    reference=_reference,
    infer=types_as,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: norm_on_cuda(KERNEL, "out")},
)
