"""Columns of x in another order, or some of them: out[..., j] = x[..., columns[j]], then rounded to `to`.

Where columns[j] is -1 it is LACKING. x: FLOAT [..., K]. columns: INT32 [N], an initializer, each in [-1, K). out: `to`
[..., N]. With `to` one of CODES a row is quantized as in quantize_rows.py, by `group` and `largest`, and there is also
scale: FLOAT [..., G].
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from enginewright.plugins.gemm.quantize_rows import TO_ATTRIBUTES, types_as, written_as
from enginewright.plugins.gemm.rows_cuda import gather_columns_on_cuda
from enginewright.plugins.kernel import KernelBinding
from enginewright.plugins.plugin import Plugin, TypeAndDims, operand, optional, width_of
from enginewright.plugins.writer import Writer
from enginewright.targets import CPU, CUDA

LACKING = -1e30  # logit of a token for which a head has none


def _reference(write: Writer, node: ir.Node) -> Sequence[ir.Value]:
    x, columns = operand(node, 0), operand(node, 1)
    lacking = write.op("Less", columns, np.array(0, np.int32))
    gathered = write.op("Gather", x, columns, axis=-1)  # -1 reads the last column, and is replaced below
    gathered = write.op("Where", lacking, LACKING, gathered)
    return written_as(write, node, gathered, optional(node, 2), width_of(columns))


def _infer(node: ir.Node) -> Sequence[TypeAndDims]:
    return types_as(node, width_of(operand(node, 1)))


KERNEL = KernelBinding("gather_columns@1", ("x", "columns", "largest"), ("out", "scale"), ("group",))

GATHER_COLUMNS = Plugin(
    name="GatherColumns",
    inputs=("x", "columns", "largest?"),
    outputs=("out", "scale?"),
    attributes=TO_ATTRIBUTES,
    reference=_reference,
    infer=_infer,
    by_rows=True,
    kernels={CPU: KERNEL, CUDA: gather_columns_on_cuda(KERNEL)},
)
