"""Weights as the CPU kernels read them: the layouts of csrc/cpu/kernel.h, from torch tensors to bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright.manifest import K_ALIGN, ROWS, packed_bytes

LINE_BYTES = 64
DTYPES = {
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "i8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "u4": torch.uint8,  # a code each
}


@dataclass(frozen=True)
class PackedForm:
    """The logical form of a packed weight: what a kernel must be told to read its bytes."""

    dtype: str
    shape: tuple[int, ...]  # [rows, columns], or [columns] for a vector
    layout: str  # "plain", "r16", "r16_pairs", "r16_columns", "r16_columns_pairs"

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.dtype, self.shape, self.layout)


def _r16_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] → [blocks, lines, 16, elements a line and row], zero padded."""
    rows, columns = weight.shape
    depth = LINE_BYTES // ROWS // weight.itemsize  # elements of K that a row has in a line
    padded = torch.nn.functional.pad(weight, (0, -columns % K_ALIGN, 0, -rows % ROWS))
    return padded.reshape(-1, ROWS, padded.shape[1] // depth, depth).transpose(1, 2)


def _u4_blocks(codes: torch.Tensor) -> torch.Tensor:
    """The same of codes of 4 bits: k and k + 4 share a byte, so that a line has 8 of K for each row."""
    lines = _r16_blocks(codes)
    return lines[:, 0::2] | lines[:, 1::2] << 4


def _columns(values: torch.Tensor) -> torch.Tensor:
    """[rows, columns] → [blocks, columns, 16], rows zero padded."""
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, 0, 0, -rows % ROWS))
    return padded.reshape(-1, ROWS, columns).transpose(1, 2)


def pack(weight: torch.Tensor, form: PackedForm) -> Iterator[memoryview]:
    """The bytes of a weight, in pieces.

    Raises:
        ValueError: the tensor is not of the form's shape or dtype, or holds what kernels cannot take (NaN of e4m3,
            codes of u4 above 15).
    """
    if tuple(weight.shape) != form.shape or weight.dtype != DTYPES[form.dtype]:
        raise ValueError(f"a {weight.dtype} {tuple(weight.shape)} tensor is packed as {form}")
    if form.dtype == "e4m3":
        weight = weight.view(torch.uint8)  # as such it can be padded
        if ((weight & 0x7F) == 0x7F).any():
            raise ValueError(f"a weight packed as {form} holds NaN")
    if form.dtype == "u4" and (weight > 15).any():
        raise ValueError(f"a weight packed as {form} holds codes above 15")
    layout, in_pairs = form.layout.removesuffix("_pairs"), form.layout.endswith("_pairs")
    match layout:
        case "plain":
            packed = weight
        case "r16" | "r16_columns":
            blocks = _columns if layout == "r16_columns" else _u4_blocks if form.dtype == "u4" else _r16_blocks
            halves = weight.chunk(2) if in_pairs else (weight,)
            packed = torch.stack([blocks(half) for half in halves], dim=1)
        case _:
            raise ValueError(f"unknown layout {form.layout!r}")
    as_bytes: NDArray[np.uint8] = packed.contiguous().reshape(-1).view(torch.uint8).numpy()
    yield as_bytes.data
