"""Columns of x in another order, out[..., j] = x[..., columns[j]], rounded to `to` on the way out.

x: FLOAT [..., K]. columns: INT32 [K], an initializer. out: `to` [..., K]. With `to` one of CODES a row is quantized as
quantize_rows.py has it, by `group` and `largest`, and scale: FLOAT [..., G] is there, too.
"""

from collections.abc import Sequence

import onnx_ir as ir

from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, operand, optional
from enginewright.plugins.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.rows_cuda import gather_columns_on_cuda
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    return written_as(write, node, write.op("Gather", operand(node, 0), operand(node, 1), axis=-1), optional(node, 2))


KERNEL = KernelBinding("gather_columns@1", ("x", "columns", "largest"), ("out", "scale"), ("group",))

GATHER_COLUMNS = Plugin(
    name="GatherColumns",
    inputs=("x", "columns", "largest?"),
    outputs=("out", "scale?"),
    attributes=TO_ATTRIBUTES,
    reference=_reference,
    infer=types_as,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: gather_columns_on_cuda(KERNEL)},
)
