"""The number types of engines: one table, which plans, manifests, passes, packing and kernels read.

`csrc/cpu/dtype.h` has the same names and bits, and `csrc/cuda/dtype.cuh` the names that GPUs know; a test compares
them. `csrc/cpu/codes.h` and `csrc/cuda/dtype.cuh` say how kernels round to codes of 8 bits and widen them.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DType:
    """A number type: its size, its names in other libraries, and the places where it may be used."""

    name: str  # name in plans and manifests, and of the enumerator in C++ and CUDA
    bits: int  # bits of a number, as it is packed
    onnx: str  # name of the enumerator in graphs, where a number of 4 bits has a byte to itself
    torch: str  # name in torch
    in_r16: bool = False  # True if matrices may be packed in r16 layouts (csrc/cpu/kernel.h)
    in_columns: bool = False  # True if values of column groups may be packed as r16_columns
    kv_cache: str = ""  # name of a KV cache of this type in --kv-cache-dtype; "" if there is none
    kv_group: int = 0  # numbers of a KV cache's head that share a scale and a zero point, BF16 each; 0: see `largest`
    largest: float = 0.0  # largest code of rows that are stored as codes with an f32 scale; 0 for plain numbers
    # smallest amax (of u4: scale, or zero) that is not stored as 0: below half of it, largest / amax is infinite
    tiny: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of a number; 0 where several share a byte."""
        return self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale that is stored with a row."""
        return DTYPES["f32"].bytes if self.largest else 0

    def kv_row_bytes(self, width: int) -> int:
        """Computes the bytes of a row of a KV cache: its numbers, padding included, and their scales.

        Args:
            width: numbers of the row.
        """
        group_bytes = 2 * DTYPES["bf16"].bytes
        return width * self.bits // 8 + (width // self.kv_group * group_bytes if self.kv_group else self.scale_bytes)


DTYPES: Mapping[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("f32", 32, "FLOAT", "float32", in_columns=True),
        DType("bf16", 16, "BFLOAT16", "bfloat16", in_r16=True, in_columns=True, kv_cache="bf16"),
        DType("i32", 32, "INT32", "int32"),
        DType("i8", 8, "INT8", "int8", in_r16=True, in_columns=True, kv_cache="int8", largest=127.0, tiny=2.0**-120),
        DType("e4m3", 8, "FLOAT8E4M3FN", "float8_e4m3fn", in_r16=True, kv_cache="fp8", largest=448.0, tiny=2.0**-118),
        DType("u4", 4, "UINT8", "uint8", in_r16=True, kv_cache="int4", kv_group=32, tiny=2.0**-100),
        DType("e2m1", 4, "UINT8", "uint8", in_r16=True),
    )
}
# Name in --kv-cache-dtype → type.
KV_CACHES: Mapping[str, DType] = {dtype.kv_cache: dtype for dtype in DTYPES.values() if dtype.kv_cache}


def kv_share(dtype: DType, width: int = 128) -> float:
    """Computes the memory of a KV cache of this type, as a share of that of a cache in BF16.

    Args:
        dtype: type of the cache.
        width: numbers of a head.
    """
    return dtype.kv_row_bytes(width) / DTYPES["bf16"].kv_row_bytes(width)
