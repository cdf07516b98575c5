"""Paged attention on CUDA, in emulation, against float64: heads, dims, windows and lengths by chance."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from tests import test_cuda_attention as attention_tests
from tests.emulated import SCHEDULES
from tests.paged_kv import Chunk, Heads
from tests.test_cuda_attention import Attention, library_of, part

DIMS = (24, 64, 80, 96, 128, 256)
GROUPS = (1, 3, 5, 8, 16, 20)


def attentions() -> Iterator[Attention]:
    """Each dim with each group."""
    random = np.random.default_rng(1)
    for index, (dim, group) in enumerate((dim, group) for dim in DIMS for group in GROUPS):
        kv_heads = int(random.integers(1, 3))
        yield Attention(
            Heads(group * kv_heads, kv_heads, dim),
            ("bf16", "i8", "e4m3")[index % 3],
            window=int(random.choice([0, 0, 1, 31, 128, 300])),
            softcap=float(random.choice([0.0, 5.0])),
            out=str(random.choice(["bf16", "f32"])),
            crowded=bool(random.integers(2)),
        )


def lengths(random: np.random.Generator) -> int:
    return int(random.choice([1, 31, 33, 127, 128, 129, 255, 256, 257, 300, 513, 640, random.integers(1, 900)]))


@pytest.mark.parametrize("attention", list(attentions()), ids=str)
def test_batches_by_chance(attention: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tests, "library", functools.cache(lambda: library_of([attention])))
    random = np.random.default_rng(attention.heads.head_dim * attention.heads.heads)
    for schedule in SCHEDULES:
        chunks: list[Chunk] = []
        for seed in range(int(random.integers(1, 7))):
            end = lengths(random)
            start = end - 1 if random.integers(2) else int(random.integers(max(0, end - 70), end))
            chunks.append(part(attention.heads, start, end, seed))
        attention.check(chunks, schedule)
