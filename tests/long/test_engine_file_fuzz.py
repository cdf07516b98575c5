"""The reader of engine files against a million damaged headers and ten thousand cut files."""

import os
from pathlib import Path

import pytest

from enginewright.engine_file import EngineFile
from enginewright.errors import CorruptEngineError
from tests.helpers.header_fuzz import mutants, read_all
from tests.helpers.small_engine_file import write_engine

HEADERS = 1_000_000
TRUNCATIONS = 10_000


def test_a_million_damaged_headers(tmp_path: Path) -> None:
    said = read_all(mutants(tmp_path, seed=1, count=HEADERS))
    assert said.total() == HEADERS
    assert said[""] > 1000 and len(said) > 30, "the damage no longer reaches all checks"


def test_ten_thousand_truncations(tmp_path: Path) -> None:
    path = tmp_path / "small.engine"
    write_engine(path)
    whole = path.stat().st_size
    assert whole > TRUNCATIONS
    for index in range(TRUNCATIONS):  # from the end on, so that one file will do
        os.truncate(path, whole - 1 - index * whole // TRUNCATIONS)
        with pytest.raises(CorruptEngineError):
            EngineFile.open(path)
