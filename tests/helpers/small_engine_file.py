"""An engine file of a few kilobytes, with sections of every kind and awkward sizes; nothing in it can be run."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from enginewright.engine_file import EngineWriter
from enginewright.manifest import About, Limits, Manifest

ABOUT = About(
    builder_version="0.1.0",
    name="tiny – 7 layers",
    model_type="llama",
    targets=("cpu",),
    recipe={"quant": "int8-wo", "groups": [1, -2, None, True], "smoothing": {"alpha": "0.5"}},
    sources={"config.json": "0" * 64, "shards/model-1.safetensors": "a1" * 32},
    limits=Limits(max_seq_len=2048, max_batch_size=32),
)
PLAN = b'{"steps":[]}'


def pattern(nbytes: int, start: int = 1) -> bytes:
    """Bytes that differ from offset to offset."""
    return bytes((start + 7 * index) % 251 for index in range(nbytes))


def chunks(data: bytes, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield memoryview(data)[start : start + size]


def add_content(writer: EngineWriter) -> None:
    writer.add("weights/embed", chunks(pattern(3 * 16 * 128 * 2), 1000), dtype="bf16", shape=(37, 65), layout="r16")
    writer.add("weights/gate_up", [pattern(4 * 16 * 64)], dtype="i8", shape=(34, 64), layout="r16_pairs")
    writer.add("weights/gate_up.scale", pattern(34 * 4), dtype="f32", shape=(34,), layout="plain")
    writer.add("tokenizer.json", [b'{"model":', b'{"type":"BPE"}}'])
    writer.add("chat_template", [])
    writer.add("plan/cpu", PLAN)


def write_engine(path: Path, about: About = ABOUT) -> Manifest:
    with EngineWriter(path, expected_sections=8, total_bytes=20_000) as writer:
        add_content(writer)
        writer.write_header(about)
        writer.add("goldens", b"measured", evidence=True)
        return writer.commit(about)


def header_text(data: bytes) -> bytes:
    """The JSON header of a file, without its padding."""
    return data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip(b" ")


def with_header(text: bytes, old: bytes) -> bytes:
    """The file `old` with another header in the space of its own."""
    reserved = int.from_bytes(old[:8], "little")
    assert len(text) <= reserved
    return old[:8] + text.ljust(reserved) + old[8 + reserved :]


def replaced(**fields: object) -> About:
    return msgspec.structs.replace(ABOUT, **fields)
