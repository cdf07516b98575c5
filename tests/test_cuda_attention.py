"""Paged attention on CUDA, in emulation, against float64; and its promise that results depend on nothing but the
sequence."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import pytest
import torch

from enginewright.plan import Launch, Linear, Sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.attention_cuda import PARTIALS
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from tests.cuda_call import POISON, Operand, as_bf16, empty, from_bf16, instances, run, strided, vector
from tests.cuda_kv import PagedKv
from tests.emulated import SCHEDULES, EmulationError, Kernels
from tests.paged_kv import SPLIT, Chunk, Heads, Text, random_text, stored
from tests.tolerances import BF16_ROUNDING, CUDA_ATTENTION

KERNEL = PLUGINS["PagedAttention"].kernels["cuda"]
assert isinstance(KERNEL, CudaKernel)
TOKENS = Linear(tokens=1)
STRIDE = 10304  # elements, of q and out


@dataclass(frozen=True)
class Attention:
    """crowded: there is room for the results of few splits (`partials`), so that sequences are not taken apart."""

    heads: Heads
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    out: str = "bf16"
    crowded: bool = False

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def width(self) -> int:
        return self.heads.heads * self.heads.head_dim

    def launches(self) -> tuple[Launch, ...]:
        attributes = {
            "heads": self.heads.heads,
            "kv_heads": self.heads.kv_heads,
            "head_dim": self.heads.head_dim,
            "scale": self.scale,
            "window": self.window,
            "softcap": self.softcap,
        }
        matrices = {role: operand.matrix for role, operand in self.operands([decode(self.heads, 1)]).items()}
        launches = KERNEL.launches(Call(matrices, attributes))
        if not self.crowded:
            return launches
        room = PARTIALS // self.heads.kv_heads
        assert all(f".partials = {room}," in launch.kernel for launch in launches)
        return tuple(
            msgspec.structs.replace(launch, kernel=launch.kernel.replace(f".partials = {room},", ".partials = 0,"))
            for launch in launches
        )

    def operands(self, chunks: Sequence[Chunk]) -> dict[str, Operand]:
        heads, tokens = self.heads, sum(chunk.end - chunk.start for chunk in chunks)
        kv, sizes = PagedKv(heads, chunks, self.window, self.kv), sizes_of(chunks)
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks]).reshape(tokens, self.width)
        head_rows = -(-heads.heads // heads.kv_heads // 16) * 16
        partial, splits = heads.kv_heads * head_rows * (heads.head_dim_pad + 2), 4 if heads.head_dim_pad > 128 else 2
        slots = (0 if self.crowded else PARTIALS // heads.kv_heads) + splits * sizes.kv_splits
        return {
            "q": strided("bf16", TOKENS, as_bf16(q.float().numpy()), STRIDE),
            "query_start": vector("i32", np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])),
            "kv_len": vector("i32", np.array([chunk.end for chunk in chunks])),
            "block_table": vector("i32", kv.block_table),
            "out": empty(self.out, TOKENS, tokens, self.width, STRIDE, -(-self.width // 64) * 64),
            "partials": matrix(np.full((slots, partial), np.nan, np.float32), "f32"),
            "counters": matrix(np.zeros((len(chunks), 8), np.int32), "i32"),
            **kv.pools.operands,
        }

    def run(
        self,
        chunks: Sequence[Chunk],
        schedule: str = "forward",
        seed: int = 0,
        operands: dict[str, Operand] | None = None,
    ) -> list[np.ndarray]:
        """Of each chunk, float32 [tokens, heads, head_dim]."""
        operands = operands or self.operands(chunks)
        sizes = sizes_of(chunks)
        run(library(), self.launches(), operands, sizes, schedule, seed)
        assert not operands["counters"].values.any(), "the next step's counters do not begin at zero"
        values, ends = operands["out"].values, np.cumsum([chunk.end - chunk.start for chunk in chunks])
        rows, written = values[: sizes.tokens], self.width if self.out == "f32" else operands["out"].matrix.padded
        assert not rows[:, self.width : written].any()
        for outside in rows[:, written:], values[sizes.tokens :]:
            np.testing.assert_array_equal(outside, np.full_like(outside, POISON[self.out]))
        rows = (rows if self.out == "f32" else from_bf16(rows))[:, : self.width]
        return np.split(rows.reshape(sizes.tokens, self.heads.heads, -1), ends[:-1])

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

    def errors(self, chunks: Sequence[Chunk], results: Sequence[np.ndarray]) -> list[float]:
        """The largest of each chunk, in largest |v|."""
        return [
            float((torch.from_numpy(result).double() - self.expected(chunk)).abs().max() / chunk.text.v.abs().max())
            for chunk, result in zip(chunks, results, strict=True)
        ]

    def check(self, chunks: Sequence[Chunk], schedule: str = "forward") -> None:
        tolerance = CUDA_ATTENTION[self.kv] + (BF16_ROUNDING if self.out == "bf16" else 0)
        for chunk, error in zip(chunks, self.errors(chunks, self.run(chunks, schedule)), strict=True):
            assert error < tolerance, f"tokens {chunk.start} … {chunk.end - 1}"


def matrix(values: np.ndarray, dtype: str) -> Operand:
    columns = values.shape[1]
    return Operand(values, Matrix(dtype, Linear(), columns, columns, columns))


def sizes_of(chunks: Sequence[Chunk]) -> Sizes:
    longest, tokens = max(chunk.end for chunk in chunks), sum(chunk.end - chunk.start for chunk in chunks)
    return Sizes(tokens, len(chunks), len(chunks), -(-longest // 32), -(-longest // SPLIT))


def library_of(attentions: Sequence[Attention]) -> Kernels:
    return Kernels([instance for attention in attentions for instance in instances(KERNEL, attention.launches())])


@functools.cache
def library() -> Kernels:
    """Of all tests here, compiled at once."""
    return library_of(ATTENTIONS)


@functools.cache
def text(heads: Heads, length: int, seed: int = 0) -> Text:
    return random_text(heads, length, seed)


def whole(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, length, seed), 0, length)


def part(heads: Heads, start: int, end: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, end, seed), start, end)


def decode(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return part(heads, length - 1, length, seed)


SMALL = Heads(6, 2, 24)
BY_KV = [Attention(SMALL, kv, out="f32") for kv in ("bf16", "i8", "e4m3")]
CROWDED = [Attention(SMALL, kv, out="f32", crowded=True) for kv in ("bf16", "i8")]
SHAPES = [
    Attention(Heads(2, 2, 64), window=150),
    Attention(Heads(5, 1, 128), softcap=5.0),
    Attention(Heads(8, 1, 80), "i8", window=33, softcap=5.0),
    Attention(Heads(17, 1, 32), "e4m3"),
    Attention(Heads(3, 1, 160)),
]
ATTENTIONS = [*BY_KV, *CROWDED, *SHAPES]


@pytest.mark.parametrize("attention", ATTENTIONS, ids=str)
def test_mixed_batches(attention: Attention) -> None:
    """Lengths around a split's, chunks that begin in the middle of blocks, decodes among prompts."""
    heads = attention.heads
    chunks = [
        whole(heads, 33),
        decode(heads, 1),
        part(heads, 250, 300),
        decode(heads, 257),
        part(heads, 126, 128),
        decode(heads, 611),
        whole(heads, 129, 1),
        decode(heads, 256, 1),
    ]
    attention.check(chunks)


@pytest.mark.parametrize("attention", BY_KV, ids=str)
def test_bits_do_not_depend_on_company(attention: Attention) -> None:
    """The last tokens alone, in chunks and company, and the whole prompt at once: by both kernels, whole or apart."""
    length = 281
    (prompt,) = attention.run([whole(SMALL, length)])
    for start in (length - 1, length - 5, length - 6, length - 150):
        chunk = part(SMALL, start, length)
        company = [decode(SMALL, 300, 1), chunk, decode(SMALL, 611, 1), whole(SMALL, 40, 2)]
        np.testing.assert_array_equal(attention.run([chunk])[0], prompt[start:])
        np.testing.assert_array_equal(attention.run(company)[1], prompt[start:])
        crowded = replace(attention, crowded=True)
        if crowded in CROWDED:
            np.testing.assert_array_equal(crowded.run(company)[1], prompt[start:])


STEP = [
    part(SMALL, 295, 300),
    part(SMALL, 120, 150),
    decode(SMALL, 611, 1),
    part(SMALL, 270, 300, 2),
    part(SMALL, 385, 390),
]


@pytest.mark.parametrize("attention", [BY_KV[0], *CROWDED], ids=str)
def test_no_schedule_changes_bits(attention: Attention) -> None:
    results = attention.run(STEP)
    for schedule in SCHEDULES[1:]:
        for result, again in zip(results, attention.run(STEP, schedule), strict=True):
            np.testing.assert_array_equal(result, again)


def test_every_barrier_is_needed() -> None:
    attentions = [CROWDED[1], BY_KV[0]]
    expected = {attention: attention.run(STEP) for attention in attentions}
    sites = [site for site in library().sites if site.startswith("paged_")]
    assert not sites or len(sites) == 13  # a GPU has none

    def notices(attention: Attention, schedule: str, seed: int) -> bool:
        try:
            results = attention.run(STEP, schedule, seed)
        except (EmulationError, AssertionError):
            return True
        return any(not np.array_equal(*both) for both in zip(results, expected[attention], strict=True))

    orders = [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(8))]
    for site in sites:
        with library().without(site):
            assert any(notices(attention, *order) for order in orders for attention in attentions), site


def test_a_page_table_that_is_off_by_one_is_noticed() -> None:
    attention = BY_KV[0]
    chunks = [decode(SMALL, 300), part(SMALL, 120, 150)]
    for row in range(len(chunks)):
        operands = attention.operands(chunks)
        table = operands["block_table"].values
        table[row] = np.roll(table[row], 1)
        errors = attention.errors(chunks, attention.run(chunks, operands=operands))
        assert [not error < CUDA_ATTENTION["bf16"] for error in errors] == [
            index == row for index in range(len(chunks))
        ]
