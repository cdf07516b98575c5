"""Weights of FP4 numbers, two a byte, and a scale for each run of columns: MXFP4 and NVFP4.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from collections.abc import Callable

import torch

from enginewright.builder.checkpoint.quantized.bits import fp4
from enginewright.builder.checkpoint.quantized.fit import Groups, floats
from enginewright.builder.checkpoint.quantized.format import FLOATS, Format
from enginewright.builder.checkpoint.quantized.grids import take_grid, take_scales
from enginewright.builder.tensors import Read
from enginewright.passes.weights import RowReader, RowsTensor

MX_RUN, NV_RUN = 32, 16  # columns that share a scale


def mxfp4_weight(format: Format, name: str, shape: tuple[int, ...], packed: str, scales: str) -> RowsTensor:
    """packed: UINT8, [N, K / 2] or [N, K / 32, 16]. scales: UINT8 [N, K / 32], exponents of two."""
    groups = take_scales(format.tensors, scales, shape, (1, MX_RUN))
    return _weight(format, name, shape, packed, groups, "MXFP4")


def nvfp4_weight(
    format: Format,
    name: str,
    shape: tuple[int, ...],
    packed: str,
    factor: str,
    scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> RowsTensor:
    """packed: UINT8 [N, K / 2]. `<name>_scale`: FLOAT8E4M3FN [N, K / 16]. factor: one number for all of those.

    scaled: scales and factor, in FLOAT → what numbers are multiplied by.
    """
    of_all = format.tensors.take(factor, (1,), (), dtypes=FLOATS)
    scales = take_grid(
        format.tensors,
        f"{name}_scale",
        shape,
        (1, NV_RUN),
        (torch.float8_e4m3fn,),
        lambda values: scaled(values.float(), of_all().float().reshape(())),
    )
    return _weight(format, name, shape, packed, Groups(NV_RUN, scales), "NVFP4")


def _weight(format: Format, name: str, shape: tuple[int, ...], packed: str, scales: Groups, what: str) -> RowsTensor:
    rows, columns = shape
    blocks = (rows, -(-columns // MX_RUN), MX_RUN // 2)
    read: Read = format.tensors.take(packed, (rows, -(-columns // 2)), blocks, dtypes=[torch.uint8])

    def open() -> RowReader:
        values = read()
        return lambda begin, end: fp4(values[begin:end]).flatten(1)[:, :columns]

    return floats(format, name, shape, open, scales, what)
