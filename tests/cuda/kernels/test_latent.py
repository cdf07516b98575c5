"""Latent attention on CUDA, in emulation: products of heads with their own weights, and what goes into the plane."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from enginewright.builder.lower.pack import PackedForm, pack
from enginewright.errors import UnsupportedModelError
from enginewright.plan import Launch, Linear, linear, step_sizes
from enginewright.plugins.attention.latent_cuda import PARTIALS, ROWS
from enginewright.plugins.kernel import Call, Matrix
from tests.emulator.kernels import SCHEDULES, Kernels
from tests.helpers.cuda_attention import (
    Attending,
    assert_a_page_table_that_is_off_is_noticed,
    assert_each_site_is_missed,
    compiled,
    matrix,
    sizes_of,
)
from tests.helpers.cuda_call import POISON, CudaCall, Operand, as_bf16, empty, from_bf16, kernel_of, strided, vector
from tests.helpers.cuda_kv import BLOCK_SIZE, PagedKv, Pools
from tests.helpers.cuda_kv import POISON as NOT_WRITTEN
from tests.helpers.paged_kv import AttendedText, Chunk, Heads, random_text
from tests.tolerances import GEMM_BF16_OUT, GEMM_F32

TOKENS = linear(tokens=1)


def check_heads(heads: int, columns: int, rows: int, to: str) -> None:
    """Tiles of all sizes, and the same bits in each."""
    generator = torch.Generator().manual_seed(heads)
    x = torch.randn(70, heads * columns, generator=generator).bfloat16()
    weight = torch.randn(heads * rows, columns, generator=generator).bfloat16()
    by_head = x.double().view(70, heads, -1), weight.double().view(heads, rows, -1)
    expected = torch.einsum("thk,hnk->thn", *by_head).flatten(1)
    packed = np.frombuffer(b"".join(pack(weight, PackedForm("bf16", tuple(weight.shape), "r16"))), np.uint8).copy()
    width = heads * rows
    padded = -(-width // 64) * 64 if to == "bf16" else width

    def operands(tokens: int) -> dict[str, Operand]:
        return {
            "x": strided("bf16", TOKENS, as_bf16(x[:tokens].float().numpy()), heads * columns + 64),
            "weight": Operand(packed, Matrix("bf16", Linear(heads * rows), columns, columns, columns, "r16")),
            "out": empty(to, TOKENS, tokens, width, padded + 64, padded),
        }

    call = CudaCall(kernel_of("HeadGemm"), {role: one.matrix for role, one in operands(1).items()}, heads=heads)
    results = []
    for tokens in (1, 7, 33, 70):
        for schedule in SCHEDULES:
            given = operands(tokens)
            call.run(given, step_sizes(tokens=tokens, sequences=1, logit_rows=1), schedule)
            out = given["out"].values
            assert not out[:tokens, width:padded].any()
            for outside in (out[:tokens, padded:], out[tokens:]):
                np.testing.assert_array_equal(outside, np.full_like(outside, POISON[to]))
            results.append(torch.from_numpy(from_bf16(out) if to == "bf16" else out)[:tokens, :width])
    for result in results:
        assert torch.equal(result, results[-1][: len(result)])
    error = (results[-1].double() - expected).abs().max() / expected.abs().max()
    assert error < (GEMM_BF16_OUT if to == "bf16" else GEMM_F32)


def test_each_head_meets_its_own_weight() -> None:
    check_heads(3, 128, 144, "bf16")


@pytest.mark.parametrize(("heads", "latent", "rope"), [(3, 48, 10), (1, 16, 64)])
def test_latent_write(heads: int, latent: int, rope: int) -> None:
    """7 tokens to slots in no order, bit for bit."""
    random, width = np.random.default_rng(heads), latent + rope
    columns = {"q": heads * latent, "q_rope": heads * rope, "c": latent, "k_rope": rope}
    given = {role: random.standard_normal((7, count)).astype(np.float32) for role, count in columns.items()}
    angles = random.standard_normal((7, rope // 2)).astype(np.float32)
    tables = {"cos": np.cos(angles), "sin": np.sin(angles)}
    slots = random.permutation(3 * BLOCK_SIZE)[:7].astype(np.int32)
    padded = -(-heads * width // 64) * 64

    def turned(x: np.ndarray) -> np.ndarray:
        first, second = np.split(x.reshape(7, -1, rope), 2, -1)
        cos, sin = (tables[name][:, None] for name in ("cos", "sin"))
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    queries = np.concatenate((given["q"].reshape(7, heads, -1), turned(given["q_rope"])), -1)
    keys = torch.from_numpy(np.concatenate((given["c"][:, None], turned(given["k_rope"])), -1))
    expected = Pools("bf16", 3, 1, width)
    expected.write(slots, keys, keys)
    expected.memory[:, 0, 1] = NOT_WRITTEN
    for schedule in SCHEDULES:
        pools, out = Pools("bf16", 3, 1, width), empty("bf16", TOKENS, 7, heads * width, padded + 64, padded)
        operands = {
            **{role: strided("f32", TOKENS, x, x.shape[1] + 3) for role, x in (given | tables).items()},
            "latent": pools.operands["key"],
            "slots": vector("i32", slots),
            "q_out": out,
        }
        call = CudaCall(kernel_of("LatentWrite"), {role: one.matrix for role, one in operands.items()}, heads=heads)
        call.run(operands, step_sizes(tokens=7, sequences=1, logit_rows=1), schedule)
        np.testing.assert_array_equal(pools.memory, expected.memory)
        np.testing.assert_array_equal(out.values[:7, : heads * width], as_bf16(queries.reshape(7, -1)))
        assert not out.values[:7, heads * width : padded].any()
        assert (out.values[:7, padded:] == POISON["bf16"]).all() and (out.values[7:] == POISON["bf16"]).all()


@dataclass(frozen=True)
class Latent(Attending):
    kernel = kernel_of("LatentPagedAttention")
    count: int  # heads
    value_dim: int
    rope_dim: int
    out: str = "f32"
    crowded: bool = False
    kv = "bf16"

    @property
    def heads(self) -> Heads:  # type: ignore[override]
        return Heads(self.count, 1, self.value_dim + self.rope_dim)

    @property
    def width(self) -> int:
        return self.count * self.value_dim

    @property
    def room(self) -> int:
        return PARTIALS // self.row_tiles

    @property
    def row_tiles(self) -> int:
        return -(-self.count // ROWS)

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def chunk(self, start: int, end: int, seed: int = 0) -> Chunk:
        text = random_text(self.heads, end, seed)
        return Chunk(AttendedText(text.q, text.k, text.k), start, end)

    def launches(self) -> tuple[Launch, ...]:
        chunks, attributes = [self.chunk(0, 1)], {"heads": self.count, "head_dim": self.heads.head_dim}
        matrices = {role: one.matrix for role, one in self.operands(chunks).items()}
        attributes |= {"value_dim": self.value_dim, "scale": self.scale}
        return self.as_crowded(
            self.kernel.launches(Call(matrices, attributes, ("sm_90a",), dims=sizes_of(chunks).dims))
        )

    def operands(self, chunks: Sequence[Chunk]) -> dict[str, Operand]:
        kv, sizes, padded = PagedKv(self.heads, chunks, 0, "bf16"), sizes_of(chunks), -(-self.width // 64) * 64
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks]).flatten(1)
        slots = (0 if self.crowded else self.room) + sizes["kv_splits"]
        columns = self.row_tiles * ROWS * (-(-self.value_dim // 16) * 16 + 2)
        return {
            "q": strided("bf16", TOKENS, as_bf16(q.float().numpy()), q.shape[1] + 64),
            "latent": kv.pools.operands["key"],
            "query_start": vector("i32", np.cumsum([0, *(chunk.end - chunk.start for chunk in chunks)])),
            "kv_len": vector("i32", np.array([chunk.end for chunk in chunks])),
            "block_table": vector("i32", kv.block_table),
            "out": empty(self.out, TOKENS, sizes.tokens, self.width, padded + 64, padded),
            "partials": matrix(np.full((slots, columns), np.nan, np.float32), "f32"),
        }

    def expected(self, chunk: Chunk) -> torch.Tensor:
        keys = chunk.text.k[:, 0].double()
        scores = torch.einsum("qhd,kd->hqk", chunk.text.q[chunk.start :].double(), keys) * self.scale
        seen = torch.arange(chunk.start, chunk.end)[:, None] >= torch.arange(chunk.end)  # [query, key]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,kd->qhd", weights, keys[:, : self.value_dim])


SMALL = Latent(3, 40, 10)  # groups of 16 columns that not every warp has, the last with columns of the other kind
WIDE = Latent(40, 160, 20, "bf16")  # two tiles of rows a token, two groups of columns of some warps
CROWDED = replace(SMALL, crowded=True)


@functools.cache
def library() -> Kernels:
    """The kernels of all tests of attention here, compiled at once."""
    return compiled([SMALL, WIDE, CROWDED])


@pytest.mark.parametrize("latent", [SMALL, CROWDED, WIDE], ids=str)
def test_mixed_batches(latent: Latent) -> None:
    """Lengths around a tile's and a split's, chunks that begin in the middle of blocks, decodes among prompts."""
    spans = [(0, 33), (0, 1), (250, 260), (256, 257), (30, 32), (610, 611), (255, 256)]
    if latent == WIDE:  # fewer rows take as long
        del spans[0], spans[1]
    latent.check(library(), [latent.chunk(*span, seed) for seed, span in enumerate(spans)])


def check_bits(latent: Latent, kernels: Kernels) -> None:
    """The last tokens alone, in chunks and among others, and many at once, whole or taken apart: all the same."""
    (prompt,) = latent.run(kernels, [latent.chunk(250, 281)])
    for start in (280, 276, 263):
        chunk = latent.chunk(start, 281)
        others = [latent.chunk(299, 300, 1), chunk, latent.chunk(0, 40, 2)]
        for one in (latent, replace(latent, crowded=True)):
            np.testing.assert_array_equal(one.run(kernels, [chunk])[0], prompt[start - 250 :])
            np.testing.assert_array_equal(one.run(kernels, others)[1], prompt[start - 250 :])


def test_bits_do_not_depend_on_the_batch() -> None:
    check_bits(SMALL, library())


@pytest.mark.parametrize("latent", [Latent(2, 520, 64), Latent(2, 512, 130)], ids=str)
def test_latent_vectors_that_are_too_wide_are_refused(latent: Latent) -> None:
    with pytest.raises(
        UnsupportedModelError, match=rf"kv_lora_rank = {latent.value_dim} and .*\nBuild it for cpu only"
    ):
        latent.launches()


STEP = [SMALL.chunk(295, 300), SMALL.chunk(130, 150), SMALL.chunk(610, 611, 1)]


@pytest.mark.parametrize("latent", [SMALL, CROWDED], ids=str)
def test_no_schedule_changes_bits(latent: Latent) -> None:
    results = latent.run(library(), STEP)
    for schedule in SCHEDULES[1:]:
        for result, again in zip(results, latent.run(library(), STEP, schedule), strict=True):
            np.testing.assert_array_equal(result, again)


def test_every_barrier_is_needed() -> None:
    for latent in (SMALL, CROWDED):
        latent.run(library(), STEP)
    sites = [site for site in library().sites if site.startswith("latent_")]
    assert not sites or len(sites) == 5  # a GPU has none
    assert_each_site_is_missed(library(), sites, [SMALL, CROWDED], STEP)


def test_a_page_table_that_is_off_by_one_is_noticed() -> None:
    assert_a_page_table_that_is_off_is_noticed(library(), SMALL, [SMALL.chunk(299, 300), SMALL.chunk(140, 150)])
