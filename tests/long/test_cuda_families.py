"""Engines of the families that other tests do not build, on the emulated GPU, beside their own graphs and the CPU."""

import pytest

from tests.test_cuda_engine import check_engine
from tests.test_families import ON_GPUS


@pytest.mark.parametrize(
    ("family", "quant"),
    [*((family, quant) for family in ON_GPUS for quant in ("bf16", "fp8")), ("qwen3_moe", "w8a8"), ("cohere2", "w8a8")],
)
def test_an_engine_computes_its_graph(family: str, quant: str) -> None:
    check_engine(family, quant, "bf16")
