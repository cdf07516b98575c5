"""The engine file: what is written is read, by us and by safetensors; what is damaged is named."""

import hashlib
import json
import os
import re
import runpy
import struct
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from enginewright.engine_file import EngineFile, EngineWriter
from enginewright.engine_header import MAX_HEADER_BYTES, header_end, parse_header
from enginewright.errors import CorruptEngineError, EngineError, UsageError
from enginewright.manifest import About, Manifest
from tests.helpers.header_fuzz import mutants, read_all, signed
from tests.helpers.small_engine_file import (
    ABOUT,
    PLAN,
    add_content,
    header_text,
    pattern,
    replaced,
    with_header,
    write_engine,
)

FUZZ_HEADERS = 50_000
FUZZ_TRUNCATIONS = 500


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_engine(tmp_path / "small.engine")
    return tmp_path / "small.engine"


def opening_fails(data: bytes, folder: Path) -> str:
    """The error that opening a file of these bytes raises."""
    path = folder / "damaged.engine"
    path.write_bytes(data)
    with pytest.raises(CorruptEngineError) as error:
        EngineFile.open(path)
    return str(error.value)


def test_what_is_written_is_read(path: Path) -> None:
    with EngineFile.open(path) as engine:
        assert engine.verify_sections() == []
        assert engine.read_section("plan/cpu") == engine.section("plan/cpu") == PLAN
        assert engine.section("weights/gate_up") == pattern(4 * 16 * 64)
        assert engine.read_section("chat_template") == b""
        form = engine.sections["weights/embed"]
        assert (form.dtype, form.shape, form.layout, form.nbytes) == ("bf16", (37, 65), "r16", 3 * 16 * 128 * 2)
        assert form.sha256 == hashlib.sha256(pattern(form.nbytes)).hexdigest()
        assert not form.evidence and engine.sections["goldens"].evidence
        assert {name: getattr(engine.manifest, name) for name in About.__struct_fields__} == msgspec.structs.asdict(
            ABOUT
        )
        assert engine.file_bytes == path.stat().st_size
        assert all(offset % 64 == 0 for offset in engine.offsets.values())
        assert engine.section("plan/cpu").readonly


def test_safetensors_opens_it(path: Path) -> None:
    with EngineFile.open(path) as engine, safe_open(path, framework="np") as tensors:
        assert set(tensors.keys()) == set(engine.sections)
        assert tensors.metadata()["format"] == "enginewright"
        for name, form in engine.sections.items():
            data = tensors.get_tensor(name).tobytes()
            assert data == engine.read_section(name).ljust(-(-form.nbytes // 64) * 64, b"\0")


def test_a_section_outlives_the_file_object(path: Path) -> None:
    with EngineFile.open(path) as engine:
        view = engine.section("plan/cpu")
    path.unlink()
    assert view == PLAN
    with pytest.raises(EngineError):
        engine.read_section("plan/cpu")


def test_same_calls_same_bytes(tmp_path: Path, path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "another-name.engine"
    write_engine(other)
    assert other.read_bytes() == path.read_bytes()


def test_the_content_hash_is_of_the_content(tmp_path: Path, path: Path) -> None:
    def built(evidence: bytes, about: About = ABOUT, reverse: bool = False) -> Manifest:
        with EngineWriter(tmp_path / "other.engine", expected_sections=2) as writer:
            for name in ("b", "a") if reverse else ("a", "b"):
                writer.add(name, name.encode())
            writer.add("goldens", evidence, evidence=True)
            return writer.commit(about)

    first = built(b"1")
    assert built(b"2").content_hash == first.content_hash != write_engine(path).content_hash
    assert built(b"2").to_json() != first.to_json()
    assert built(b"1", reverse=True) == first
    assert built(b"1", replaced(recipe={})).content_hash != first.content_hash
    fields = json.loads(first.to_json())
    del fields["content_hash"], fields["sections"]["goldens"]
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert hashlib.sha256(text.encode()).hexdigest() == first.content_hash


def test_the_document_tells_how_to_read_it(path: Path) -> None:
    """The reader in docs/engine-file.md, as it stands there, reads an engine and finds a flipped byte."""
    document = Path(__file__).resolve().parents[2] / "docs/engine-file.md"
    script = path.with_name("reader.py")
    script.write_text(document.read_text().split("```python\n")[1].split("```")[0])
    read = runpy.run_path(str(script))["read"]
    with EngineFile.open(path) as engine:
        sections = read(path)
        assert sections == {name: engine.read_section(name) for name in engine.sections}
        start = engine.offsets["weights/embed"]
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError, match="weights/embed"):
        read(path)


def test_the_temporary_file_is_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "gated.engine"
    with EngineWriter(path, expected_sections=8) as writer:
        add_content(writer)
        writer.write_header(ABOUT)
        with EngineFile.open(writer.temporary_path) as engine:
            weights = engine.section("weights/embed")
            assert engine.verify_sections() == [] and "goldens" not in engine.sections
            writer.add("goldens", b"from " + bytes(weights[:3]), evidence=True)
            assert not path.exists()
            writer.commit(ABOUT)
        assert weights[:3] == pattern(3)
    with EngineFile.open(path) as engine:
        assert engine.read_section("goldens") == b"from " + pattern(3)
    assert os.listdir(tmp_path) == ["gated.engine"]


def test_every_flipped_byte_is_found(path: Path) -> None:
    """Opening finds a flipped byte in the header, verifying one in weights, both any other; padding is no exception."""
    whole = path.read_bytes()
    with EngineFile.open(path) as engine:
        starts = sorted((offset, name) for name, offset in engine.offsets.items() if engine.sections[name].nbytes)
    with path.open("r+b", buffering=0) as file:
        text_end = 8 + len(header_text(whole))
        places = [
            *range(0, text_end, 5),
            text_end,
            starts[0][0] - 1,
            *range(starts[0][0], len(whole), 37),
            len(whole) - 1,
        ]
        for place in places:
            os.pwrite(file.fileno(), bytes((whole[place] ^ 0x11,)), place)
            damaged = max((start for start in starts if start[0] <= place), default=(0, ""))[1]
            if not damaged.startswith("weights/"):
                with pytest.raises(CorruptEngineError, match=damaged or "header|cut short|not an engine"):
                    EngineFile.open(path)
            else:
                EngineFile.open(path).close()
            if damaged:
                with EngineFile.open(path, check_sections=False) as engine:
                    assert engine.verify_sections() == [damaged]
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    EngineFile.open(path).close()


def test_a_damaged_section_cannot_be_read(path: Path) -> None:
    with EngineFile.open(path) as engine, path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"?", engine.offsets["plan/cpu"])
        with pytest.raises(CorruptEngineError, match="plan/cpu"):
            engine.read_section("plan/cpu")
        with pytest.raises(CorruptEngineError, match="no section 'plan/gpu'"):
            engine.section("plan/gpu")
        os.truncate(path, engine.offsets["plan/cpu"] + 3)
        with pytest.raises(CorruptEngineError, match="plan/cpu"):
            engine.read_section("plan/cpu")
        assert "plan/cpu" in engine.verify_sections()


def test_verifying_tells_how_far_it_is(path: Path) -> None:
    hashed: list[int] = []
    with EngineFile.open(path) as engine:
        engine.verify_sections(progress=hashed.append)
        assert sum(hashed) == sum(form.nbytes for form in engine.sections.values())
        assert engine.verify_sections(["plan/cpu"]) == []


def test_cut_anywhere(path: Path) -> None:
    whole = path.stat().st_size
    for index in range(FUZZ_TRUNCATIONS):  # from the end on, so that one file will do
        os.truncate(path, whole - 1 - index * whole // FUZZ_TRUNCATIONS)
        with pytest.raises(CorruptEngineError):
            EngineFile.open(path)
    os.truncate(path, whole)
    with pytest.raises(CorruptEngineError):
        EngineFile.open(path)  # now as long as it was, and full of zeros


def test_damaged_headers(tmp_path: Path) -> None:
    said = read_all(mutants(tmp_path, seed=20, count=FUZZ_HEADERS))
    assert said.total() == FUZZ_HEADERS
    assert said[""] > 100 and len(said) > 25, "the damage no longer reaches all checks"


def test_deep_nesting_and_huge_numbers(path: Path) -> None:
    for bomb in (b"[" * 10**6, b'{"a":' * 10**6, b'{"a":' + b"[" * 10**6 + b"]" * 10**6 + b"}", b"9" * 10**6):
        for text in (bomb, b'{"__metadata__":' + bomb + b"}", b'{"weights/a":{"dtype":"U8","shape":[' + bomb + b"]}}"):
            with pytest.raises(CorruptEngineError) as error:
                parse_header(struct.pack("<Q", len(text)) + text, 8 + len(text))
            assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut short: it has 0 bytes"),
        (b"1234567", "cut short: it has 7 bytes"),
        (struct.pack("<Q", 1) + b"", "cut short, damaged, or not an engine"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "header should take 18446744073709551615 bytes"),
        (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "cut short, damaged"),
        (struct.pack("<Q", 2) + b"{}", "holds no manifest"),
        (struct.pack("<Q", 0), "header of .* is damaged"),
        (struct.pack("<Q", 4) + b"\x1b[2J", "header of .* is damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "GGUF checkpoint.*\n.*engine build"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer.*\n.*git lfs pull"),
        (b"PK\x03\x04" + bytes(60), "zip archive"),
    ],
)
def test_what_is_no_engine_is_told_so(data: bytes, message: str, tmp_path: Path) -> None:
    said = opening_fails(data, tmp_path)
    assert re.search(message, said) and "\x1b" not in said


def test_a_checkpoint_is_told_to_be_built(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(3, 5)}, tmp_path / "model.safetensors", {"format": "pt"})
    said = opening_fails((tmp_path / "model.safetensors").read_bytes(), tmp_path)
    assert "a checkpoint (safetensors), not an engine" in said and "engine build" in said
    with pytest.raises(CorruptEngineError, match=r"a folder, not an engine[^$]*engine build"):
        EngineFile.open(tmp_path)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CorruptEngineError, match="not a file"):
        EngineFile.open(tmp_path / "fifo")
    for name, exit_code in (("missing", 2), ("fifo/inside", 2), ("nul\0", 1), ("x" * 300, 1)):
        with pytest.raises(EngineError, match="cannot be opened") as error:
            EngineFile.open(tmp_path / name)
        assert error.value.exit_code == exit_code


def test_a_newer_format_wants_an_upgrade(path: Path) -> None:
    """The version is read first, whatever else a newer release changes."""
    data = path.read_bytes()
    text = header_text(data).replace(rb"\"format_version\":2", rb"\"format_version\":3,\"new\":[]")
    path.write_bytes(with_header(text, data))
    with pytest.raises(EngineError, match=r"newer release.* format version 3[^$]*[Uu]pgrade") as error:
        EngineFile.open(path)
    assert error.value.exit_code == 1


def test_an_older_format_wants_another_build(path: Path) -> None:
    data = path.read_bytes()
    text = header_text(data).replace(rb"\"format_version\":2", rb"\"format_version\":1,\"old\":[]")
    path.write_bytes(with_header(text, data))
    with pytest.raises(EngineError, match=rf"{path}.* older release.* format version 1[^$]*Build it again") as error:
        EngineFile.open(path)
    assert error.value.exit_code == 1


def test_messages_of_hostile_headers_are_short_and_quiet(path: Path) -> None:
    data = path.read_bytes()
    text = header_text(data)
    for name in (rb"\u001b[2J", b"x" * 5000):
        said = opening_fails(with_header(text.replace(b'"dtype"', b'"%s"' % name, 1), data), path.parent)
        assert "unknown field" in said and len(said) < 600 and "\x1b" not in said


def test_lengths_are_checked_before_anything_is_read() -> None:
    with pytest.raises(CorruptEngineError, match="cut short, damaged, or not an engine"):
        header_end(struct.pack("<Q", MAX_HEADER_BYTES + 1), 2**50)
    assert header_end(struct.pack("<Q", MAX_HEADER_BYTES), 2**50) == 8 + MAX_HEADER_BYTES


def test_a_header_read_in_part(path: Path) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    assert parse_header(data[:end], len(data)) == parse_header(data, len(data))
    with pytest.raises(CorruptEngineError, match="incomplete"):
        parse_header(data[: end - 1], len(data))  # of which only a space is missing


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"int8-wo"', b'"int8-w"', "content hash"),
        (b'"nbytes":8,', b'"nbytes": 8,', "canonical"),
        (b'"evidence":true,', b'"dtype":null,"evidence":true,', "canonical"),
        (b'"nbytes":8,', b'"nbytes":8,"nbytes":8,', "canonical"),
        (b'"nbytes":8,', b'"nbytes":8.0,', "Expected `int`"),
        (b'"model_type":', b'"model":"","model_type":', "unknown field"),
        (b'"format_version":2', b'"format_version":0', "Expected `int` >= 2"),
        (b'"name":', b'"Name":', "missing required field `name`|unknown field `Name`"),
    ],
)
def test_a_manifest_that_was_hashed_again(old: bytes, new: bytes, message: str, path: Path) -> None:
    data = path.read_bytes()
    manifest = json.loads(header_text(data))["__metadata__"]["enginewright"].encode()
    assert old in manifest
    text = header_text(data).replace(signed(manifest), signed(manifest.replace(old, new)))
    assert re.search(message, opening_fails(with_header(text, data), path.parent))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'{"__metadata__"', b'{ "__metadata__"'),
        (b'"dtype":"U8"', b'"dtype":"I8"'),
        (b'"dtype":"U8"', b'"dtype":"\\u0055\\u0038"'),
        (b'"dtype":"U8"', b'"dtype":"U8","dtype":"U8"'),
        (b'"chat_template":', b'"plan/cpu":{"data_offsets":[0,64],"dtype":"U8","shape":[64]},"chat_template":'),
        (b'"chat_template":', b'"chat-template":'),
        (b'"shape":[12288]', b'"shape":[12288,1]'),
        (b'"shape":[12288]', b'"shape":[12224]'),
        (b'"data_offsets":[0,12288]', b'"data_offsets":[64,12352]'),
        (b'"data_offsets":[0,12288]', b'"data_offsets":[0,12224]'),
        (b'"data_offsets":[0,12288]', b'"data_offsets":[-12288,0]'),
        (b'"data_offsets":[0,12288]', b'"data_offsets":[0,18446744073709563904]'),
        (b'"format":"enginewright"', b'"format":"enginewright","more":""'),
        (rb"\"nbytes\":12288", rb"\"nbytes\":12287"),
        (rb"\"quant\"", rb"\"Quant\""),
    ],
)
def test_a_header_that_is_not_exactly_ours(old: bytes, new: bytes, path: Path) -> None:
    data = path.read_bytes()
    text = header_text(data)
    assert old in text
    said = opening_fails(with_header(text.replace(old, new, 1), data), path.parent)
    assert "header" in said and "damaged" in said


def test_bytes_after_the_end_and_other_padding(path: Path) -> None:
    data = path.read_bytes()
    assert "the file has" in opening_fails(data + bytes(64), path.parent)
    text = header_text(data)
    assert "canonical" in opening_fails(with_header(text + b"\n", data), path.parent)
    start = 8 + int.from_bytes(data[:8], "little")
    shifted = struct.pack("<Q", len(text)) + text + data[start:]
    assert len(text) % 64 != 56 and "multiple of 64" in opening_fails(shifted, path.parent)


def test_the_header_has_room_for_what_was_announced(tmp_path: Path) -> None:
    """The expected number of sections with long names and a dozen more fit; far more are refused by name."""
    for expected, written in ((300, 312), (1, 100)):
        path = tmp_path / f"{expected}.engine"
        with EngineWriter(path, expected) as writer:
            for index in range(written):
                name = f"weights/{index:0>100}"
                writer.add(name, b"1234", dtype="f32", shape=(1,), layout="plain")
            if written > 2 * expected:
                with pytest.raises(EngineError, match=r"100 sections take .* reserved"):
                    writer.commit(ABOUT)
            else:
                writer.commit(ABOUT)
                EngineFile.open(path).close()
    assert os.listdir(tmp_path) == ["300.engine"]


def test_writing_over_a_folder_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="folder"), EngineWriter(tmp_path / "folder", 1):
        pass
    with pytest.raises(EngineError, match="No such file"), EngineWriter(tmp_path / "missing" / "x.engine", 1):
        pass
    writer = EngineWriter(tmp_path / "x.engine", 1)
    with pytest.raises(EngineError, match="writer is closed"):
        writer.add("a", b"")
