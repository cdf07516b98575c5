"""Paged attention on CUDA, in emulation, against float64; and its promise that results depend on nothing but the
sequence."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from enginewright.plan import Linear, Sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.kernel import CudaKernel, Matrix
from tests.cuda_call import CudaCall, Operand, as_bf16, empty, from_bf16, strided, vector
from tests.cuda_kv import PagedKv
from tests.paged_kv import SPLIT, Chunk, Heads, Text, random_text, stored
from tests.tolerances import ATTENTION

TOKENS = Linear(tokens=1)


@dataclass(frozen=True)
class Attention:
    heads: Heads
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    out: str = "bf16"

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def operands(self, chunks: Sequence[Chunk]) -> dict[str, Operand]:
        heads, lengths = self.heads, [chunk.end - chunk.start for chunk in chunks]
        kv, width = PagedKv(heads, chunks, self.window, self.kv), heads.heads * heads.head_dim
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks]).reshape(sum(lengths), width)
        padded = -(-width // 64) * 64
        rows = -(-heads.heads // heads.kv_heads // 16) * 16
        sizes, partials = sizes_of(chunks), heads.kv_heads * rows * (heads.head_dim_pad + 2)
        slots = 2048 // heads.kv_heads + (4 if heads.head_dim_pad > 128 else 2) * sizes.kv_splits
        return {
            "partials": empty("f32", Linear(), slots - 2, partials, partials),
            "counters": Operand(np.zeros((len(chunks), 64), np.int32), Matrix("i32", TOKENS, 64, 64, 64)),
            "q": strided("bf16", TOKENS, as_bf16(q.float().numpy()), 2048),
            "query_start": vector("i32", np.cumsum([0, *lengths])),
            "kv_len": vector("i32", np.array([chunk.end for chunk in chunks])),
            "block_table": vector("i32", kv.block_table),
            "out": empty(self.out, TOKENS, sum(lengths), width, 2048, padded if self.out == "bf16" else None),
            **kv.pools.operands,
        }

    def run(self, chunks: Sequence[Chunk], schedule: str = "forward") -> list[np.ndarray]:
        """Of each chunk, float32 [tokens, heads, head_dim]."""
        operands = self.operands(chunks)
        call_of(self).run(operands, sizes_of(chunks), schedule)
        assert not operands["counters"].values.any()
        out, tokens = operands["out"], sum(chunk.end - chunk.start for chunk in chunks)
        columns, padded = out.matrix.columns, out.matrix.padded
        assert not out.values[:tokens, columns:padded].any()
        poison = empty(self.out, TOKENS, 0, columns, 1).values[0, 0]
        for outside in (out.values[:tokens, padded:], out.values[tokens:]):
            np.testing.assert_array_equal(outside, np.full_like(outside, poison))
        whole = from_bf16(out.values) if self.out == "bf16" else out.values
        rows = whole[:tokens, :columns].reshape(tokens, self.heads.heads, -1)
        return np.split(rows, np.cumsum([chunk.end - chunk.start for chunk in chunks])[:-1])

    def expected(self, chunk: Chunk) -> torch.Tensor:
        """float64 [tokens, heads, head_dim]"""
        group = self.heads.heads // self.heads.kv_heads
        q = chunk.text.q[chunk.start : chunk.end].double()
        k, v = (stored(x[: chunk.end], self.kv).repeat_interleave(group, dim=1) for x in (chunk.text.k, chunk.text.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        behind = torch.arange(chunk.start, chunk.end)[:, None] - torch.arange(chunk.end)  # [query, key]
        seen = (behind >= 0) & (behind < self.window) if self.window else behind >= 0
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    def check(self, chunks: Sequence[Chunk], schedule: str = "forward") -> None:
        for chunk, result in zip(chunks, self.run(chunks, schedule), strict=True):
            error = (torch.from_numpy(result).double() - self.expected(chunk)).abs().max()
            tolerance = ATTENTION["bf16"] + (2**-8 if self.out == "bf16" else 0)
            assert float(error / chunk.text.v.double().abs().max()) < tolerance, (
                f"tokens {chunk.start} … {chunk.end - 1}"
            )


def sizes_of(chunks: Sequence[Chunk]) -> Sizes:
    longest = max(chunk.end for chunk in chunks)
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    return Sizes(tokens, len(chunks), len(chunks), -(-longest // 32), -(-longest // SPLIT))


@functools.cache
def call_of(attention: Attention) -> CudaCall:
    kernel = PLUGINS["PagedAttention"].kernels["cuda"]
    assert isinstance(kernel, CudaKernel)
    some = Chunk(text(attention.heads, 1), 0, 1)
    return CudaCall(
        kernel,
        {role: operand.matrix for role, operand in attention.operands([some]).items()},
        heads=attention.heads.heads,
        kv_heads=attention.heads.kv_heads,
        head_dim=attention.heads.head_dim,
        scale=attention.scale,
        window=attention.window,
        softcap=attention.softcap,
    )


@functools.cache
def text(heads: Heads, length: int, seed: int = 0) -> Text:
    return random_text(heads, length, seed)


def whole(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, length, seed), 0, length)


def decode(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, length, seed), length - 1, length)


SMALL = Heads(6, 2, 24)


@pytest.mark.parametrize("kv", ["bf16", "i8", "e4m3"])
def test_mixed_batches(kv: str) -> None:
    """Lengths around a split's, chunks that begin in the middle of blocks, decodes among them."""
    chunks = [
        whole(SMALL, 33),
        decode(SMALL, 1),
        Chunk(text(SMALL, 300), 250, 300),
        decode(SMALL, 257),
        decode(SMALL, 128),
        whole(SMALL, 129, 1),
    ]
    Attention(SMALL, kv).check(chunks)
