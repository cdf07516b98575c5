"""Paged attention as GPUs launch it, in emulation: sequences in pools, and the expected results in float64."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import torch

from enginewright.plan import Launch, Linear, StepSizes, linear, step_sizes
from enginewright.plugins import PLUGINS
from enginewright.plugins.attention.attention_cuda import PARTIALS, wgmma_launches
from enginewright.plugins.kernel import Call, CudaKernel, Matrix
from tests.emulator.kernels import EmulationError, Kernels
from tests.helpers.cuda_call import POISON, Operand, as_bf16, empty, from_bf16, instances, run, strided, vector
from tests.helpers.cuda_kv import PagedKv
from tests.helpers.paged_kv import SPLIT, Chunk, Heads, sinks_of, stored, text
from tests.tolerances import BF16_ROUNDING, CUDA_ATTENTION

KERNEL = PLUGINS["PagedAttention"].kernels["cuda"]
assert isinstance(KERNEL, CudaKernel)
TOKENS = linear(tokens=1)
STRIDE = 10304  # elements, of q and out


class Attending(ABC):
    """Calls of an attention kernel."""

    kernel: ClassVar[CudaKernel]
    heads: Heads
    out: str  # dtype of the result
    kv: str
    crowded: bool  # there is room for the results of few splits (`partials`), so that sequences are not taken apart

    @property
    @abstractmethod
    def width(self) -> int:
        """Number of columns of the result."""

    @property
    @abstractmethod
    def room(self) -> int:
        """Further splits that the buffer for results has, in addition to the longest sequence's."""

    @abstractmethod
    def launches(self) -> tuple[Launch, ...]: ...

    @abstractmethod
    def operands(self, chunks: Sequence[Chunk]) -> dict[str, Operand]: ...

    @abstractmethod
    def expected(self, chunk: Chunk) -> torch.Tensor:
        """The right result, float64 [tokens, heads, columns]."""

    def as_crowded(self, launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
        """The launches, if `crowded` without that buffer for further splits."""
        if not self.crowded:
            return launches
        assert all(f".partials = {self.room}," in launch.kernel for launch in launches)
        return tuple(
            msgspec.structs.replace(one, kernel=one.kernel.replace(f".partials = {self.room},", ".partials = 0,"))
            for one in launches
        )

    def run(
        self,
        kernels: Kernels,
        chunks: Sequence[Chunk],
        schedule: str = "forward",
        seed: int = 0,
        operands: dict[str, Operand] | None = None,
    ) -> list[np.ndarray]:
        """Runs the kernels; gives each chunk's results, float32 [tokens, heads, columns]."""
        operands = operands or self.operands(chunks)
        sizes = sizes_of(chunks)
        run(kernels, self.launches(), operands, sizes, schedule, seed)
        if "counters" in operands:
            assert not operands["counters"].values.any(), "the next step's counters do not begin at zero"
        values, ends = operands["out"].values, np.cumsum([chunk.end - chunk.start for chunk in chunks])
        rows, written = values[: sizes.tokens], self.width if self.out == "f32" else operands["out"].matrix.padded
        assert not rows[:, self.width : written].any()
        for outside in rows[:, written:], values[sizes.tokens :]:
            np.testing.assert_array_equal(outside, np.full_like(outside, POISON[self.out]))
        rows = (rows if self.out == "f32" else from_bf16(rows))[:, : self.width]
        return np.split(rows.reshape(sizes.tokens, self.heads.heads, -1), ends[:-1])

    def errors(self, chunks: Sequence[Chunk], results: Sequence[np.ndarray]) -> list[float]:
        """The largest error of each chunk, relative to the largest |v|."""
        return [
            float((torch.from_numpy(result).double() - self.expected(chunk)).abs().max() / chunk.text.v.abs().max())
            for chunk, result in zip(chunks, results, strict=True)
        ]

    def check(self, kernels: Kernels, chunks: Sequence[Chunk], schedule: str = "forward") -> None:
        tolerance = CUDA_ATTENTION[self.kv] + (BF16_ROUNDING if self.out == "bf16" else 0)
        for chunk, error in zip(chunks, self.errors(chunks, self.run(kernels, chunks, schedule)), strict=True):
            assert error < tolerance, f"tokens {chunk.start} … {chunk.end - 1}"


@dataclass(frozen=True)
class Attention(Attending):
    """wgmma: where sequences have many rows, by Hopper's kernel."""

    kernel = KERNEL
    heads: Heads
    kv: str = "bf16"
    window: int = 0
    softcap: float = 0.0
    out: str = "bf16"
    crowded: bool = False
    wgmma: bool = False
    sinks: bool = False
    architecture: str = "sm_90a"

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    @property
    def width(self) -> int:
        return self.heads.heads * self.heads.head_dim

    @property
    def room(self) -> int:
        return PARTIALS // self.heads.kv_heads

    def launches(self) -> tuple[Launch, ...]:
        attributes = {
            "heads": self.heads.heads,
            "kv_heads": self.heads.kv_heads,
            "head_dim": self.heads.head_dim,
            "scale": self.scale,
            "window": self.window,
            "lookahead": 0,
            "softcap": self.softcap,
        }
        chunks = [decode(self.heads, 1)]
        matrices = {role: operand.matrix for role, operand in self.operands(chunks).items()}
        call = Call(matrices, attributes, (self.architecture,), dims=sizes_of(chunks).dims)
        launches = KERNEL.launches(call)
        if self.wgmma:
            launches = (*wgmma_launches(call), launches[-1])
        return self.as_crowded(launches)

    def operands(self, chunks: Sequence[Chunk]) -> dict[str, Operand]:
        heads, tokens = self.heads, sum(chunk.end - chunk.start for chunk in chunks)
        kv, sizes = PagedKv(heads, chunks, self.window, self.kv), sizes_of(chunks)
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks]).reshape(tokens, self.width)
        head_rows = -(-heads.heads // heads.kv_heads // 16) * 16
        partial, splits = heads.kv_heads * head_rows * (heads.head_dim_pad + 2), 4 if heads.head_dim_pad > 128 else 2
        slots = (0 if self.crowded else self.room) + splits * sizes["kv_splits"]
        return {
            "q": strided("bf16", TOKENS, as_bf16(q.float().numpy()), STRIDE),
            "query_start": vector("i32", np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])),
            "kv_len": vector("i32", np.array([chunk.end for chunk in chunks])),
            "block_table": vector("i32", kv.block_table),
            "out": empty(self.out, TOKENS, tokens, self.width, STRIDE, -(-self.width // 64) * 64),
            "partials": matrix(np.full((slots, partial), np.nan, np.float32), "f32"),
            "counters": matrix(np.zeros((len(chunks), 8), np.int32), "i32"),
            **kv.pools.operands,
            **({"sinks": vector("f32", sinks_of(heads).numpy())} if self.sinks else {}),
        }

    def expected(self, chunk: Chunk) -> torch.Tensor:
        """The right result, float64 [tokens, heads, head_dim]."""
        group = self.heads.heads // self.heads.kv_heads
        q = chunk.text.q[chunk.start : chunk.end].double()
        k, v = (stored(x[: chunk.end], self.kv).repeat_interleave(group, dim=1) for x in (chunk.text.k, chunk.text.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(chunk.start, chunk.end)[:, None] - torch.arange(chunk.end)  # [query, key]
        seen = (distance >= 0) & (distance < self.window) if self.window else distance >= 0
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks:
            sinks = sinks_of(self.heads).double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : chunk.end]
        return torch.einsum("hqk,khd->qhd", weights, v)


def matrix(values: np.ndarray, dtype: str) -> Operand:
    columns = values.shape[1]
    return Operand(values, Matrix(dtype, Linear(), columns, columns, columns))


def sizes_of(chunks: Sequence[Chunk]) -> StepSizes:
    longest, tokens = max(chunk.end for chunk in chunks), sum(chunk.end - chunk.start for chunk in chunks)
    return step_sizes(
        tokens=tokens,
        sequences=len(chunks),
        logit_rows=len(chunks),
        kv_blocks=-(-longest // 32),
        kv_splits=-(-longest // SPLIT),
    )


def part(heads: Heads, start: int, end: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, end, seed), start, end)


def decode(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return part(heads, length - 1, length, seed)


def compiled(attentions: Sequence[Attending], sm: int = 80) -> Kernels:
    found = [instance for attention in attentions for instance in instances(attention.kernel, attention.launches())]
    return Kernels(list(dict.fromkeys(found)), sm)


def assert_each_site_is_missed(
    kernels: Kernels, sites: Sequence[str], attentions: Sequence[Attending], chunks: Sequence[Chunk]
) -> None:
    """Checks that each of these barriers, fences and waits is needed: without it, one of the calls has another result
    or an error in one of some orders of warps.
    """
    expected = {attention: attention.run(kernels, chunks) for attention in attentions}

    def notices(attention: Attending, schedule: str, seed: int) -> bool:
        try:
            results = attention.run(kernels, chunks, schedule, seed)
        except (EmulationError, AssertionError):
            return True
        return any(not np.array_equal(*both) for both in zip(results, expected[attention], strict=True))

    orders = [("forward", 0), ("reverse", 0), *(("random", seed) for seed in range(8))]
    for site in sites:
        with kernels.without(site):
            assert any(notices(attention, *order) for order in orders for attention in attentions), site


def assert_a_page_table_that_is_off_is_noticed(kernels: Kernels, attention: Attending, chunks: Sequence[Chunk]) -> None:
    """Checks that a wrong block table of one sequence spoils that sequence's results and no other's."""
    for row in range(len(chunks)):
        operands = attention.operands(chunks)
        table = operands["block_table"].values
        table[row] = np.roll(table[row], 1)
        errors = attention.errors(chunks, attention.run(kernels, chunks, operands=operands))
        wrong = [not error < CUDA_ATTENTION["bf16"] for error in errors]
        assert wrong == [index == row for index in range(len(chunks))]
