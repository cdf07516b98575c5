"""Packs torch tensors into the layouts of csrc/cpu/kernel.h that the CPU kernels read, and unpacks them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright.dtypes import DTYPES
from enginewright.manifest import K_ALIGN, ROWS, packed_bytes
from enginewright.passes.weights import RowReader

PIECE_ELEMENTS = 1 << 18  # elements of a weight in memory at once (twice that for pairs), so that a cache holds them
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, dtype.torch) for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class PackedForm:
    """The logical form of a packed weight, by which a kernel reads its bytes."""

    dtype: str  # number type
    shape: tuple[int, ...]  # [rows, columns], [columns] for a vector, or [matrices, rows, columns]
    layout: str  # "plain", "r16", "r16_pairs", "r16_columns", "r16_columns_pairs"

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return packed_bytes(self.dtype, self.shape, self.layout)


def pack(weight: torch.Tensor, form: PackedForm) -> Iterator[memoryview]:
    """Packs a weight into pieces.

    Args:
        weight: the weight.
        form: form of the packed bytes.

    Raises:
        ValueError: the tensor does not have the form's shape or dtype, or holds values that kernels do not support (NaN
            of e4m3, codes of 4 bits above 15).
    """
    if tuple(weight.shape) != form.shape:
        raise ValueError(f"a {weight.dtype} {tuple(weight.shape)} tensor is packed as {form}")
    weight = weight.flatten(0, 1) if weight.dim() == 3 else weight
    return (piece() for piece in pack_rows(lambda begin, end: weight[begin:end], form))


def pack_rows(rows: RowReader, form: PackedForm) -> Iterator[Callable[[], memoryview]]:
    """Packs a weight that is read by rows, each of them once; rows of several matrices are counted through.

    Args:
        rows: reader of the weight.
        form: form of the packed bytes.

    Returns:
        Functions that make pieces when they are called, in any order, or several at once.
    """
    if len(form.shape) == 3:
        matrices, own, _ = form.shape
        of_one = replace(form, shape=form.shape[1:])
        for first in range(0, matrices * own, own):
            yield from pack_rows(lambda begin, end, first=first: rows(first + begin, first + end), of_one)  # type: ignore[misc]
        return

    read, to_blocks = _checked(rows, form), _blocks_of(form)
    parts = 2 if form.layout.endswith("_pairs") else 1
    count = form.shape[0] // parts
    first_rows = [part * count for part in range(parts)]
    step = max(PIECE_ELEMENTS // math.prod(form.shape[1:]) // ROWS, 1) * ROWS
    for begin in range(0, count, step):
        yield partial(_piece, read, to_blocks, begin, min(begin + step, count), first_rows)


def _checked(rows: RowReader, form: PackedForm) -> RowReader:
    """Reads a weight, and refuses values that kernels do not support."""

    def read(begin: int, end: int) -> torch.Tensor:
        values = rows(begin, end)
        if values.dtype != TORCH_DTYPES[form.dtype]:
            raise ValueError(f"a {values.dtype} tensor is packed as {form}")
        if form.dtype == "e4m3":
            values = values.view(torch.uint8)  # torch pads bytes, but not e4m3
            if ((values & 0x7F) == 0x7F).any():
                raise ValueError(f"a weight packed as {form} holds NaN")
        if DTYPES[form.dtype].bits == 4 and (values > 15).any():
            raise ValueError(f"a weight packed as {form} holds codes above 15")
        return values

    return read


def _blocks_of(form: PackedForm) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function that packs rows of one part."""
    match form.layout.removesuffix("_pairs"):
        case "plain":
            return torch.Tensor.contiguous
        case "r16":
            return _four_bit_blocks if DTYPES[form.dtype].bits == 4 else _r16_blocks
        case "r16_columns":
            return _columns
    raise ValueError(f"unknown layout {form.layout!r}")


def _piece(
    read: RowReader,
    to_blocks: Callable[[torch.Tensor], torch.Tensor],
    begin: int,
    end: int,
    first_rows: Sequence[int],
) -> memoryview:
    """Packs rows of parts whose blocks alternate; each part begins at one of `first_rows`."""
    parts = [to_blocks(read(first + begin, first + end)) for first in first_rows]
    return _bytes(parts[0] if len(parts) == 1 else torch.stack(parts, dim=1))


def unpack_rows(data: memoryview, form: PackedForm) -> RowReader:
    """Unpacks a weight, by rows.

    Args:
        data: packed bytes, of the form's size.
        form: form of the packed bytes.
    """
    if len(form.shape) == 3:
        return _unpack_matrices(data, form)
    layout, parts = form.layout.removesuffix("_pairs"), 2 if form.layout.endswith("_pairs") else 1
    block_rows = 1 if layout == "plain" else ROWS
    part_rows = form.shape[0] // parts
    of_blocks = np.frombuffer(data, np.uint8).reshape(-(-part_rows // block_rows), parts, -1)

    def rows(begin: int, end: int) -> torch.Tensor:
        pieces = []
        for part in range(parts):
            first, last = (min(max(row - part * part_rows, 0), part_rows) for row in (begin, end))
            if first == last:
                continue
            start = first // block_rows
            blocks = torch.from_numpy(of_blocks[start : -(-last // block_rows), part].copy())  # a mapping is read-only
            values = _unpacked(blocks, form, layout)
            pieces.append(values[first - start * block_rows : last - start * block_rows])
        return torch.cat(pieces).reshape(end - begin, *form.shape[1:])

    return rows


def _unpack_matrices(data: memoryview, form: PackedForm) -> RowReader:
    """Unpacks several matrices, whose rows are counted through."""
    matrices, own, _ = form.shape
    of_one, size = replace(form, shape=form.shape[1:]), form.nbytes // matrices

    def rows(begin: int, end: int) -> torch.Tensor:
        pieces = []
        for matrix in range(begin // own, -(-end // own)):
            reader = unpack_rows(data[matrix * size : (matrix + 1) * size], of_one)
            pieces.append(reader(max(begin - matrix * own, 0), min(end - matrix * own, own)))
        return torch.cat(pieces)

    return rows


def _unpacked(blocks: torch.Tensor, form: PackedForm, layout: str) -> torch.Tensor:
    """Unpacks UINT8 [blocks, bytes] to [rows, columns], including rows that fill the last block."""
    dtype = TORCH_DTYPES[form.dtype]
    if layout == "plain":
        return blocks.view(dtype)
    columns = form.shape[1]
    if layout == "r16_columns":
        return blocks.view(dtype).view(-1, columns, ROWS).transpose(1, 2).reshape(-1, columns)
    words = blocks.view(len(blocks), -1, ROWS, 4).transpose(1, 2)  # [blocks, 16, lines, 4]
    if DTYPES[form.dtype].bits == 4:
        words = torch.stack((words & 15, words >> 4), dim=3)
    return words.reshape(len(blocks) * ROWS, -1).view(dtype)[:, :columns]


def _r16_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Packs [rows, columns] to [blocks, lines, 16] of words, each a row's elements of K in a line; zero padded."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % K_ALIGN, 0, -rows % ROWS)).contiguous()
    words = padded.view(torch.int32)
    return words.reshape(-1, ROWS, words.shape[1]).transpose(1, 2)


def _four_bit_blocks(codes: torch.Tensor) -> torch.Tensor:
    """Packs codes of 4 bits: k and k + 4 share a byte, so that a word has 8 elements of K."""
    words = _r16_blocks(codes)
    return words[:, 0::2] | words[:, 1::2] << 4


def _columns(values: torch.Tensor) -> torch.Tensor:
    """Packs [rows, columns] to [blocks, columns, 16], rows zero padded."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % ROWS))
    return padded.reshape(-1, ROWS, columns).transpose(1, 2)


def _bytes(values: torch.Tensor) -> memoryview:
    as_bytes: NDArray[np.uint8] = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return as_bytes.data
