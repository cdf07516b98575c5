"""Looks up rows of an int8 embedding table with a scale for each row, times `scale`.

tokens: INT64 or INT32 [...]. table: INT8 [V, H]. table_scale: FLOAT [V]. out: FLOAT [..., H].
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.embed.embed_cuda import embed_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, dims_of, float_of, operand, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

KERNEL = KernelBinding("embed_w8@1", ("tokens", "table", "table_scale"), ("out",), ("scale",))


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    tokens, table, table_scale = (operand(node, index) for index in range(3))
    codes = write.cast(write.op("Gather", table, tokens, axis=0), ir.DataType.FLOAT)
    scales = write.op("Unsqueeze", write.op("Gather", table_scale, tokens, axis=0), [-1])
    return [write.op("Mul", write.op("Mul", codes, scales), float_of(node, "scale"))]


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return [(ir.DataType.FLOAT, (*dims_of(operand(node, 0)), width_of(operand(node, 1))))]


EMBED_W8 = Plugin(
    name="EmbedW8",
    inputs=("tokens", "table", "table_scale"),
    outputs=("out",),
    attributes={"scale": float},
    reference=_reference,
    infer=_infer,
    kernels={CPU: KERNEL, CUDA: embed_on_cuda(KERNEL)},
)
