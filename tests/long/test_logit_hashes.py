"""Engines of a real model compute the same bits in any batch, however prompts are cut, and as they did before."""

from pathlib import Path

import pytest

from enginewright import _cpu
from tests.core import test_batch_invariance as short
from tests.core.test_batch_invariance import check
from tests.helpers.breadth import others, repeated
from tests.helpers.logit_hashes import REAL, build_real

test_tiny_models = repeated(short.test_tiny_models, "name", others(short.TINY, short.SOME))


@pytest.mark.parametrize("name", REAL)
def test_a_real_model(name: str, smollm2_gguf: Path, tmp_path: Path) -> None:
    path = build_real(smollm2_gguf, name, tmp_path)
    on = [isa for isa in _cpu.isa_names() if check(f"smollm2/{name}", path, isa, cuts=(7, 255))]
    if not on:
        assert "--recipe" in REAL[name], "these weights are the same on all machines"
        pytest.skip("a machine whose calibration gives other weights than those that were recorded")
