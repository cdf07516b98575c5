"""Every family, rotated as far as it can be."""

import pytest

from enginewright.errors import UsageError
from enginewright.passes.quant.rotate import ROUTERS
from tests.helpers.tiny import FAMILIES, HYBRIDS, MemoryCheckpoint
from tests.passes.test_rotate import compare


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_families(family: str) -> None:
    try:
        result, error = compare(family)
    except UsageError as refused:
        assert family == "gemma4_text" and "is not linear" in str(refused)
        return
    tied = "lm_head.weight" not in MemoryCheckpoint.tiny(family).stored
    assert result.rewrites
    assert error < (0.3 if tied or ROUTERS in result.notes else 5e-5)
