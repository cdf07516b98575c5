"""Reads numbers that blocks of a weight share: scales and zero points.

A block is a row, a group of columns, or larger.
"""

import math
from collections.abc import Callable, Collection

import torch

from enginewright.builder.checkpoint.quantized.bits import e8m0
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, by_rows, floats
from enginewright.builder.checkpoint.quantized.format import FLOATS, QuantizedFormat
from enginewright.builder.tensors import Tensors
from enginewright.passes.weights import RowsTensor

Block = tuple[int, int]  # rows, columns
POWERS_OF_TWO = (torch.float8_e8m0fnu, torch.uint8)


def take_scales(tensors: Tensors, name: str, shape: tuple[int, ...], block: Block | None = None) -> Groups:
    """Reads the scales of a weight [N, K]: floating point, or exponents of two. Errors are those of `take_grid`.

    Args:
        tensors: tensors of the checkpoint.
        name: name of the scales.
        shape: [N, K].
        block: rows and columns of a block; None is one number for all, or one per row.
    """

    def floats_of(values: torch.Tensor) -> torch.Tensor:
        return e8m0(values) if values.dtype in POWERS_OF_TWO else values.float()

    dtypes = (*FLOATS, *POWERS_OF_TWO)
    columns = block[1] if block else shape[1]
    return Groups(columns, take_grid(tensors, name, shape, block, dtypes, floats_of))


def take_grid(
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...],
    block: Block | None,
    dtypes: Collection[torch.dtype],
    of: Callable[[torch.Tensor], torch.Tensor],
) -> Open:
    """Reads one number for each block, repeated for the rows of the weight, [n, G].

    Args:
        tensors: tensors of the checkpoint.
        name: name of the numbers.
        shape: shape of the weight, [N, K].
        block: rows and columns of a block; None is one number for all, or one per row, depending on their number.
        dtypes: number types that they may have.
        of: converts them.

    Raises:
        EngineError: there is no such tensor, or it has another number of elements.
        UnsupportedModelError: it has another number type.
    """
    rows, columns = shape
    if block is None:
        info = tensors.find(name)
        block = (rows if info is not None and math.prod(info.shape) == 1 else 1, columns)
    down, across = -(-rows // block[0]), -(-columns // block[1])
    shapes: list[tuple[int, ...]] = [(down, across), (down, 1, across, 1)]  # the second is modelopt's
    if across == 1:
        shapes.append((down,))
    if down == across == 1:
        shapes.append(())
    read = tensors.take(name, *shapes, dtypes=dtypes)
    return by_rows(read, lambda values: of(values).reshape(down, across).repeat_interleave(block[0], dim=0)[:rows])


def fp8_weight(
    format: QuantizedFormat, name: str, shape: tuple[int, ...], scales: str, block: Block | None, activations: str
) -> RowsTensor:
    """Reads a weight FLOAT8E4M3FN [N, K], with the tensor `scales` as factors.

    Args:
        format: format of the checkpoint.
        name: name of the weight.
        shape: [N, K].
        scales: name of the scales.
        block: rows and columns of a block; None is one number for all, or one per row.
        activations: dtype of activations, "fp8" or "bf16".
    """
    groups = take_scales(format.tensors, scales, shape, block)
    values = by_rows(format.tensors.take(name, shape, dtypes=[torch.float8_e4m3fn]))
    what = f"FP8 in blocks of {block[0]}×{block[1]}" if block else "FP8"
    return floats(format, name, shape, values, groups, what, fp8=activations)
