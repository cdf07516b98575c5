"""Paged attention on CUDA, in emulation, against float64: heads, dims, windows and lengths by chance."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cuda.kernels import test_attention as short
from tests.emulator.kernels import SCHEDULES, Kernels
from tests.helpers.breadth import others
from tests.helpers.cuda_attention import Attention, compiled, part
from tests.helpers.paged_kv import KV_DTYPES, Chunk, Heads

DIMS = (24, 64, 80, 96, 128, 256)
GROUPS = (1, 3, 5, 8, 16, 20)


@pytest.mark.parametrize("attention", others(short.ATTENTIONS, short.SOME), ids=str)
def test_mixed_batches(attention: Attention) -> None:
    short.check_mixed_batch(attention, compiled([attention]))


def attentions() -> Iterator[Attention]:
    """Each dim with each group; some again by Hopper's kernel."""
    random = np.random.default_rng(1)
    for index, (dim, group) in enumerate((dim, group) for dim in DIMS for group in GROUPS):
        kv_heads = int(random.integers(1, 3))
        yield Attention(
            Heads(group * kv_heads, kv_heads, dim),
            KV_DTYPES[index % len(KV_DTYPES)],
            window=int(random.choice([0, 0, 1, 31, 128, 300])),
            softcap=float(random.choice([0.0, 5.0])),
            out=str(random.choice(["bf16", "f32"])),
            crowded=bool(random.integers(2)),
        )
    for dim, group in ((dim, group) for dim in (50, 64, 100, 128) for group in GROUPS):
        yield Attention(
            Heads(group, 1, dim),
            window=int(random.choice([0, 0, 1, 31, 128, 300])),
            softcap=float(random.choice([0.0, 5.0])),
            out=str(random.choice(["bf16", "f32"])),
            wgmma=True,
        )


def lengths(random: np.random.Generator) -> int:
    return int(random.choice([1, 31, 33, 127, 128, 129, 255, 256, 257, 300, 513, 640, random.integers(1, 900)]))


@pytest.mark.parametrize("attention", list(attentions()), ids=str)
def test_batches_by_chance(attention: Attention) -> None:
    sm = 90 if attention.wgmma else 80
    if not Kernels.are_for(sm):
        pytest.skip("wgmma is Hopper's alone, and this is another GPU")
    kernels = compiled([attention], sm)
    random = np.random.default_rng(attention.heads.head_dim * attention.heads.heads)
    for schedule in SCHEDULES:
        chunks: list[Chunk] = []
        for seed in range(int(random.integers(1, 7))):
            end = lengths(random)
            start = end - 1 if random.integers(2) else int(random.integers(max(0, end - 70), end))
            chunks.append(part(attention.heads, start, end, seed))
        attention.check(kernels, chunks, schedule)
