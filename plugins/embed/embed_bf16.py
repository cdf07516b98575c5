"""Looks up rows of a bfloat16 embedding table, times `scale`.

tokens: INT64 or INT32 [...]. table: BFLOAT16 [V, H]. out: FLOAT [..., H].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.embed.embed_cuda import embed_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("embed_bf16@1", ("tokens", "table"), ("out",), ("scale",))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    rows = write.op("Gather", operand(node, 1), operand(node, 0), axis=0)
    return [write.op("Mul", write.cast(rows, ir.DataType.FLOAT), float_of(node, "scale"))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (*dims_of(operand(node, 0)), width_of(operand(node, 1))))]


EMBED_BF16 = Plugin(
    name="EmbedBf16",
    inputs=("tokens", "table"),
    outputs=("out",),
    attributes={"scale": float},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: embed_on_cuda(KERNEL)},
)
