"""Archives of machine code: written and read back, whatever bytes come, and which of them runs on a GPU."""

import json
from random import Random

import pytest

from enginewright.code import CodeArchive, Launch, choose_code, read_code, write_code
from enginewright.errors import CorruptEngineError, NoCodeForMachineError
from tests.header_fuzz import damaged

KERNELS = {
    "add_rms_norm@1<576, 1, 32>": (Launch("_ZN12enginewright3addE"), b"\x7fELF" + bytes(range(97))),
    "gemm@1": (Launch("gemm", shared_bytes=99_328, num_warps=8, scratch_bytes=384), b"x" * 64),
    "empty": (Launch("none"), b""),
}


def read(data: bytes) -> CodeArchive:
    return read_code(memoryview(data), "code/sm_80")


def contents(data: bytes) -> dict[str, tuple[Launch, bytes]]:
    archive = read(data)
    fields = Launch.__struct_fields__
    return {
        name: (Launch(*(getattr(launch, field) for field in fields)), bytes(archive.cubin(name)))
        for name, launch in archive.launches.items()
    }


@pytest.mark.parametrize("kernels", [KERNELS, {}, {f"k{n}": (Launch("s" * n), b"c" * n * 37) for n in range(1, 90)}])
def test_what_is_written_is_read(kernels: dict[str, tuple[Launch, bytes]]) -> None:
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
        write_code({name: (Launch("s"), b"")})


def test_every_cut_and_every_changed_bit_is_found_or_harmless() -> None:
    """What is read after a change of the index or of the zeros is refused; cubins have the section's hash."""
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


ALL = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120", "ptx")


@pytest.mark.parametrize(
    ("capability", "names", "expected"),
    [
        ((8, 0), ALL, "sm_80"),
        ((8, 6), ALL, "sm_86"),
        ((8, 7), ALL, "sm_86"),
        ((8, 9), ALL, "sm_89"),
        ((8, 9), ("sm_80", "sm_90a"), "sm_80"),
        ((9, 0), ALL, "sm_90a"),
        ((9, 0), ("sm_90", "sm_90a"), "sm_90a"),
        ((9, 0), ("sm_89", "sm_90"), "sm_90"),
        ((9, 0), ("sm_89", "ptx"), "ptx"),
        ((10, 0), ALL, "sm_100a"),
        ((10, 3), ALL, "ptx"),
        ((12, 0), ALL, "sm_120"),
        ((12, 1), ALL, "sm_120"),
        ((13, 0), ALL, "ptx"),
    ],
)
def test_code_for_a_gpu(capability: tuple[int, int], names: tuple[str, ...], expected: str) -> None:
    assert choose_code(capability, names) == expected
    assert choose_code(capability, names[::-1]) == expected


@pytest.mark.parametrize(
    ("capability", "names", "fix"),
    [
        ((8, 0), ("sm_86", "sm_90a"), "--target cuda:sm_80."),
        ((10, 3), ("sm_100a",), "There are kernels for sm_80, sm_86"),
        ((9, 0), ("sm_80", "sm_89", "sm_100a", "sm_9", "nonsense"), "--target cuda:sm_90a."),
        ((7, 5), ALL, "There are kernels for sm_80, sm_86"),
        ((12, 1), (), "--target cuda:sm_120."),
    ],
)
def test_a_gpu_without_code(capability: tuple[int, int], names: tuple[str, ...], fix: str) -> None:
    with pytest.raises(NoCodeForMachineError) as caught:
        choose_code(capability, names, "m.engine")
    text = str(caught.value)
    assert caught.value.exit_code == 6
    assert "m.engine has no code for this GPU" in text and ".".join(map(str, capability)) in text
    assert all(name in text for name in names)
    assert fix in text
