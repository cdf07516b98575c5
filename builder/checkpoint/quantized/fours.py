"""Reads weights of FP4 numbers, two per byte, and one scale for each group of columns: MXFP4 and NVFP4.

https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
"""

from collections.abc import Callable

import torch

from enginewright.builder.checkpoint.quantized.bits import FP4, e8m0, nibbles
from enginewright.builder.checkpoint.quantized.fit import Groups, Open, floats, mxfp4
from enginewright.builder.checkpoint.quantized.format import FLOATS, QuantizedFormat
from enginewright.builder.checkpoint.quantized.grids import take_grid, take_scales
from enginewright.passes.weights import RowReader, RowsTensor

MX_GROUP, NV_GROUP = 32, 16  # columns that share a scale


def mxfp4_weight(format: QuantizedFormat, name: str, shape: tuple[int, ...], packed: str, scales: str) -> RowsTensor:
    """Reads an MXFP4 weight.

    Args:
        format: format of the checkpoint.
        name: name of the weight.
        shape: [N, K].
        packed: name of a tensor UINT8, [N, K / 2] or [N, K / 32, 16].
        scales: name of a tensor UINT8 [N, K / 32], exponents of two.
    """
    powers = take_scales(format.tensors, scales, shape, (1, MX_GROUP)).scales
    return mxfp4(name, shape, _codes(format, shape, packed), powers)


def mxfp4_experts(format: QuantizedFormat, name: str, shape: tuple[int, ...], packed: str, scales: str) -> RowsTensor:
    """Reads the MXFP4 weights of several matrices [E, N, K], whose rows are counted through.

    Args:
        format: format of the checkpoint.
        name: name of the weights.
        shape: [E, N, K].
        packed: name of a tensor UINT8 [E, N, K / 32, 16].
        scales: name of a tensor UINT8 [E, N, K / 32], exponents of two.
    """
    experts, rows, columns = shape
    blocks = (experts, rows, columns // MX_GROUP)
    read = format.tensors.take(packed, (*blocks, MX_GROUP // 2), dtypes=[torch.uint8])
    read_scales = format.tensors.take(scales, blocks, dtypes=[torch.uint8])

    def codes() -> RowReader:
        values = read().flatten(0, 1)
        return lambda begin, end: nibbles(values[begin:end]).flatten(1)

    def powers() -> RowReader:
        exponents = read_scales().flatten(0, 1)
        return lambda begin, end: e8m0(exponents[begin:end])

    return mxfp4(name, (experts * rows, columns), codes, powers)


def nvfp4_weight(
    format: QuantizedFormat,
    name: str,
    shape: tuple[int, ...],
    packed: str,
    factor: str,
    scaled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> RowsTensor:
    """Reads an NVFP4 weight, with scales `<name>_scale`, FLOAT8E4M3FN [N, K / 16].

    Args:
        format: format of the checkpoint.
        name: name of the weight.
        shape: [N, K].
        packed: name of a tensor UINT8 [N, K / 2].
        factor: name of a tensor with one number for all scales.
        scaled: (scales, factor), in FLOAT → factors of the numbers.
    """
    of_all = format.tensors.take(factor, (1,), (), dtypes=FLOATS)
    scales = take_grid(
        format.tensors,
        f"{name}_scale",
        shape,
        (1, NV_GROUP),
        (torch.float8_e4m3fn,),
        lambda values: scaled(values.float(), of_all().float().reshape(())),
    )
    codes = _codes(format, shape, packed)

    def numbers() -> RowReader:
        read = codes()
        return lambda begin, end: FP4[read(begin, end).int()]

    return floats(format, name, shape, numbers, Groups(NV_GROUP, scales), "NVFP4")


def _codes(format: QuantizedFormat, shape: tuple[int, ...], packed: str) -> Open:
    """Unpacks codes by rows, UINT8 [n, K]."""
    rows, columns = shape
    blocks = (rows, -(-columns // MX_GROUP), MX_GROUP // 2)
    read = format.tensors.take(packed, (rows, -(-columns // 2)), blocks, dtypes=[torch.uint8])

    def open() -> RowReader:
        values = read()
        return lambda begin, end: nibbles(values[begin:end]).flatten(1)[:, :columns]

    return open
