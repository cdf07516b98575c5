"""LayerNormalization over the last dimension, rounded to `to`. https://arxiv.org/abs/1607.06450

x: FLOAT [..., W]. weight, bias: FLOAT [W]. out: `to` [..., W]. With `to` one of CODES a row is quantized as in
quantize_rows.py, by `group` and `largest`, and there is also scale: FLOAT [..., G].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.norm.norm_cuda import layer_norm_on_cuda
from enginewright.plugins.plugin import Plugin, float_of, operand, optional
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("layer_norm@1", ("x", "weight", "bias", "largest"), ("out", "scale"), ("epsilon", "group"))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, weight, bias = operand(node, 0), operand(node, 1), optional(node, 2)
    vectors = [weight] if bias is None else [weight, bias]  # onnxruntime's fusions crash if an absent bias is passed
    normed = write.op("LayerNormalization", x, *vectors, axis=-1, epsilon=float_of(node, "epsilon"))
    return written_as(write, node, normed, optional(node, 3))


LAYER_NORM = Plugin(
    name="LayerNorm",
    inputs=("x", "weight", "bias?", "largest?"),
    outputs=("out", "scale?"),
    attributes={"epsilon": float, **TO_ATTRIBUTES},
    reference=_reference,
    infer=types_as,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: layer_norm_on_cuda(KERNEL)},
)
