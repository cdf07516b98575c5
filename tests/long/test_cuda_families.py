"""Engines of the families that other tests do not build, on the emulated GPU, beside their own graphs and the CPU."""

import pytest

from tests.helpers.tiny import LATENT
from tests.test_cuda_engine import check_engine
from tests.test_families import ON_GPUS


@pytest.mark.parametrize(
    ("family", "quant", "kv"),
    [
        *((family, quant, "bf16") for family in (*ON_GPUS, *LATENT) for quant in ("bf16", "fp8")),
        *((family, "w8a8", "bf16") for family in ("qwen3", "qwen3_moe", "cohere2")),
        ("gemma3_text", "bf16", "int4"),
        *(("kimi_linear", quant, "bf16") for quant in ("bf16", "w8a8")),
    ],
)
def test_an_engine_computes_its_graph(family: str, quant: str, kv: str) -> None:
    check_engine(family, quant, kv)
