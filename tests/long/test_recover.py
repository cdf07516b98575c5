"""Recovery after methods that choose codes from texts."""

from pathlib import Path

import pytest

from tests.passes.test_recover import check_gain


@pytest.mark.parametrize("method", ["int4-gptq", "int4-awq"])
def test_engines_come_closer_to_their_source(method: str, tmp_path: Path) -> None:
    check_gain(method, tmp_path)
