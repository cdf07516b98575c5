"""Sequences with queries, keys and values, and their KV laid out in pools as csrc/cpu/kernel.h says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright import _cpu

BLOCK_SIZE = 32
SPLIT = 256


@dataclass(frozen=True)
class Heads:
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def head_dim_pad(self) -> int:
        return -(-self.head_dim // 32) * 32


@dataclass(frozen=True)
class Text:
    """What attention sees of a sequence; bf16. q: [length, heads, head_dim], k, v: [length, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """A sequence's tokens start … end - 1 in one step; those before are in the pools."""

    text: Text
    start: int
    end: int


def random_text(heads: Heads, length: int, seed: int, spread: float = 2.0) -> Text:
    """Scores have a deviation of about `spread` under the scale head_dim ** -0.5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int, factor: float) -> torch.Tensor:
        return (torch.randn(length, count, heads.head_dim, generator=generator) * factor).bfloat16()

    return Text(normal(heads.heads, spread), normal(heads.kv_heads, 1), normal(heads.kv_heads, 1))


def bits(values: torch.Tensor) -> NDArray[np.uint16]:
    return values.bfloat16().contiguous().view(torch.uint16).numpy()


class PoolViews:
    """K and V of one layer, as arrays of bf16 bits that share the pools' memory.

    keys: [blocks, kv_heads, groups, pairs of dims, 16 tokens, 2]; values: [blocks, kv_heads, pairs of tokens, dims, 2].
    """

    def __init__(self, heads: Heads, pools: _cpu.KvPools, layer: int) -> None:
        self.heads, count, width = heads, heads.kv_heads, heads.head_dim_pad
        self.keys = pools.keys(layer).reshape(-1, count, BLOCK_SIZE // 16, width // 2, 16, 2)
        self.values = pools.values(layer).reshape(-1, count, BLOCK_SIZE // 2, width, 2)

    def write(self, slots: NDArray[np.integer], k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v: [tokens, kv_heads, head_dim]. Dims that pad a head become zeros."""
        missing = self.heads.head_dim_pad - self.heads.head_dim
        k, v = (torch.nn.functional.pad(x, (0, missing)) for x in (k, v))
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        self.keys[block, :, at // 16, :, at % 16] = bits(k).reshape(len(slots), self.heads.kv_heads, -1, 2)
        self.values[block, :, at // 2, :, at % 2] = bits(v)


class PagedKv:
    """The pools and block tables of some chunks: each has its own blocks, in no order.

    Slots behind a chunk's end hold large numbers, and so do blocks that nobody has. Entries of a block table that
    must not be read lead to a block of NaN.
    """

    def __init__(self, heads: Heads, chunks: Sequence[Chunk], window: int = 0, seed: int = 0) -> None:
        counts = [-(-chunk.end // BLOCK_SIZE) for chunk in chunks]
        self.kv_blocks = max(counts)
        self.pools = _cpu.KvPools(1, sum(counts) + 3, BLOCK_SIZE, heads.kv_heads, heads.head_dim)
        views = PoolViews(heads, self.pools, 0)
        random = np.random.default_rng(seed)
        for pool in (views.keys, views.values):
            pool[:] = bits(torch.from_numpy(random.choice([1.0, -1.0, 3e30, -3e30], pool.shape)))
            pool[0] = 0x7FC0  # NaN
        free = iter(random.permutation(sum(counts)) + 1)
        self.block_table = np.zeros((len(chunks), self.kv_blocks), np.int32)
        for row, chunk in zip(self.block_table, chunks, strict=True):
            oldest = max(0, chunk.start - window + 1) if window else 0
            for block in range(oldest // BLOCK_SIZE, -(-chunk.end // BLOCK_SIZE)):
                row[block] = next(free)
            positions = np.arange(oldest, chunk.end)
            slots = row[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            views.write(slots, chunk.text.k[oldest : chunk.end], chunk.text.v[oldest : chunk.end])
