"""Machine code in an engine file: a section `code/<architecture>` for each GPU architecture, an archive of kernels.

    u64 N | JSON index, space-padded to N bytes | cubins, each 64-byte aligned and zero-padded to 64 bytes

docs/engine-file.md specifies it. Whatever the bytes, reading raises only EngineError. Readers accept exactly the bytes
that `write_code` writes.
"""

import re
from collections.abc import Mapping
from typing import Annotated

import msgspec

from enginewright.engine_header import REBUILD, padded
from enginewright.errors import CorruptEngineError
from enginewright.manifest import MAX_BYTES, MAX_NAME
from enginewright.printable import printable

CODE = "code/"  # sections of this prefix are archives of kernels
_NAME = re.compile(r"[!#-\[\]-~ ]{1,255}")  # printable ASCII but '"' and '\\'

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
NumBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class CompiledKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A kernel of an archive: its name in the cubin, and the resources of a launch."""

    symbol: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]  # name in the cubin
    shared_bytes: NumBytes = 0  # dynamic shared memory of a block, in bytes
    num_warps: Annotated[int, msgspec.Meta(ge=0, le=32)] = 0  # warps of a block; 0: the plan's launch has the threads
    scratch_bytes: NumBytes = 0  # global memory that each block needs for itself, in bytes


class _Entry(CompiledKernel, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """An entry of the index: a kernel, and the position of its cubin."""

    offset: NumBytes  # start of the cubin, in bytes from the section's start
    nbytes: NumBytes  # length of the cubin, in bytes


_INDEX = msgspec.json.Decoder(dict[str, _Entry])


class CodeArchive:
    """Kernels of one GPU architecture.

    Attributes:
        launches: name → resources of a launch.
    """

    def __init__(self, data: memoryview, entries: Mapping[str, _Entry]) -> None:
        self._data = data
        self._entries = entries
        self.launches: Mapping[str, CompiledKernel] = entries

    def cubin(self, name: str) -> memoryview:
        """Returns the machine code (or the text of PTX) of one kernel, as a view into the section.

        Raises:
            CorruptEngineError: the archive has no kernel of this name.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptEngineError("the engine is incomplete", f"its code has no kernel {name!r}", REBUILD)
        return self._data[entry.offset : entry.offset + entry.nbytes]


def write_code(kernels: Mapping[str, tuple[CompiledKernel, bytes]]) -> bytes:
    """Encodes an archive; its bytes do not depend on the order of the kernels.

    Args:
        kernels: name → launch and cubin.

    Raises:
        ValueError: no reader would accept the archive.
    """
    cubins = {name: cubin for name, (_, cubin) in sorted(kernels.items())}
    launches = {name: launch for name, (launch, _) in kernels.items()}
    reserved = 0
    while True:  # the index holds offsets in digits, so a longer index may have longer offsets
        index = _encode(_placed(launches, {name: len(cubin) for name, cubin in cubins.items()}, reserved))
        if len(index) <= reserved:
            break
        reserved = padded(8 + len(index)) - 8
    parts = [reserved.to_bytes(8, "little"), index.ljust(reserved)]
    parts += [cubin.ljust(padded(len(cubin)), b"\0") for cubin in cubins.values()]
    data = b"".join(parts)
    _read(memoryview(data))
    return data


def read_code(data: memoryview, section: str) -> CodeArchive:
    """Decodes an archive, whose cubins stay where they are.

    Args:
        data: bytes of the section.
        section: name of the section, for errors.

    Raises:
        CorruptEngineError: the bytes are not those of an archive.
    """
    try:
        return _read(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptEngineError(f"section {section} is damaged", printable(str(error)[:300]), REBUILD) from error


def _read(data: memoryview) -> CodeArchive:
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes")
    reserved = int.from_bytes(data[:8], "little")
    if reserved > len(data) - 8:
        raise ValueError(f"its index should take {reserved} bytes, it has {len(data)}")
    index = bytes(data[8 : 8 + reserved]).rstrip(b" ")
    entries = _INDEX.decode(index)
    if any(not _NAME.fullmatch(name) for name in entries):
        raise ValueError("a kernel's name is not printable ASCII of 1 to 255 characters")
    expected = _placed(entries, {name: entry.nbytes for name, entry in entries.items()}, reserved)
    if _encode(expected) != index or reserved != padded(8 + len(index)) - 8:
        raise ValueError("its index does not match its kernels")
    end = 8 + reserved
    for name, entry in sorted(entries.items()):
        end = entry.offset + padded(entry.nbytes)
        if end > len(data):
            raise ValueError(f"kernel {name!r} ends at {end}, the section at {len(data)}")
        if any(data[entry.offset + entry.nbytes : end]):
            raise ValueError(f"kernel {name!r} is not followed by zeros")
    if end != len(data):
        raise ValueError(f"its kernels end at {end}, the section at {len(data)}")
    return CodeArchive(data, entries)


def _placed(launches: Mapping[str, CompiledKernel], nbytes: Mapping[str, int], reserved: int) -> dict[str, _Entry]:
    """Places one kernel after another, in the order of their names."""
    end, entries = 8 + reserved, {}
    for name, launch in sorted(launches.items()):
        fields = {field: getattr(launch, field) for field in CompiledKernel.__struct_fields__}
        entries[name] = _Entry(offset=end, nbytes=nbytes[name], **fields)
        end += padded(nbytes[name])
    return entries


def _encode(entries: Mapping[str, _Entry]) -> bytes:
    return msgspec.json.encode(entries, order="sorted")
