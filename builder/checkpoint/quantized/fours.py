"""Weights of FP4 numbers, two per byte, and one scale for each group of columns: MXFP4 and NVFP4.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from collections.abc import Callable

import torch

from enginewright.builder.checkpoint.quantized.bits import FP4, e8m0, nibbles
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, floats, mxfp4
from enginewright.builder.checkpoint.quantized.format import FLOATS, Format
from enginewright.builder.checkpoint.quantized.grids import take_grid, take_scales
from enginewright.passes.weights import RowReader, RowsTensor

MX_RUN, NV_RUN = 32, 16  # columns that share a scale


def mxfp4_weight(format: Format, name: str, shape: tuple[int, ...], packed: str, scales: str) -> RowsTensor:
    """packed: UINT8, [N, K / 2] or [N, K / 32, 16]. scales: UINT8 [N, K / 32], exponents of two."""
    powers = take_scales(format.tensors, scales, shape, (1, MX_RUN)).scales
    return mxfp4(name, shape, _codes(format, shape, packed), powers)


def mxfp4_experts(format: Format, name: str, shape: tuple[int, ...], packed: str, scales: str) -> RowsTensor:
    """Of several matrices [E, N, K], whose rows are counted through: packed UINT8 [E, N, K / 32, 16], scales UINT8
    [E, N, K / 32].
    """
    experts, rows, columns = shape
    blocks = (experts, rows, columns // MX_RUN)
    read = format.tensors.take(packed, (*blocks, MX_RUN // 2), dtypes=[torch.uint8])
    read_scales = format.tensors.take(scales, blocks, dtypes=[torch.uint8])

    def codes() -> RowReader:
        values = read().flatten(0, 1)
        return lambda begin, end: nibbles(values[begin:end]).flatten(1)

    def powers() -> RowReader:
        exponents = read_scales().flatten(0, 1)
        return lambda begin, end: e8m0(exponents[begin:end])

    return mxfp4(name, (experts * rows, columns), codes, powers)


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
    codes = _codes(format, shape, packed)

    def numbers() -> RowReader:
        read = codes()
        return lambda begin, end: FP4[read(begin, end).int()]

    return floats(format, name, shape, numbers, Groups(NV_RUN, scales), "NVFP4")


def _codes(format: Format, shape: tuple[int, ...], packed: str) -> Open:
    """UINT8 [n, K]."""
    rows, columns = shape
    blocks = (rows, -(-columns // MX_RUN), MX_RUN // 2)
    read = format.tensors.take(packed, (rows, -(-columns // 2)), blocks, dtypes=[torch.uint8])

    def open() -> RowReader:
        values = read()
        return lambda begin, end: nibbles(values[begin:end]).flatten(1)[:, :columns]

    return open
