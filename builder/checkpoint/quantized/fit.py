"""Fits quantized weights to a kernel's format, or restores them to bfloat16 if no kernel supports theirs.

Formats locate codes, scales and zero points; all are passed by rows of the weight, [n, ...].
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from enginewright.builder.checkpoint.quantized.format import QuantizedFormat
from enginewright.builder.tensors import Read
from enginewright.errors import EngineError
from enginewright.passes.quant import W8A8, Fp8, Int4Rtn, Int8Wo, Mxfp4, QuantConfig
from enginewright.passes.quant.fp8 import BLOCK
from enginewright.passes.quant.method import MAX_GROUP_SIZE, StoredTensor
from enginewright.passes.weights import RowReader, RowsTensor

Open = Callable[[], RowReader]


@dataclass(frozen=True)
class Groups:
    """Numbers of each quantization group of a weight's columns, the last one perhaps shorter."""

    size: int  # columns of a group
    scales: Open  # floating point [n, G]
    # zero points, integers [n, G]: the code of the number 0; None if that is always half of the codes
    zeros: Open | None = None


def by_rows(read: Read, of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Open:
    """Reads the rows of a tensor, or of a function of it, which is computed when a reading begins.

    Args:
        read: reads the tensor.
        of: the function.
    """

    def open() -> RowReader:
        values = of(read()) if of else read()
        return lambda begin, end: values[begin:end]

    return open


def by_columns(read: Read, of: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Open:
    """Reads the columns of a tensor [..., N], which holds the weight's rows side by side, as rows.

    Args:
        read: reads the tensor.
        of: function of the tensor.
    """

    def open() -> RowReader:
        values = of(read()) if of else read()
        return lambda begin, end: values[:, begin:end].t()

    return open


def from_signed(values: Open, bits: int) -> Open:
    """Converts signed integers to codes, which are larger by half of the codes.

    Args:
        values: signed integers.
        bits: bits of a code.
    """
    middle = 1 << bits - 1
    return _mapped(values, lambda rows: (rows.to(torch.int16) + middle).to(torch.uint8))


def integers(
    format: QuantizedFormat,
    name: str,
    shape: tuple[int, ...],
    bits: int,
    codes: Open,
    groups: Groups,
    int8_activations: int | None = None,
) -> RowsTensor:
    """Fits a weight of integers; a code represents (code - zero) · scale.

    Args:
        format: format of the checkpoint, for notes.
        name: name of the weight.
        shape: [N, K].
        bits: bits of a code.
        codes: UINT8 [n, K], in [0, 2^bits).
        groups: scales and zero points.
        int8_activations: columns of INT8 activations that share a scale, 0 for all; None if they are not INT8.
    """
    whole_rows = groups.size >= shape[1]
    group = 0 if whole_rows else _group_size(groups.size)
    if bits <= 4 and group is not None:
        return _int4(name, shape, bits, codes, groups, group)
    if bits > 4 and whole_rows and groups.zeros is None:
        config = Int8Wo() if int8_activations is None else W8A8(int8_activations)
        return _int8(name, shape, bits, codes, groups, config)
    zero_points = " with zero points" if groups.zeros else ""
    grouping = "by rows" if whole_rows else f"in groups of {groups.size} columns"
    format.note(f"integers of {bits} bits{zero_points} {grouping}, which no kernel supports, are restored to bfloat16")
    return restored(name, shape, restore_integers(name, bits, codes, groups))


def restore_integers(name: str, bits: int, codes: Open, groups: Groups) -> Open:
    """Restores integers to FLOAT, by rows.

    Args:
        name: name of the weight, for errors.
        bits: bits of a code.
        codes: UINT8 [n, K].
        groups: scales and zero points.
    """

    def open() -> RowReader:
        read, scales, zeros = codes(), groups.scales(), groups.zeros and groups.zeros()

        def rows(begin: int, end: int) -> torch.Tensor:
            values = read(begin, end).float()
            zero = zeros(begin, end).float() if zeros else torch.full((1, 1), float(1 << bits - 1))
            scale = _finite(scales(begin, end), name)
            return (values - _wide(zero, groups.size, values)) * _wide(scale, groups.size, values)

        return rows

    return open


def mxfp4(name: str, shape: tuple[int, ...], codes: Open, powers: Open) -> StoredTensor:
    """Fits a weight in MXFP4.

    Args:
        name: name of the weight.
        shape: [N, K].
        codes: UINT8 [n, K], of E2M1.
        powers: FLOAT [n, K / 32]; bfloat16 holds half of any, as the smallest subnormal does.
    """
    scales = _mapped(powers, lambda rows: (_finite(rows, name) / 2).to(torch.bfloat16))
    return _stored(name, shape, Mxfp4(), [codes, scales])


def floats(
    format: QuantizedFormat,
    name: str,
    shape: tuple[int, ...],
    values: Open,
    groups: Groups,
    what: str,
    fp8: str | None = None,
) -> RowsTensor:
    """Fits a weight of small floating point numbers, each times the scale of its group.

    Args:
        format: format of the checkpoint, for notes.
        name: name of the weight.
        shape: [N, K].
        values: FLOAT8E4M3FN [n, K] if fp8; otherwise a tensor whose `.float()` has the numbers.
        groups: scales.
        what: name of such weights, for a note.
        fp8: dtype of activations for FP8 numbers, "fp8" or "bf16"; None if the numbers are not FP8.
    """
    if fp8 and (groups.size >= shape[1] or groups.size % BLOCK == 0):
        return _fp8(name, shape, values, groups, fp8)
    format.note(f"{what}, which no kernel supports, is restored to bfloat16")

    def open() -> RowReader:
        read, scales = values(), groups.scales()

        def rows(begin: int, end: int) -> torch.Tensor:
            numbers = read(begin, end).float()
            return numbers * _wide(_finite(scales(begin, end), name), groups.size, numbers)

        return rows

    return restored(name, shape, open)


def restored(name: str, shape: tuple[int, ...], open: Open) -> RowsTensor:
    """Makes a weight of FLOAT numbers, rounded to bfloat16 as those of other checkpoints are.

    Args:
        name: name of the weight.
        shape: [N, K].
        open: opens it for reading by rows.
    """

    def rounded() -> RowReader:
        read = open()
        return lambda begin, end: _finite(read(begin, end), name).to(torch.bfloat16).float()

    return RowsTensor(name, torch.float32, shape, rounded)


def _group_size(size: int) -> int | None:
    """Returns the largest group that kernels support and that divides one of `size` columns."""
    return next((group for group in range(MAX_GROUP_SIZE, 0, -32) if size % group == 0), None)


def _int4(name: str, shape: tuple[int, ...], bits: int, codes: Open, groups: Groups, group: int) -> StoredTensor:
    config = Int4Rtn(group_size=group, zero_points=groups.zeros is not None)
    shift = 0 if groups.zeros else 8 - (1 << bits - 1)  # the middle of fewer bits moves to that of four
    repeats = groups.size // group if group else 1
    count = config.outputs(name, *shape)[1][2][1]  # groups of a row

    def of_groups(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(repeats, dim=1)[:, :count] if repeats > 1 else values

    opens = [
        _mapped(codes, lambda rows: _checked_codes(rows, bits, name) + shift),
        _mapped(groups.scales, lambda rows: _finite(of_groups(rows).to(torch.bfloat16), name)),
    ]
    if groups.zeros:
        opens.append(_mapped(groups.zeros, lambda rows: _checked_codes(of_groups(rows), 4, name).to(torch.int8)))
    return _stored(name, shape, config, opens)


def _int8(
    name: str, shape: tuple[int, ...], bits: int, codes: Open, groups: Groups, config: QuantConfig
) -> StoredTensor:
    def signed(rows: torch.Tensor) -> torch.Tensor:
        # -128 becomes -127, the smallest code of the kernels.
        return _checked_codes(rows, bits, name).to(torch.int16).sub_(1 << bits - 1).clamp_(min=-127).to(torch.int8)

    scales = _mapped(groups.scales, lambda rows: _finite(rows.float(), name)[:, 0])
    return _stored(name, shape, config, [_mapped(codes, signed), scales])


def _fp8(name: str, shape: tuple[int, ...], values: Open, groups: Groups, activations: str) -> StoredTensor:
    def checked(rows: torch.Tensor) -> torch.Tensor:
        if ((rows.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise _not_finite(name)
        return rows

    config = Fp8(fp8_scales="channel" if groups.size >= shape[1] else "block", fp8_activations=activations)
    repeats, (_, *groups_of_row) = groups.size // BLOCK, config.outputs(name, *shape)[1][2]

    def of_groups(scales: torch.Tensor) -> torch.Tensor:
        numbers = _finite(scales.float(), name)
        return numbers.repeat_interleave(repeats, dim=1)[:, : groups_of_row[0]] if groups_of_row else numbers[:, 0]

    return _stored(name, shape, config, [_mapped(values, checked), _mapped(groups.scales, of_groups)])


def _stored(name: str, shape: tuple[int, ...], config: QuantConfig, opens: list[Open]) -> StoredTensor:
    outputs = config.outputs(name, *shape)
    parts = [RowsTensor(*output, open).initializer() for output, open in zip(outputs, opens, strict=True)]
    return StoredTensor(name, config, parts)


def _mapped(open: Open, convert: Callable[[torch.Tensor], torch.Tensor]) -> Open:
    def opened() -> RowReader:
        read = open()
        return lambda begin, end: convert(read(begin, end))

    return opened


def _wide(of_groups: torch.Tensor, size: int, values: torch.Tensor) -> torch.Tensor:
    """Repeats numbers of groups [n, G] for each column of values [n, K]."""
    if of_groups.shape[1] == 1:
        return of_groups.float()
    return of_groups.float().repeat_interleave(size, dim=1)[:, : values.shape[1]]


def _checked_codes(codes: torch.Tensor, bits: int, name: str) -> torch.Tensor:
    if bits < 8 and ((codes < 0) | (codes >= 1 << bits)).any():
        raise EngineError(f"{name} cannot be used", f"it holds codes of more than {bits} bits", "Check the checkpoint.")
    return codes


def _finite(values: torch.Tensor, name: str) -> torch.Tensor:
    if not values.isfinite().all():
        raise _not_finite(name)
    return values


def _not_finite(name: str) -> EngineError:
    return EngineError(f"{name} cannot be used", "it or its scales hold NaN or infinity", "Check the checkpoint.")
