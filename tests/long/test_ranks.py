"""Every family and method on several ranks, at sizes that divide into nothing."""

from pathlib import Path

import pytest

from enginewright.quant_methods import QUANT_METHODS
from tests.helpers.tiny import FAMILIES, HYBRIDS
from tests.ranks.test_bits import CUT, built, check


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_families(family: str, tmp_path: Path) -> None:
    path = built(tmp_path / "tiny.engine", family, {})
    check(path, 2, 4)
    check(path, 1, 2, stages=2)
    check(path, 1, stages=4)


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("method", ["w8a8", "int4-rtn"])
def test_blocks_of_codes(name: str, method: str, tmp_path: Path) -> None:
    family, changes, _ = CUT[name]
    check(built(tmp_path / "tiny.engine", family, changes, method), 2, 4)


@pytest.mark.parametrize("method", [method for method in QUANT_METHODS if method != "auto"])
def test_methods(method: str, tmp_path: Path) -> None:
    family, changes, _ = CUT["norms of heads"]
    check(built(tmp_path / "tiny.engine", family, changes, method), 2, 4)
