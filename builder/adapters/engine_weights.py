"""Weights of a finished engine in FLOAT, as its kernels multiply them: docs/engine-file.md, Quantized weights."""

from collections.abc import Callable

import torch

from enginewright.builder.lower import PackedForm, unpack_rows
from enginewright.passes.weights import RowReader
from enginewright.plan import KernelCall, WeightOperand
from enginewright.plugins.gemm.gemm_mxfp4a8 import DOUBLED
from enginewright.plugins.gemm.gemm_w4a8 import MIDDLE
from enginewright.runtime.engine import Engine

# dtype → the numbers of its codes, which scales multiply
NUMBERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e2m1": lambda codes: torch.tensor(DOUBLED, dtype=torch.float32)[codes.int()],
    "u4": lambda codes: codes.float() - MIDDLE,
}


def open_weight(engine: Engine, call: KernelCall) -> RowReader:
    """Opens the weight of a linear layer for reading by rows, in FLOAT.

    Args:
        engine: the engine, open.
        call: call of the plan with the layer's product.
    """
    codes, dtype = _part(engine, call, "weight")
    if "scale" not in call.operands:
        return lambda begin, end: codes(begin, end).float()
    scale, _ = _part(engine, call, "scale")
    zero = _part(engine, call, "zero")[0] if "zero" in call.operands else None
    group = int(call.attributes.get("group", 0))

    def rows(begin: int, end: int) -> torch.Tensor:
        found = codes(begin, end)
        columns = found.shape[1]

        def wide(values: torch.Tensor) -> torch.Tensor:
            values = values.float()
            return values[:, None] if values.dim() == 1 else values.repeat_interleave(group or columns, 1)[:, :columns]

        if zero is not None:
            return (found.float() - wide(zero(begin, end))) * wide(scale(begin, end))
        return NUMBERS.get(dtype, torch.Tensor.float)(found) * wide(scale(begin, end))

    return rows


def open_section(engine: Engine, name: str) -> tuple[RowReader, str]:
    """Opens the elements of a weight or a vector for reading by rows.

    Args:
        engine: the engine, open.
        name: name in the plan.

    Returns:
        The reader, and the dtype of the section.
    """
    data, form = engine.weight(name)
    assert form.dtype is not None and form.shape is not None and form.layout is not None
    return unpack_rows(data, PackedForm(form.dtype, form.shape, form.layout)), form.dtype


def _part(engine: Engine, call: KernelCall, role: str) -> tuple[RowReader, str]:
    operand = call.operands[role]
    assert isinstance(operand, WeightOperand)
    return open_section(engine, operand.name)
