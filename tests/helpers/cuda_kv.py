"""KV pools as csrc/cuda/kv.cuh has them, and sequences whose KV lies in them at random."""

from collections.abc import Sequence

import numpy as np
import torch

from enginewright.plan import Linear
from enginewright.plugins.attention.kv_write import BLOCK_SIZE, kv_row_bytes, padded_head_dim
from enginewright.plugins.kernel import Matrix
from tests.helpers.cuda_call import Operand
from tests.helpers.paged_kv import Chunk, Heads, bits, codes_of, nibbles_of

POISON = 0xFF  # NaN in every dtype that has one; scales of int8 are NaN


class Pools:
    """One layer's keys and values, full of NaN at first, and after them another layer's."""

    def __init__(self, dtype: str, blocks: int, kv_heads: int, head_dim: int) -> None:
        self.dtype, self.kv_heads, self.head_dim = dtype, kv_heads, head_dim
        self.pad = padded_head_dim(head_dim)
        self.tile_bytes = BLOCK_SIZE * kv_row_bytes(head_dim, dtype)
        stride = 4 * kv_heads * self.tile_bytes
        self.memory = np.full((blocks, 2, 2, kv_heads, self.tile_bytes), POISON, np.uint8)
        flat = self.memory.reshape(-1)
        matrix = Matrix(dtype, Linear(), head_dim, self.pad, self.pad, block_stride=stride)
        self.operands = {
            "key": Operand(flat, matrix),
            "value": Operand(flat[kv_heads * self.tile_bytes :], matrix),
        }

    def write(self, slots: np.ndarray, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes keys and values to slots. k, v: [tokens, kv_heads, head_dim]."""
        block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
        for half, x in enumerate((k, v)):
            tiles = self.memory[:, 0, half]  # [blocks, kv_heads, tile_bytes]
            padded = torch.nn.functional.pad(x, (0, self.pad - self.head_dim))
            if self.dtype == "u4":  # of 8 codes, those of even columns first
                codes, scales = nibbles_of(x)
                low, high = codes.unflatten(-1, (-1, 8))[..., [0, 2, 4, 6, 1, 3, 5, 7]].unflatten(-1, (4, 2)).unbind(-1)
                half = BLOCK_SIZE * self.pad // 2
                by_token = tiles[..., :half].reshape(*tiles.shape[:2], BLOCK_SIZE, -1)
                by_token[block, :, at] = (low | high << 4).flatten(-2).numpy()
                by_token = tiles[..., half:].view(np.uint16).reshape(*tiles.shape[:2], BLOCK_SIZE, -1)
                by_token[block, :, at] = bits(scales.flatten(-2))
                continue
            if self.dtype != "bf16":
                padded, scale = codes_of(padded, self.dtype)
                scales = tiles[..., BLOCK_SIZE * self.pad :].view(np.float32)
                scales[block, :, at] = scale[..., 0]
            rows = np.ascontiguousarray(bits(padded)).view(np.uint8)
            row_bytes = rows.shape[-1]
            codes = tiles[..., : BLOCK_SIZE * row_bytes].reshape(*tiles.shape[:2], BLOCK_SIZE, row_bytes)
            codes[block, :, at] = rows


class PagedKv:
    """The pools and block tables of some chunks: each has its own blocks, in random order.

    Slots that no chunk sees are NaN, and so is block 0, to which entries of block tables lead that must not be read.
    """

    def __init__(self, heads: Heads, chunks: Sequence[Chunk], window: int, dtype: str) -> None:
        counts = [-(-chunk.end // BLOCK_SIZE) for chunk in chunks]
        self.kv_blocks = max(counts)
        self.pools = Pools(dtype, sum(counts) + 1, heads.kv_heads, heads.head_dim)
        free = iter(np.random.default_rng(0).permutation(sum(counts)) + 1)
        self.block_table = np.zeros((len(chunks), self.kv_blocks), np.int32)
        for row, chunk in zip(self.block_table, chunks, strict=True):
            oldest = max(0, chunk.start - window + 1) if window else 0
            for block in range(oldest // BLOCK_SIZE, -(-chunk.end // BLOCK_SIZE)):
                row[block] = next(free)
            positions = np.arange(oldest, chunk.end)
            slots = row[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            self.pools.write(slots, chunk.text.k[oldest : chunk.end], chunk.text.v[oldest : chunk.end])
