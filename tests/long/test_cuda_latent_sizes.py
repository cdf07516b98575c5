"""Latent attention on CUDA, in emulation, at the sizes that models have."""

from dataclasses import replace

import pytest

from tests.cuda.kernels.test_latent import WIDE, Latent, check_bits, check_heads
from tests.emulator.kernels import SCHEDULES
from tests.helpers.cuda_attention import compiled

FLASH, DEEPSEEK = Latent(20, 512, 64), Latent(128, 512, 64, "bf16")
OTHERS = [Latent(33, 512, 64), Latent(64, 256, 32)]  # heads that are no whole tiles of rows


@pytest.mark.parametrize("latent", [FLASH, DEEPSEEK, *OTHERS], ids=str)
def test_sizes_of_models(latent: Latent) -> None:
    kernels = compiled([latent])
    chunks = [latent.chunk(0, 3), latent.chunk(299, 300), latent.chunk(255, 257)]
    for schedule in SCHEDULES:
        latent.check(kernels, chunks, schedule)


@pytest.mark.parametrize(
    ("heads", "columns", "rows", "to"), [(3, 64, 48, "bf16"), (5, 192, 16, "f32"), (4, 512, 128, "f32")]
)
def test_each_head_meets_its_own_weight(heads: int, columns: int, rows: int, to: str) -> None:
    check_heads(heads, columns, rows, to)


@pytest.mark.parametrize("latent", [WIDE, FLASH], ids=str)
def test_bits_do_not_depend_on_the_batch(latent: Latent) -> None:
    check_bits(latent, compiled([latent, replace(latent, crowded=True)]))
