"""Content of a manifest: layouts and their sizes, names, and the record of the build."""

import os
from pathlib import Path

import msgspec
import pytest

from enginewright.engine_file import EngineWriter
from enginewright.errors import EngineError
from enginewright.manifest import packed_bytes
from tests.helpers.small_engine_file import ABOUT, replaced


@pytest.mark.parametrize(
    ("dtype", "shape", "layout", "nbytes"),
    [
        ("f32", (7,), "plain", 28),
        ("bf16", (3, 7), "plain", 42),
        ("i32", (1,), "plain", 4),
        ("bf16", (1, 1), "r16", 16 * 64 * 2),
        ("i8", (17, 65), "r16", 2 * 16 * 128),
        ("bf16", (34, 64), "r16_pairs", 4 * 16 * 64 * 2),
        ("i8", (2, 1), "r16_pairs", 2 * 16 * 64),
        ("u4", (17, 65), "r16", 2 * 16 * 64),
        ("e2m1", (17, 65), "r16", 2 * 16 * 64),
        ("bf16", (17, 5), "r16_columns", 2 * 16 * 5 * 2),
        ("i8", (34, 5), "r16_columns_pairs", 4 * 16 * 5),
    ],
)
def test_bytes_of_layouts(dtype: str, shape: tuple[int, ...], layout: str, nbytes: int) -> None:
    assert packed_bytes(dtype, shape, layout) == nbytes


@pytest.mark.parametrize(
    ("dtype", "shape", "layout"),
    [
        ("f64", (7,), "plain"),
        ("f32", (7, 7), "r16"),
        ("bf16", (7,), "r16"),
        ("bf16", (7, 7), "r32"),
        ("u4", (7, 64), "plain"),
        ("e2m1", (7, 64), "plain"),
        ("u4", (7, 64), "r16_columns"),
        ("e4m3", (7, 7), "r16_columns"),
        ("bf16", (7, 7), "r16_columns_pairs"),
        ("bf16", (7,), "r16_columns"),
        ("bf16", (7, 7), "r16_pairs"),
        ("bf16", (), "plain"),
        ("bf16", (1, 2, 3), "plain"),
        ("bf16", (0, 7), "plain"),
        ("bf16", (-1, -7), "plain"),
        ("bf16", (2**60, 2**60), "plain"),
    ],
)
def test_impossible_layouts(dtype: str, shape: tuple[int, ...], layout: str) -> None:
    with pytest.raises(ValueError):
        packed_bytes(dtype, shape, layout)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"name": "a\nb"},
        {"name": "\ud800"},
        {"recipe": {"alpha": 0.5}},
        {"recipe": {"seed": 2**64}},
        {"recipe": {"of": object()}},
        {"sources": {"/home/someone/config.json": "0" * 64}},
        {"sources": {"../config.json": "0" * 64}},
        {"sources": {"config.json": "0" * 63}},
        {"sources": {"config.json": "0" * 64 + "\n"}},
        {"limits": msgspec.structs.replace(ABOUT.limits, max_seq_len=0)},
        {"targets": ("c\0pu",)},
    ],
)
def test_a_manifest_that_nobody_could_read_is_not_written(fields: dict[str, object], tmp_path: Path) -> None:
    with (
        pytest.raises(EngineError, match=r"manifest of .* cannot be written"),
        EngineWriter(tmp_path / "x.engine", 1) as writer,
    ):
        writer.commit(replaced(**fields))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("", {}),
        ("__metadata__", {}),
        ('quo"te', {}),
        ("näme", {}),
        ("x" * 256, {}),
        ("twice", {}),
        ("weights/x", {}),
        ("weights/x", {"dtype": "i8", "shape": (5,)}),
        ("weights/x", {"dtype": "i8", "shape": (6,), "layout": "plain"}),
        ("weights/x", {"dtype": "i8", "shape": (5,), "layout": "r16"}),
    ],
)
def test_a_section_that_nobody_could_read_is_not_written(name: str, form: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="section"), EngineWriter(tmp_path / "x.engine", 1) as writer:
        writer.add("twice", b"")
        writer.add(name, b"12345", **form)  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == []
