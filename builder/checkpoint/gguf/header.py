"""Reads the header of a GGUF file: metadata, and the position of each tensor.

Source: the GGUF specification, ggml/docs/gguf.md (versions 2 and 3, little-endian). The `gguf` package has a
reader too, but it trusts every count in the file: an array that declares 2**60 entries makes it collect empty slices
after the file's end until memory is exhausted. Here no count is trusted beyond what the file can hold.
"""

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from enginewright.builder.checkpoint.files import check_pulled
from enginewright.errors import EngineError
from enginewright.regular_file import open_regular

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
HEADER_LIMIT_BYTES = 128 << 20
COUNT_LIMIT = 1 << 16  # limit of tensors, and of metadata values
ARRAY_LIMIT = 1 << 22  # limit of entries; the largest vocabularies have 2**18 tokens and twice as many merges
NAME_LIMIT_BYTES = 1024
MAX_DIMENSIONS = 4

# Value types of the specification.
SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "|b1"]))
SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
STRING = 8
ARRAY = 9


@dataclass(frozen=True)
class GgufTensor:
    """The position of a tensor in the file, and its form."""

    name: str  # name in the file
    type: GGMLQuantizationType  # GGML type
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    offset_bytes: int  # position from the file's start
    nbytes: int  # bytes in the file


@dataclass(frozen=True)
class GgufHeader:
    """The header of a GGUF file."""

    metadata: Mapping[str, Value]  # key, such as general.architecture → value
    tensors: Mapping[str, GgufTensor]  # GGUF's name → tensor


class _Malformed(Exception):
    """A fault of the file; its text is a clause."""


def read_header(path: Path) -> GgufHeader:
    """Reads the header.

    Raises:
        EngineError: the file is cut short, or is not a GGUF file of a supported version.
    """
    try:
        check_pulled(path.name, path)
        with open(open_regular(path), "rb") as file:
            return _read(file, os.fstat(file.fileno()).st_size)
    except _Malformed as error:
        raise EngineError(
            f"{path.name} is not a readable GGUF file", str(error), "Download it again, or convert it again."
        ) from error
    except OSError as error:
        raise EngineError(f"{path.name} cannot be read", error.strerror or str(error)) from error


class _Cursor:
    """Reads forward, and never beyond the file's end or the header's limit."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._file = file
        self._limit = min(size_bytes, HEADER_LIMIT_BYTES)
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        content = self._file.read(count)
        if len(content) != count:
            raise _Malformed(f"it ends within {what}")
        self.position += count
        return content

    def need(self, count: int, what: str) -> None:
        if count > self._limit - self.position:
            too_long = self._limit == HEADER_LIMIT_BYTES
            raise _Malformed(f"its header has more than {self._limit} bytes" if too_long else f"it ends within {what}")

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str, limit_bytes: int = HEADER_LIMIT_BYTES) -> str:
        length = self.u64(what)
        if length > limit_bytes:
            raise _Malformed(f"{what} declares {length} bytes")
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise _Malformed(f"{what} is not UTF-8 text") from error


def _read(file: BinaryIO, size_bytes: int) -> GgufHeader:
    cursor = _Cursor(file, size_bytes)
    if (magic := cursor.take(4, "the magic")) != MAGIC:
        raise _Malformed(f"it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.u32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        raise _Malformed("it is big-endian" if swapped in VERSIONS else f"its version is {version}, not 2 or 3")
    tensor_count, value_count = struct.unpack("<QQ", cursor.take(16, "the counts"))
    if max(tensor_count, value_count) > COUNT_LIMIT:
        raise _Malformed(f"it declares {tensor_count} tensors and {value_count} metadata values")
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string("a metadata key", NAME_LIMIT_BYTES)
        if key in metadata:
            raise _Malformed(f"metadata {_short(key)} is repeated")
        metadata[key] = _value(cursor, f"metadata {_short(key)}")
    entries = [_tensor_entry(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise _Malformed(f"its alignment {alignment} is not a power of two")
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(metadata, _place(entries, start, alignment, size_bytes))


def _value(cursor: _Cursor, what: str) -> Value:
    kind = cursor.u32(what)
    if kind == STRING:
        return cursor.string(what)
    if kind in SCALARS:
        value = np.frombuffer(cursor.take(np.dtype(SCALARS[kind]).itemsize, what), SCALARS[kind])[0]
        # The shortest decimal of this float32 is taken: 1e-05, and not 9.999999747378752e-06.
        scalar: int | float | bool = float(str(value)) if isinstance(value, np.float32) else value.item()
        return scalar
    if kind != ARRAY:
        raise _Malformed(f"{what} has unknown type {kind}")
    kind, count = cursor.u32(what), cursor.u64(what)
    if count > ARRAY_LIMIT:
        raise _Malformed(f"{what} declares {count} entries")
    if kind == STRING:
        cursor.need(8 * count, what)
        return [cursor.string(what) for _ in range(count)]
    if kind not in SCALARS:
        raise _Malformed(f"{what} is an array of unknown type {kind}")
    values = np.frombuffer(cursor.take(count * np.dtype(SCALARS[kind]).itemsize, what), SCALARS[kind])
    array: list[int] | list[float] | list[bool] = values.tolist()
    return array


def _tensor_entry(cursor: _Cursor) -> GgufTensor:
    """Reads one entry of the tensor list; its offset still counts from the start of the data."""
    name = cursor.string("a tensor's name", NAME_LIMIT_BYTES)
    what = f"tensor {_short(name)}"
    dimensions = cursor.u32(what)
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise _Malformed(f"{what} has {dimensions} dimensions")
    columns, *outer = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions, what))
    number = cursor.u32(what)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError as error:
        raise _Malformed(f"{what} has unknown type {number}") from error
    block_columns, block_bytes = GGML_QUANT_SIZES[kind]
    if columns % block_columns:
        raise _Malformed(f"{what} has rows of {columns}, which is not a multiple of {kind.name}'s {block_columns}")
    elements = columns
    for size in outer:
        elements *= size
    if not elements:
        raise _Malformed(f"{what} is empty")
    shape = (*reversed(outer), columns)
    return GgufTensor(name, kind, shape, cursor.u64(what), elements // block_columns * block_bytes)


def _place(entries: list[GgufTensor], start: int, alignment: int, size_bytes: int) -> dict[str, GgufTensor]:
    """Checks that tensors are inside the file and do not overlap; returns name → tensor with file offsets."""
    tensors: dict[str, GgufTensor] = {}
    end = start
    for entry in sorted(entries, key=lambda entry: entry.offset_bytes):
        what = f"tensor {_short(entry.name)}"
        offset = start + entry.offset_bytes
        if entry.name in tensors:
            raise _Malformed(f"{what} is repeated")
        if entry.offset_bytes % alignment or offset < end:
            raise _Malformed(f"{what} is misplaced")
        end = offset + entry.nbytes
        if end > size_bytes:
            raise _Malformed(f"it has {size_bytes} bytes, and {what} would end at {end}")
        tensors[entry.name] = GgufTensor(entry.name, entry.type, entry.shape, offset, entry.nbytes)
    return tensors


def _short(name: str) -> str:
    return repr(name if len(name) <= 80 else name[:77] + "...")
