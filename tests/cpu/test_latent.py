"""Kernels of latent attention: head_gemm_bf16@1 against float64, latent_write@1 against the plane's layout, and
latent_attention@1 against paged_attention@1, bit for bit, where keys and values are the same vectors.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.cpu.test_attention import KV_BLOCKS, KV_SPLITS, SEQUENCE_ENDS, SEQUENCES, Attention
from tests.helpers.kernel_runner import ONE_COLUMN, TOKENS, KernelRunner, weight
from tests.helpers.paged_kv import BLOCK_SIZE, SPLIT, AttendedText, Chunk, Heads, PagedKv, PoolViews, bits, random_text
from tests.tolerances import BF16_ROUNDING

ISAS = _cpu.isa_names()


def latent_blocks(num_blocks: int, width: int) -> _cpu.CacheBlocks:
    return _cpu.CacheBlocks(1, num_blocks, BLOCK_SIZE, [("latent", 1, width, "bf16")])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "columns", "rows"), [(3, 24, 48), (5, 64, 16), (2, 192, 32)])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_each_head_meets_its_own_weight(isa: str, heads: int, columns: int, rows: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, heads * columns, generator=generator).bfloat16()
    weights = torch.randn(heads * rows, columns, generator=generator).bfloat16()
    expected = torch.einsum(
        "thk,hnk->thn", x.double().view(tokens, heads, -1), weights.double().view(heads, rows, -1)
    ).flatten(1)
    for dtype, rounding in (("f32", 0.0), ("bf16", BF16_ROUNDING)):
        results = []
        for threads in (1, 2):
            runner = KernelRunner(isa, threads, tokens=tokens)
            out = runner.buffer(tokens, heads * rows, dtype)
            operands = {"x": runner.filled(x), "weight": weight(weights, "r16"), "out": out}
            runner.call("head_gemm_bf16@1", operands, {"heads": heads})
            results.append(runner.read(out))
            assert dtype == "f32" or not runner.read_pad(out).any()
        error = (results[0].double() - expected).abs()
        assert (error <= rounding * expected.abs() + 1e-5 * expected.abs().max()).all()
        assert torch.equal(*results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("heads", "columns", "message"),
    [(7, 64, "multiple of 16 for each of"), (2, 64, "multiple of 16 for each of"), (3, 100, "'x' ends before")],
)
def test_weights_that_no_head_has(isa: str, heads: int, columns: int, message: str) -> None:
    runner = KernelRunner(isa, tokens=2)
    operands = {
        "x": runner.filled(torch.ones(2, columns * heads).bfloat16()),
        "weight": weight(torch.ones(48, columns).bfloat16(), "r16"),
        "out": runner.buffer(2, 48, "f32"),
    }
    with pytest.raises(ValueError, match=message):
        runner.call("head_gemm_bf16@1", operands, {"heads": heads})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "latent", "rope"), [(3, 48, 10), (1, 16, 64), (5, 64, 32)])
@pytest.mark.parametrize("tokens", [1, 37])
def test_latent_write(isa: str, heads: int, latent: int, rope: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    q, q_rope, c, k_rope, angles = (
        torch.randn(tokens, columns, generator=generator)
        for columns in (heads * latent, heads * rope, latent, rope, rope // 2)
    )
    cos, sin = angles.cos(), angles.sin()
    width, num_blocks = latent + rope, -(-tokens // BLOCK_SIZE) + 2
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:tokens].int().numpy()
    pools, expected_pools = latent_blocks(num_blocks, width), latent_blocks(num_blocks, width)
    for pool in (pools, expected_pools):
        pool.plane(0, "latent")[:] = 0x4321
    runner = KernelRunner(isa, 2, tokens=tokens, inputs={"slots.0": (slots, TOKENS, ONE_COLUMN)})
    out = runner.buffer(tokens, heads * width, "bf16")
    operands = {
        **{
            name: runner.filled(value)
            for name, value in (
                ("q", q),
                ("q_rope", q_rope),
                ("c", c),
                ("k_rope", k_rope),
                ("cos", cos),
                ("sin", sin),
            )
        },
        "slots": _cpu.OperandSpec.step("slots.0"),
        "latent": _cpu.OperandSpec.cache(pools, 0, "latent"),
        "q_out": out,
    }
    runner.call("latent_write@1", operands, {"heads": heads})

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        c_, s_ = cos[:, None], sin[:, None]
        return torch.cat([first * c_ - second * s_, second * c_ + first * s_], dim=-1)

    queries = torch.cat([q.view(tokens, heads, -1), turned(q_rope.view(tokens, heads, -1))], dim=-1)
    assert torch.equal(runner.read(out), queries.flatten(1).bfloat16().float())
    assert not runner.read_pad(out).any()
    keys = torch.cat([c[:, None], turned(k_rope[:, None])], dim=-1)
    write_latents(expected_pools, slots, keys)
    assert np.array_equal(pools.plane(0, "latent"), expected_pools.plane(0, "latent"))


def write_latents(pools: _cpu.CacheBlocks, slots: np.ndarray, keys: torch.Tensor) -> None:
    """keys: [tokens, 1, width], to their slots as kernel.h has a key plane."""
    plane = pools.plane(0, "latent")
    padded = torch.nn.functional.pad(keys, (0, -keys.shape[-1] % 32))
    view = plane.reshape(len(plane), BLOCK_SIZE // 16, padded.shape[-1] // 2, 16, 2)
    block, at = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    view[block, at // 16, :, at % 16] = bits(padded).reshape(len(slots), -1, 2)


class Latent:
    """Attention to one vector a position: as it is, and by paged_attention@1 with that as key and as value."""

    def __init__(self, heads: int, width: int, value_dim: int) -> None:
        self.heads, self.value_dim = Heads(heads, 1, width), value_dim

    def text(self, length: int, seed: int = 0) -> AttendedText:
        text = random_text(self.heads, length, seed)
        return AttendedText(text.q, text.k, text.k)

    def expected(self, isa: str, chunks: Sequence[Chunk]) -> list[torch.Tensor]:
        return [result[..., : self.value_dim] for result in Attention(self.heads).run(isa, chunks)]

    def run(self, isa: str, chunks: Sequence[Chunk], threads: int) -> list[torch.Tensor]:
        heads, lengths = self.heads, [chunk.end - chunk.start for chunk in chunks]
        kv = PagedKv(heads, chunks, 0, "bf16")  # for its block tables, and the keys as they lie there
        pools = latent_blocks(len(kv.pools.plane(0, "key")), heads.head_dim)
        keys = PoolViews(heads, kv.pools, 0, "bf16").keys
        pools.plane(0, "latent")[:] = keys.reshape(pools.plane(0, "latent").shape)
        inputs = {
            "query_start": (np.cumsum([0, *lengths]), SEQUENCE_ENDS, ONE_COLUMN),
            "kv_len": (np.array([chunk.end for chunk in chunks]), SEQUENCES, ONE_COLUMN),
            "block_table": (kv.block_table, SEQUENCES, KV_BLOCKS),
        }
        tokens, splits = sum(lengths), -(-max(chunk.end for chunk in chunks) // SPLIT)
        runner = KernelRunner(
            isa,
            threads,
            tokens=tokens,
            sequences=len(chunks),
            kv_blocks=kv.kv_blocks,
            kv_splits=splits,
            inputs=inputs,
            arena_bytes=1 << 24,
        )
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks])
        out = runner.buffer(tokens, heads.heads * self.value_dim, "f32")
        partials = runner.buffer(splits, heads.heads * (heads.head_dim_pad + 16), "f32", KV_SPLITS)
        operands = {
            "q": runner.filled(q.reshape(tokens, -1)),
            "latent": _cpu.OperandSpec.cache(pools, 0, "latent"),
            **{name: _cpu.OperandSpec.step(name) for name in inputs},
            "partials": partials,
            "out": out,
        }
        sizes = {"heads": heads.heads, "head_dim": heads.head_dim, "value_dim": self.value_dim}
        runner.call("latent_attention@1", operands, {**sizes, "scale": heads.head_dim**-0.5})
        return list(runner.read(out).reshape(tokens, heads.heads, self.value_dim).split(lengths))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("heads", "width", "value_dim"), [(3, 58, 48), (40, 80, 64), (16, 576, 512)])
def test_latent_attention_is_attention_to_the_same_keys_and_values(
    isa: str, heads: int, width: int, value_dim: int
) -> None:
    latent = Latent(heads, width, value_dim)
    chunks = [
        Chunk(latent.text(61), 0, 61),
        Chunk(latent.text(300, 1), 299, 300),
        Chunk(latent.text(270, 2), 250, 270),
    ]
    expected = latent.expected(isa, chunks)
    for threads in (1, 3):
        for wanted, given in zip(expected, latent.run(isa, chunks, threads), strict=True):
            assert torch.equal(given, wanted)


@pytest.mark.parametrize("isa", ISAS)
def test_threads_share_the_splits_of_a_long_sequence(isa: str) -> None:
    latent = Latent(4, 80, 64)
    chunks = [Chunk(latent.text(900), 899, 900)]
    assert torch.equal(latent.run(isa, chunks, 3)[0], latent.expected(isa, chunks)[0])
