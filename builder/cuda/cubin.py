"""Reads the resources of a kernel from its cubin: an ELF file with notes of NVIDIA's.

The notes (section .nv.info) are not documented; tests compare them with the assembler's report.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SYMTAB = 2  # type of a section
_SIZED = 4  # form of a note with a value, whose length is given
_REGISTERS, _STACK = 0x2F, 0x12  # kinds of notes, each with (index of a symbol, number)
_RESERVED_SHARED = 1024  # bytes of a block that the system keeps from sm_90 on, counted in the section


class Resources(NamedTuple):
    """Resources of a kernel."""

    registers: int  # registers of a thread
    local_bytes: int  # local memory of a thread, in bytes
    static_shared_bytes: int  # static shared memory of a block, in bytes


class _Section(NamedTuple):
    """A section header of an ELF file, field by field."""

    name: int  # offset in the table of names
    type: int  # type of the section
    flags: int  # flags
    address: int  # address in memory
    offset: int  # offset in the file, in bytes
    size: int  # size, in bytes
    link: int  # index of a related section
    info: int  # more information
    align: int  # alignment, in bytes
    entry_size: int  # size of an entry, in bytes


def resources(cubin: bytes, symbol: str) -> Resources:
    """Reads the resources of one kernel.

    Args:
        cubin: the cubin.
        symbol: name of the kernel.

    Raises:
        ValueError: this is not a cubin, or it has no such kernel.
    """
    try:
        return _resources(cubin, symbol)
    except (struct.error, LookupError, StopIteration) as error:
        raise ValueError(f"the cubin cannot be read: {error!r}") from error


def _resources(cubin: bytes, symbol: str) -> Resources:
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is not a cubin")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [_Section(*struct.unpack_from("<IIQQQQIIQQ", cubin, start + 64 * index)) for index in range(count)]
    named = {_text(cubin, sections[names], section.name): section for section in sections}
    (table,) = (section for section in sections if section.type == _SYMTAB)
    index = next(
        number
        for number, position in enumerate(range(table.offset, table.offset + table.size, 24))
        if _text(cubin, sections[table.link], *struct.unpack_from("<I", cubin, position)) == symbol
    )
    numbers = {kind: number for kind, owner, number in _notes(cubin, named[".nv.info"]) if owner == index}
    shared = named.get(f".nv.shared.{symbol}")
    reserved = _RESERVED_SHARED if ".nv.shared.reserved.0" in named else 0
    return Resources(numbers[_REGISTERS], numbers[_STACK], max(shared.size - reserved, 0) if shared else 0)


def _notes(cubin: bytes, section: _Section) -> Iterator[tuple[int, int, int]]:
    """Yields (kind, index of a symbol, number) of each note that has these."""
    position, end = section.offset, section.offset + section.size
    while position < end:
        form, kind, nbytes = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if form == _SIZED:
            if nbytes == 8:
                yield kind, *struct.unpack_from("<II", cubin, position)
            position += nbytes


def _text(cubin: bytes, strings: _Section, at: int) -> str:
    start = strings.offset + at
    return cubin[start : cubin.index(b"\0", start)].decode()
