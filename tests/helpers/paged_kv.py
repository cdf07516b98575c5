"""Sequences with queries, keys and values, and their KV laid out in pools as csrc/cpu/kernel.h says."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from enginewright import _cpu
from enginewright.dtypes import DTYPES, KV_CACHES

KV_DTYPES = tuple(dtype.name for dtype in KV_CACHES.values())
KV_CODES = tuple(name for name in KV_DTYPES if DTYPES[name].largest)  # of 8 bits, with a scale for each row
BLOCK_SIZE = 32
PLANES = ("key", "value")
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
class AttendedText:
    """One sequence in bf16. q: [length, heads, head_dim], k and v: [length, kv_heads, head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """A sequence's tokens start … end - 1 in one step; those before are in the pools."""

    text: AttendedText
    start: int
    end: int


def random_text(heads: Heads, length: int, seed: int, spread: float = 2.0) -> AttendedText:
    """A random sequence whose scores have a deviation of about `spread` under the scale head_dim ** -0.5."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int, factor: float) -> torch.Tensor:
        return (torch.randn(length, count, heads.head_dim, generator=generator) * factor).bfloat16()

    return AttendedText(normal(heads.heads, spread), normal(heads.kv_heads, 1), normal(heads.kv_heads, 1))


@functools.cache
def text(heads: Heads, length: int, seed: int = 0) -> AttendedText:
    return random_text(heads, length, seed)


def whole(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, length, seed), 0, length)


def sinks_of(heads: Heads) -> torch.Tensor:
    """One sink's logit for each head: from negligible ones to ones that take nearly all weight."""
    return torch.linspace(-9, 9, heads.heads)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """FLOAT [..., D], blocks of it by Hadamard matrices, by the fast transform, in the kernels' order of sums."""
    order, half = x.shape[-1] & -x.shape[-1], 1
    blocks = x.float().unflatten(-1, (-1, order))
    while half < order:
        first, second = blocks.unflatten(-1, (-1, 2, half)).unbind(-2)
        blocks, half = torch.stack((first + second, first - second), -2).flatten(-3), half * 2
    return (blocks * torch.tensor(order**-0.5, dtype=torch.float32)).flatten(-2)


def nibbles_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded to groups of 32, as codes (uint8, one a number), and [..., groups, (scale, zero)] in bf16."""
    x = torch.nn.functional.pad(rows.float(), (0, -rows.shape[-1] % 32)).unflatten(-1, (-1, 32))
    minimum, span, tiny = x.amin(-1), x.amax(-1) - x.amin(-1), torch.tensor(2.0**-100)
    first, step = minimum.bfloat16().float(), (span / 15).bfloat16().float()
    zero = torch.where(first.abs() < torch.maximum(step * 2**-10, tiny), 0, first)
    scale = torch.where(step < torch.maximum(first.abs() * 2**-14, tiny), 0, step)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    codes = ((x - zero[..., None]) * inverse[..., None]).nan_to_num(0).clamp(0, 15).round().to(torch.uint8)
    return codes.flatten(-2), torch.stack((scale + (x * 0).sum(-1), zero), -1).bfloat16()


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a plane's numbers in torch."""
    dtype: torch.dtype = getattr(torch, DTYPES[name].torch)
    return dtype


def is_fp8(name: str) -> bool:
    """Returns True if planes of this dtype hold FP8."""
    return name in KV_CODES and torch_dtype(name).is_floating_point


def bits(values: torch.Tensor) -> NDArray[np.generic]:
    """The bits of numbers in FP8 or, after rounding, bf16; int8 stays as it is."""
    if values.dtype == torch.int8:
        return values.numpy()
    if values.dtype.itemsize == 1:
        return values.view(torch.uint8).numpy()
    return values.bfloat16().contiguous().view(torch.uint16).numpy()


def finite_codes(dtype: str) -> NDArray[np.generic]:
    """The codes that planes may hold."""
    if dtype == "i8":
        return np.arange(-127, 128, dtype=np.int8)
    codes = torch.arange(256).to(torch.uint8)
    return codes[codes.view(torch_dtype(dtype)).float().isfinite()].numpy()


def codes_of(rows: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as int8 or FP8, and their scales [..., 1] in fp32."""
    rows, code_max = rows.float(), DTYPES[dtype].largest
    largest = rows.abs().amax(-1, keepdim=True)
    # code_max / largest would be code_max * (1 / largest), rounded twice.
    factor = torch.full_like(largest, code_max) / largest
    numbers = (rows * factor).nan_to_num(0)
    return (numbers if is_fp8(dtype) else numbers.round()).to(torch_dtype(dtype)), largest / code_max


def stored(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """The float64 values that attention reads for rows of bf16: themselves, or their codes with a scale."""
    if dtype == "bf16":
        return rows.double()
    if dtype == "u4":
        codes, scales = nibbles_of(rows)
        scale, zero = scales.float()[..., None].unbind(-2)
        return (codes.unflatten(-1, (-1, 32)) * scale + zero).bfloat16().flatten(-2)[..., : rows.shape[-1]].double()
    codes, scale = codes_of(rows, dtype)
    return codes.double() * scale.double()


def kv_blocks(layers: int, num_blocks: int, kv_heads: int, head_dim: int, dtype: str = "bf16") -> _cpu.CacheBlocks:
    planes = [(name, kv_heads, head_dim, dtype) for name in PLANES]
    return _cpu.CacheBlocks(layers, num_blocks, BLOCK_SIZE, planes)


def kv_operands(blocks: _cpu.CacheBlocks, layer: int) -> dict[str, _cpu.OperandSpec]:
    return {name: _cpu.OperandSpec.cache(blocks, layer, name) for name in PLANES}


class PoolViews:
    """K and V of one layer, as arrays that share the pools' memory: bits of bf16 or FP8, or int8 codes; and scales.

    keys: [blocks, kv_heads, groups, dims / N, 16 tokens, N]; values: [blocks, kv_heads, tokens / N, dims, N]; N is 2 of
    bf16 and 4 of codes. key_scales, value_scales: float32 [blocks, kv_heads, tokens], empty with bf16. Of 4 bits, bytes
    are [blocks, kv_heads, groups, dims / 4, 16 tokens, 2] and [blocks, kv_heads, tokens / 2, dims / 2, 2], scales and
    zeros bits of bf16 [blocks, kv_heads, groups or tokens / 2, dims / 32, 2, tokens].
    """

    def __init__(self, heads: Heads, pools: _cpu.CacheBlocks, layer: int, dtype: str) -> None:
        self.heads, self.dtype, count, width = heads, dtype, heads.kv_heads, heads.head_dim_pad
        keys, values = (pools.plane(layer, name) for name in PLANES)
        size = BLOCK_SIZE * width
        if dtype == "u4":
            size, self.depth = size // 2, 2
            self.keys = keys[..., :size].reshape(-1, count, BLOCK_SIZE // 16, width // 4, 16, 2)
            self.values = values[..., :size].reshape(-1, count, BLOCK_SIZE // 2, width // 2, 2)
            key_scales, value_scales = (pool[..., size:].view(np.uint16) for pool in (keys, values))
            self.key_scales = key_scales.reshape(-1, count, BLOCK_SIZE // 16, width // 32, 2, 16)
            self.value_scales = value_scales.reshape(-1, count, BLOCK_SIZE // 2, width // 32, 2, 2)
            return
        self.depth = 2 if dtype == "bf16" else 4
        self.keys = keys[..., :size].reshape(-1, count, BLOCK_SIZE // 16, width // self.depth, 16, self.depth)
        self.values = values[..., :size].reshape(-1, count, BLOCK_SIZE // self.depth, width, self.depth)
        self.key_scales, self.value_scales = (pool[..., size:].view(np.float32) for pool in (keys, values))

    def write(self, slots: NDArray[np.integer], k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values, [tokens, kv_heads, head_dim]. Dims that pad a head become zeros."""
        missing = self.heads.head_dim_pad - self.heads.head_dim
        k, v = (torch.nn.functional.pad(x, (0, missing)) for x in (k, v))
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        if self.dtype == "u4":
            (k, k_scales), (v, v_scales) = nibbles_of(k), nibbles_of(v)
            self.key_scales[block, :, at // 16, :, :, at % 16] = bits(k_scales)
            self.value_scales[block, :, at // 2, :, :, at % 2] = bits(v_scales)
            (low, high), (even, odd) = (x.unflatten(-1, (-1, 2, n)).unbind(-2) for x, n in ((k, 2), (v, 8)))
            self.keys[block, :, at // 16, :, at % 16] = (low | high << 4).numpy()
            self.values[block, :, at // 2, :, at % 2] = (even | odd << 4).flatten(-2).numpy()
            return
        if self.dtype != "bf16":
            (k, k_scale), (v, v_scale) = codes_of(k, self.dtype), codes_of(v, self.dtype)
            self.key_scales[block, :, at], self.value_scales[block, :, at] = k_scale[..., 0], v_scale[..., 0]
        key, value = (bits(x) for x in (k, v))
        self.keys[block, :, at // 16, :, at % 16] = key.reshape(len(slots), self.heads.kv_heads, -1, self.depth)
        self.values[block, :, at // self.depth, :, at % self.depth] = value

    def poison(self, random: np.random.Generator) -> None:
        """Fills every slot with large numbers of either sign, and block 0 with NaN."""
        for pool, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            if self.dtype == "u4":
                pool[:] = random.integers(0, 256, pool.shape)
                scales[:] = bits(torch.from_numpy(random.choice([1.0, -1.0, 3e30, -3e30], scales.shape)))
                scales[0] = 0x7FC0  # NaN
            elif self.dtype != "bf16":
                pool[:] = random.choice(finite_codes(self.dtype), pool.shape)
                scales[:] = random.choice([1.0, 3e30], scales.shape)
                scales[0] = np.nan
            else:
                pool[:] = bits(torch.from_numpy(random.choice([1.0, -1.0, 3e30, -3e30], pool.shape)))
                pool[0] = 0x7FC0  # NaN


class PagedKv:
    """The pools and block tables of some chunks: each has its own blocks, in no order.

    Slots after a chunk's end hold large numbers, and so do blocks that no sequence has. Entries of a block table that
    must not be read lead to a block of NaN.
    """

    def __init__(self, heads: Heads, chunks: Sequence[Chunk], window: int, dtype: str) -> None:
        counts = [-(-chunk.end // BLOCK_SIZE) for chunk in chunks]
        self.kv_blocks = max(counts)
        self.pools = kv_blocks(1, sum(counts) + 3, heads.kv_heads, heads.head_dim, dtype)
        views = PoolViews(heads, self.pools, 0, dtype)
        random = np.random.default_rng(0)
        views.poison(random)
        free = iter(random.permutation(sum(counts)) + 1)
        self.block_table = np.zeros((len(chunks), self.kv_blocks), np.int32)
        for row, chunk in zip(self.block_table, chunks, strict=True):
            oldest = max(0, chunk.start - window + 1) if window else 0
            for block in range(oldest // BLOCK_SIZE, -(-chunk.end // BLOCK_SIZE)):
                row[block] = next(free)
            positions = np.arange(oldest, chunk.end)
            slots = row[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            views.write(slots, chunk.text.k[oldest : chunk.end], chunk.text.v[oldest : chunk.end])
