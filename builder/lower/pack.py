"""Weights as the CPU kernels read them: the layouts of csrc/cpu/kernel.h, from torch tensors to bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright.manifest import K_ALIGN, ROWS, packed_bytes

LINE_BYTES = 64
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "i8": torch.int8, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class PackedForm:
    """The logical form of a packed weight: what a kernel must be told to read its bytes."""

    dtype: str
    shape: tuple[int, ...]  # [rows, columns], or [columns] for a vector
    layout: str  # "plain", "r16", "r16_pairs"

    @property
    def nbytes(self) -> int:
        return packed_bytes(self.dtype, self.shape, self.layout)


def _r16_blocks(weight: torch.Tensor) -> torch.Tensor:
    """[rows, columns] → [blocks, lines, 16, elements a line and row], zero padded."""
    rows, columns = weight.shape
    depth = LINE_BYTES // ROWS // weight.itemsize  # elements of K that a row has in a line
    padded = torch.nn.functional.pad(weight, (0, -columns % K_ALIGN, 0, -rows % ROWS))
    return padded.reshape(-1, ROWS, padded.shape[1] // depth, depth).transpose(1, 2)


def pack(weight: torch.Tensor, form: PackedForm) -> Iterator[memoryview]:
    """The bytes of a weight, in pieces.

    Raises:
        ValueError: the tensor is not of the form's shape or dtype, or holds NaN where kernels take none (e4m3).
    """
    if tuple(weight.shape) != form.shape or weight.dtype != DTYPES[form.dtype]:
        raise ValueError(f"a {weight.dtype} {tuple(weight.shape)} tensor is packed as {form}")
    if form.dtype == "e4m3":
        weight = weight.view(torch.uint8)  # as such it can be padded
        if ((weight & 0x7F) == 0x7F).any():
            raise ValueError(f"a weight packed as {form} holds NaN")
    match form.layout:
        case "plain":
            packed = weight
        case "r16":
            packed = _r16_blocks(weight)
        case "r16_pairs":
            first, second = weight.chunk(2)
            packed = torch.stack((_r16_blocks(first), _r16_blocks(second)), dim=1)
        case _:
            raise ValueError(f"unknown layout {form.layout!r}")
    as_bytes: NDArray[np.uint8] = packed.contiguous().reshape(-1).view(torch.uint8).numpy()
    yield as_bytes.data
