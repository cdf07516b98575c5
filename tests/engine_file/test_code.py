"""Archives of machine code: written and read back, whatever bytes come."""

import json
from random import Random

import pytest

from enginewright.code import CodeArchive, CompiledKernel, read_code, write_code
from enginewright.errors import CorruptEngineError
from tests.helpers.header_fuzz import damaged

KERNELS = {
    "add_rms_norm@1<576, 1, 32>": (CompiledKernel("_ZN12enginewright3addE"), b"\x7fELF" + bytes(range(97))),
    "gemm@1": (CompiledKernel("gemm", shared_bytes=99_328, num_warps=8, scratch_bytes=384), b"x" * 64),
    "empty": (CompiledKernel("none"), b""),
}


def read(data: bytes) -> CodeArchive:
    return read_code(memoryview(data), "code/sm_80")


def contents(data: bytes) -> dict[str, tuple[CompiledKernel, bytes]]:
    archive = read(data)
    fields = CompiledKernel.__struct_fields__
    return {
        name: (CompiledKernel(*(getattr(launch, field) for field in fields)), bytes(archive.cubin(name)))
        for name, launch in archive.launches.items()
    }


@pytest.mark.parametrize(
    "kernels", [KERNELS, {}, {f"k{n}": (CompiledKernel("s" * n), b"c" * n * 37) for n in range(1, 90)}]
)
def test_what_is_written_is_read(kernels: dict[str, tuple[CompiledKernel, bytes]]) -> None:
    data = write_code(kernels)
    assert contents(data) == kernels
    assert len(data) % 64 == 0
    assert write_code(dict(reversed(kernels.items()))) == data


def test_the_form_is_the_documents() -> None:
    """Read without our reader: u64 N, JSON, cubins at multiples of 64."""
    data = write_code(KERNELS)
    size = int.from_bytes(data[:8], "little")
    index = json.loads(data[8 : 8 + size])
    assert (8 + size) % 64 == 0
    assert list(index) == sorted(KERNELS)
    for name, entry in index.items():
        assert entry["offset"] % 64 == 0
        assert data[entry["offset"] : entry["offset"] + entry["nbytes"]] == KERNELS[name][1]
    assert index["gemm@1"] == {
        "nbytes": 64,
        "num_warps": 8,
        "offset": index["gemm@1"]["offset"],
        "scratch_bytes": 384,
        "shared_bytes": 99_328,
        "symbol": "gemm",
    }


def test_a_kernel_that_is_not_there() -> None:
    with pytest.raises(CorruptEngineError, match="no kernel 'other'"):
        read(write_code(KERNELS)).cubin("other")


@pytest.mark.parametrize("name", ["", "a" * 256, 'a"b', "tab\t", "ü"])
def test_names_that_no_reader_accepts_are_not_written(name: str) -> None:
    with pytest.raises(ValueError):
        write_code({name: (CompiledKernel("s"), b"")})


def test_every_cut_and_every_changed_bit_is_found_or_harmless() -> None:
    """Changes of the index and of padding are refused; changed cubins are read, and are found by the section's hash."""
    data = write_code(KERNELS)
    for length in range(len(data)):
        with pytest.raises(CorruptEngineError):
            read(data[:length])
    with pytest.raises(CorruptEngineError):
        read(data + bytes(64))
    for place in range(len(data)):
        for bit in range(8):
            changed = data[:place] + bytes((data[place] ^ (1 << bit),)) + data[place + 1 :]
            try:
                found = contents(changed)
            except CorruptEngineError:
                continue
            assert write_code(found) == changed


def test_hostile_indexes_are_refused() -> None:
    data = write_code(KERNELS)
    start = 8 + int.from_bytes(data[:8], "little")
    index, random = data[8:start].rstrip(b" "), Random(6)
    refused = 0
    for _ in range(5000):
        text = damaged(index, random)
        reserved = -(-(8 + len(text)) // 64) * 64 - 8
        changed = reserved.to_bytes(8, "little") + text.ljust(reserved) + data[start:]
        try:
            found = contents(changed)
        except CorruptEngineError:
            refused += 1
            continue
        assert write_code(found) == changed
    assert 4000 < refused < 5000


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 2**64 - 8, 1 << 40])
def test_sizes_beyond_the_section(size: int) -> None:
    with pytest.raises(CorruptEngineError, match="section code/sm_80 is damaged"):
        read(size.to_bytes(8, "little") + bytes(120))
