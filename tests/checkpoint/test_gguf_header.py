"""GGUF files that are damaged or lie: an error that names the file, at once, and without the memory they ask for."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from enginewright.builder.checkpoint import open_checkpoint
from enginewright.builder.checkpoint.gguf import header as gguf_header
from enginewright.builder.checkpoint.gguf.header import read_header
from enginewright.errors import EngineError
from tests.helpers.tiny_gguf import TinyGguf, state_of, tiny_model

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
F32 = U32.pack(0)
ALLOWED_PEAK_BYTES = 4 << 20


def text(value: str) -> bytes:
    return U64.pack(len(value)) + value.encode()


def number(key: str, value: int) -> bytes:
    """A metadata entry of type uint32."""
    return text(key) + U32.pack(4) + U32.pack(value)


def tensor(name: str, shape: list[int], offset: int, kind: bytes = F32) -> bytes:
    return text(name) + U32.pack(len(shape)) + b"".join(map(U64.pack, shape)) + kind + U64.pack(offset)


def file_of(values: list[bytes], tensors: list[bytes], data: bytes = bytes(64), version: int = 3) -> bytes:
    head = b"GGUF" + U32.pack(version) + U64.pack(len(tensors)) + U64.pack(len(values)) + b"".join(values + tensors)
    return head + bytes(-len(head) % 32) + data


def refuses(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=message) as refused:
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < ALLOWED_PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert refused.value.exit_code == 1
    assert path.name in refused.value.what


@pytest.mark.parametrize("version", [2, 3])
def test_smallest_file(tmp_path: Path, version: int) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of([number("a.b", 7)], [tensor("t", [3, 2], 0)], bytes(24), version))
    header = read_header(path)
    assert header.metadata == {"a.b": 7}
    assert header.tensors["t"].shape == (2, 3)
    assert header.tensors["t"].nbytes == 24


def test_float32_values_are_the_shortest_decimals(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(file_of([text("e") + U32.pack(6) + struct.pack("<f", 1e-5)], []))
    assert read_header(path).metadata == {"e": 1e-5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "ends within the magic"),
        (b"PK\3\4" + bytes(60), r"begins with b'PK"),
        (file_of([], [], version=1), "version is 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian"),
        (b"GGUF" + U32.pack(3) + U64.pack(1 << 63) + U64.pack(0), "declares 9223372036854775808 tensors"),
        (b"GGUF" + U32.pack(3) + U64.pack(0) + U64.pack((1 << 64) - 1), "18446744073709551615 metadata values"),
        (b"GGUF" + U32.pack(3) + U64.pack(60000) + U64.pack(60000) + bytes(100), "metadata ''"),
        (file_of([U64.pack(1 << 62) + b"key"], []), "declares 4611686018427387904 bytes"),
        (file_of([text("k") + U32.pack(8) + U64.pack((1 << 64) - 1)], []), "declares 18446744073709551615 bytes"),
        (file_of([text("k") + U32.pack(8) + U64.pack(1 << 20)], []), "ends within metadata 'k'"),
        (file_of([text("k") + U32.pack(8) + U64.pack(2) + b"\xff\xfe"], []), "metadata 'k' is not UTF-8"),
        (file_of([text("k") + U32.pack(13)], []), "unknown type 13"),
        (file_of([text("k") + U32.pack(9) + U32.pack(0) + U64.pack(1 << 60)], []), "1152921504606846976 entries"),
        (file_of([text("k") + U32.pack(9) + U32.pack(12) + U64.pack(1 << 22)], []), "ends within metadata 'k'"),
        (file_of([text("k") + U32.pack(9) + U32.pack(8) + U64.pack(1 << 22)], []), "ends within metadata 'k'"),
        (file_of([text("k") + U32.pack(9) + U32.pack(9) + U64.pack(1)], []), "array of unknown type 9"),
        (file_of([number("k", 1), number("k", 2)], []), "'k' is repeated"),
        (file_of([number("general.alignment", 0)], []), "alignment 0"),
        (file_of([number("general.alignment", 48)], []), "alignment 48"),
        (file_of([], [tensor("t", [], 0)]), "0 dimensions"),
        (file_of([], [tensor("t", [1] * 5, 0)]), "5 dimensions"),
        (file_of([], [tensor("t", [4, 0], 0)]), "'t' is empty"),
        (file_of([], [tensor("t", [4], 0, U32.pack(999))]), "unknown type 999"),
        (file_of([], [tensor("t", [33], 0, U32.pack(8))]), "rows of 33, which is not a multiple of Q8_0's 32"),
        (file_of([], [tensor("t", [1 << 32, 1 << 32], 0)]), "would end at"),  # 0 elements in 64 bits
        (file_of([], [tensor("t", [(1 << 62) + 1, 4], 0)]), "would end at"),  # 4 elements in 64 bits
        (file_of([], [tensor("t", [4], 1 << 40)]), "would end at"),
        (file_of([], [tensor("t", [4], (1 << 64) - 32)]), "would end at"),
        (file_of([], [tensor("t", [17], 0)]), "it has 128 bytes, and tensor 't' would end at 132"),
        (file_of([], [tensor("t", [4], 4)]), "'t' is misplaced"),
        (file_of([], [tensor("t", [9], 0), tensor("u", [1], 32)]), "'u' is misplaced"),
        (file_of([], [tensor("t", [1], 0), tensor("t", [1], 32)]), "'t' is repeated"),
        (file_of([], [U64.pack(2000) + bytes(2000)]), "name declares 2000 bytes"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    ],
)
def test_malformed(tmp_path: Path, content: bytes, message: str) -> None:
    refuses(tmp_path / "bad.gguf", content, message)


def test_metadata_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "HEADER_LIMIT_BYTES", 4096)
    value = text("k") + U32.pack(8) + text("x" * 5000)
    refuses(tmp_path / "bad.gguf", file_of([value], []), "declares 5000 bytes|more than 4096 bytes")
    values = [text(f"k{index}") + U32.pack(8) + text("x" * 500) for index in range(9)]
    refuses(tmp_path / "bad.gguf", file_of(values, []), "header has more than 4096 bytes")


@pytest.fixture(scope="module", params=[("llama", "llama"), ("llama", "gpt2"), ("gemma3", "llama")])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file that opens, of an architecture and a kind of tokenizer."""
    architecture, vocabulary = request.param
    model = tiny_model(architecture, num_hidden_layers=1)
    writer = TinyGguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", architecture, model.config)
    writer.add_rope_freq_base(1e6)
    if architecture == "llama":
        writer.add_tensor("rope_freqs.weight", np.ones(9, np.float32))
    if vocabulary == "llama":
        writer.add_spelled_vocabulary()
    else:
        writer.add_merged_vocabulary(
            "llama-bpe", {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, [("a", "b"), ("ab", "c")]
        )
        writer.add_bos_token_id(2)
    writer.add_state(state_of(model))
    return writer.finish().read_bytes()


def use(path: Path) -> None:
    """Reads a checkpoint as a build does, but for the hashing."""
    checkpoint = open_checkpoint(str(path))
    _ = checkpoint.tokenizer
    for name, info in checkpoint.tensors.items():
        assert checkpoint.read(name).shape == info.shape


def survives(path: Path, content: bytes) -> bool:
    """Tells if the file was usable; every other end than an EngineError fails the test."""
    path.write_bytes(content)
    try:
        use(path)
    except EngineError as error:
        assert str(error)
        return False
    return True


def test_cut_short_anywhere(tmp_path: Path, whole: bytes) -> None:
    check_cut_short(tmp_path, whole, 17)


def check_cut_short(tmp_path: Path, whole: bytes, step: int) -> None:
    """A file that ends anywhere in its header, `step` bytes apart, or in its tensors is refused."""
    path = tmp_path / "cut.gguf"
    assert survives(path, whole)
    tensors = read_header(path).tensors.values()
    header, end = (
        min(place.offset_bytes for place in tensors),
        max(place.offset_bytes + place.nbytes for place in tensors),
    )
    for length in [*range(0, header, step), *range(header, end, 4099), end - 1]:
        assert not survives(path, whole[:length]), length


def changed(random: random.Random, content: bytearray, header: int) -> None:
    at = random.randrange(header)
    value: Callable[[], int] = random.choice([lambda: random.randrange(256), lambda: 0, lambda: 255, lambda: 128])
    for offset in range(random.choice([1, 1, 4, 8])):
        content[at + offset] = value()


def test_bytes_changed_at_random(tmp_path: Path, whole: bytes) -> None:
    check_changed_bytes(tmp_path, whole, 250)


def check_changed_bytes(tmp_path: Path, whole: bytes, count: int) -> None:
    """Files with a few other bytes in their header are read or refused, and nothing else.

    Args:
        whole: a sound file.
        count: of the files that are tried.
    """
    generator, path = random.Random(5), tmp_path / "changed.gguf"
    path.write_bytes(whole)
    header = min(tensor.offset_bytes for tensor in read_header(path).tensors.values())
    used = 0
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(generator.choice([1, 1, 2, 5])):
            changed(generator, content, header)
        used += survives(path, bytes(content))
    assert 0 < used < count


def test_file_that_shrinks_after_opening(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(whole)
    checkpoint = open_checkpoint(str(path))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match=r"tiny\.gguf became shorter"):
        for name in checkpoint.tensors:
            assert torch.isfinite(checkpoint.read(name)).all()
