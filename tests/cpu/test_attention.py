"""paged_attention@1 against float64, and its promise that results depend on nothing but the sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from enginewright import _cpu
from enginewright.plugins.attention.masked_attention import EVERYTHING
from tests.helpers.breadth import every_third
from tests.helpers.kernel_runner import ITEM_BYTES, ONE_COLUMN, KernelRunner, weight
from tests.helpers.paged_kv import (
    KV_DTYPES,
    SPLIT,
    AttendedText,
    Chunk,
    Heads,
    PagedKv,
    kv_blocks,
    kv_operands,
    random_text,
    sinks_of,
    stored,
    text,
    whole,
)
from tests.tolerances import ATTENTION, ATTENTION_UNIFORM, BF16_ROUNDING

ISAS = _cpu.isa_names()
SEQUENCES, SEQUENCE_ENDS, KV_BLOCKS, KV_SPLITS = (
    (0, 0, 1, 0, 0, 0),
    (1, 0, 1, 0, 0, 0),
    (0, 0, 0, 0, 1, 0),
    (0, 0, 0, 0, 0, 1),
)
SMOL = Heads(9, 3, 64)
LENGTHS = [1, 31, 255, 256, 257, 700]


@dataclass(frozen=True)
class Attention:
    heads: Heads
    window: int = 0
    softcap: float = 0.0
    kv: str = "bf16"  # what the pools hold
    sinks: bool = False
    lookahead: int = 0  # positions after its own that a query sees

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def run(self, isa: str, chunks: Sequence[Chunk], threads: int = 1, dtype: str = "f32") -> list[torch.Tensor]:
        return self.run_and_look(isa, chunks, threads, dtype)[0]

    def run_and_look(
        self, isa: str, chunks: Sequence[Chunk], threads: int, dtype: str = "f32"
    ) -> tuple[list[torch.Tensor], bool]:
        """The result of each chunk, float32 [tokens, heads, head_dim], and whether splits were shared by threads."""
        heads, kv = self.heads, PagedKv(self.heads, chunks, self.window, self.kv)
        lengths = [chunk.end - chunk.start for chunk in chunks]
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
            arena_bytes=1 << 23,
        )
        width = heads.heads * heads.head_dim
        q = torch.cat([chunk.text.q[chunk.start : chunk.end] for chunk in chunks])
        out = runner.buffer(tokens, width, dtype)
        partials = runner.buffer(splits, heads.heads * (heads.head_dim_pad + 16), "f32", KV_SPLITS)
        operands = {
            "q": runner.filled(q.reshape(tokens, width)),
            **kv_operands(kv.pools, 0),
            "query_start": _cpu.OperandSpec.step("query_start"),
            "kv_len": _cpu.OperandSpec.step("kv_len"),
            "block_table": _cpu.OperandSpec.step("block_table"),
            "partials": partials,
            "out": out,
        }
        attributes: dict[str, int | float | str] = {
            "heads": heads.heads,
            "kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "scale": self.scale,
            "window": self.window,
            "lookahead": self.lookahead,
            "softcap": self.softcap,
        }
        if self.sinks:
            operands["sinks"] = weight(sinks_of(heads))
        runner.call("paged_attention@1", operands, attributes)
        first = runner.read(out)
        size = tokens * out.stride * ITEM_BYTES[dtype]
        runner.executor.buffer(out.offset_bytes, 1, size, size, "i8")[:] = -1  # NaN again
        runner.run()
        assert torch.equal(first.view(torch.int32), runner.read(out).view(torch.int32)), (
            "a second step gives other bits"
        )
        pad = runner.read_pad(out)
        assert not pad.any() if dtype == "bf16" else pad.isnan().all()
        shared = not runner.read(partials).isnan().all()
        return list(first.reshape(tokens, heads.heads, heads.head_dim).split(lengths)), shared

    def expected(self, chunk: Chunk) -> torch.Tensor:
        """float64 [tokens, heads, head_dim]"""
        group = self.heads.heads // self.heads.kv_heads
        q = stored(chunk.text.q[chunk.start : chunk.end], "i8" if self.kv == "i8" else "bf16")
        k, v = (stored(x[: chunk.end], self.kv).repeat_interleave(group, dim=1) for x in (chunk.text.k, chunk.text.v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = torch.arange(chunk.start, chunk.end)[:, None] - torch.arange(chunk.end)  # [query, key]
        seen = (distance >= -self.lookahead) & (distance < (self.window or len(chunk.text.k)))
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks:
            sinks = sinks_of(self.heads).double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(dim=-1)[..., : chunk.end]
        return torch.einsum("hqk,khd->qhd", weights, v)

    def check(self, isa: str, chunks: Sequence[Chunk], threads: int = 1, tolerance: float | None = None) -> None:
        for chunk, result in zip(chunks, self.run(isa, chunks, threads), strict=True):
            error = (result.double() - self.expected(chunk)).abs().max() / chunk.text.v.double().abs().max()
            assert float(error) < (tolerance or ATTENTION[self.kv]), f"tokens {chunk.start} … {chunk.end - 1}"


COUNTS = [(9, 3), (4, 4), (7, 1), (8, 2)]
DIMS = [16, 22, 64, 80, 128, 272]
EACH_ISA = [(kv, isa) for kv in KV_DTYPES for isa in ISAS]


def with_each_isa(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The cases with each dtype of KV and each instruction set."""
    return [(*case, *own) for case in cases for own in EACH_ISA]


def some_of(cases: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """A third of `with_each_isa`: each case, and each dtype with each instruction set. tests/long has the others."""
    return [(*case, *own) for case, own in every_third(cases, EACH_ISA)]


SHAPES = [(counts, head_dim) for head_dim in DIMS for counts in COUNTS]
SOME_SHAPES = some_of([(counts, head_dim) for head_dim, counts in every_third(DIMS, COUNTS)])
EACH_LENGTH = [(length,) for length in LENGTHS]
CAPS = [(window, softcap) for window in (1, 17, 300) for softcap in (0.0, 5.0)]
VISIBLE = [(window,) for window in (0, 1, 17, 256, 300)]
LOOKAHEADS = [(0, EVERYTHING), (0, 5), (9, 8), (300, 299)]


def decode(heads: Heads, length: int, seed: int = 0) -> Chunk:
    return Chunk(text(heads, length, seed), length - 1, length)


@pytest.mark.parametrize(("counts", "head_dim", "kv", "isa"), SOME_SHAPES, ids=str)
def test_heads_of_all_shapes(isa: str, kv: str, counts: tuple[int, int], head_dim: int) -> None:
    heads = Heads(*counts, head_dim)
    chunks = [whole(heads, 61), decode(heads, 300), Chunk(text(heads, 270, 1), 250, 270)]
    Attention(heads, kv=kv).check(isa, chunks)


@pytest.mark.parametrize(("length", "kv", "isa"), some_of(EACH_LENGTH))
def test_lengths(isa: str, kv: str, length: int) -> None:
    chunks = [decode(SMOL, length), Chunk(text(SMOL, length, 1), length * 2 // 3, length)]
    Attention(SMOL, kv=kv).check(isa, chunks, threads=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (17, 3.0)])
def test_sinks(isa: str, kv: str, window: int, softcap: float) -> None:
    """Sinks are right whether one thread has a sequence's splits or all share them; bits are the same in any chunk."""
    attention = Attention(SMOL, window, softcap, kv, sinks=True)
    attention.check(isa, [whole(SMOL, 61), decode(SMOL, 600), Chunk(text(SMOL, 270, 1), 250, 270)])
    (alone,), shared = attention.run_and_look(isa, [decode(SMOL, 600)], threads=3)
    assert shared or window
    (chunk,) = attention.run(isa, [Chunk(text(SMOL, 600), 590, 600)])
    assert torch.equal(alone, chunk[-1:])
    plain = Attention(SMOL, window, softcap, kv).run(isa, [decode(SMOL, 600)])[0]
    assert float((plain - alone)[:, -1].abs().max()) > 0.1


@pytest.mark.parametrize(("window", "softcap", "kv", "isa"), some_of(CAPS))
def test_windows_and_soft_caps(isa: str, kv: str, window: int, softcap: float) -> None:
    heads = Heads(4, 2, 40)
    chunks = [decode(heads, 700), whole(heads, 280), Chunk(text(heads, 530, 1), 500, 530), decode(heads, 1)]
    Attention(heads, window, softcap, kv=kv).check(isa, chunks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_a_soft_cap_without_a_window(isa: str, kv: str) -> None:
    heads = Heads(4, 4, 16)
    Attention(heads, softcap=3.0, kv=kv).check(isa, [whole(heads, 90), decode(heads, 300)])


@pytest.mark.parametrize(("window", "kv", "isa"), some_of(VISIBLE))
def test_exactly_the_visible_positions_count(isa: str, kv: str, window: int) -> None:
    """Queries of zero give every visible position exactly the same weight, so that the result is the mean of V."""
    heads = Heads(6, 2, 16)
    base = text(heads, 600)
    flat = AttendedText(torch.zeros_like(base.q), base.k, base.v)
    chunks = [Chunk(flat, 0, 290), Chunk(flat, 599, 600), Chunk(flat, 255, 258), Chunk(flat, 500, 513)]
    Attention(heads, window, kv=kv).check(isa, chunks, threads=2, tolerance=ATTENTION_UNIFORM[kv])


@pytest.mark.parametrize(("window", "lookahead", "kv", "isa"), some_of(LOOKAHEADS))
def test_positions_after_a_query(isa: str, kv: str, window: int, lookahead: int) -> None:
    """Whole texts, with the same bits alone."""
    heads = Heads(6, 2, 16)
    chunks = [whole(heads, length, length) for length in (1, 2, 31, 330)]
    attention = Attention(heads, window, kv=kv, lookahead=lookahead)
    attention.check(isa, chunks, threads=2)
    for chunk, together in zip(chunks, attention.run(isa, chunks, threads=2), strict=True):
        assert torch.equal(together, attention.run(isa, [chunk])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("counts", [(40, 1), (64, 2)], ids=str)
def test_groups_larger_than_a_tile(isa: str, kv: str, counts: tuple[int, int]) -> None:
    heads = Heads(*counts, 16)
    Attention(heads, kv=kv).check(isa, [decode(heads, 700), whole(heads, 7)], threads=3)
    result, shared = Attention(heads, kv=kv).run_and_look(isa, [decode(heads, 700)], threads=3)
    assert shared
    assert torch.equal(result[0], Attention(heads, kv=kv).run(isa, [decode(heads, 700)])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_large_scores(isa: str, kv: str) -> None:
    """Scores of hundreds: e^s would overflow, and whole splits weigh nothing."""
    heads = Heads(2, 1, 32)
    chunk = Chunk(random_text(heads, 600, seed=5, spread=100.0), 580, 600)
    Attention(heads, kv=kv).check(isa, [chunk])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64])
def test_bf16_output_is_the_rounded_f32(isa: str, kv: str, head_dim: int) -> None:
    heads = Heads(5, 5, head_dim)
    attention, chunks = Attention(heads, kv=kv), [whole(heads, 37), decode(heads, 300)]
    for exact, rounded in zip(attention.run(isa, chunks), attention.run(isa, chunks, dtype="bf16"), strict=True):
        assert torch.equal(exact.bfloat16().float(), rounded)
        assert ((exact - rounded).abs() <= BF16_ROUNDING * exact.abs()).all()


def cuts(chunk: Chunk, *sizes: int) -> list[Chunk]:
    """The chunk in pieces of these sizes, the last one again and again."""
    pieces, start = [], chunk.start
    while start < chunk.end:
        size = sizes[min(len(pieces), len(sizes) - 1)]
        pieces.append(Chunk(chunk.text, start, min(start + size, chunk.end)))
        start += size
    return pieces


WINDOWS = [(SMOL, 300), (Heads(7, 1, 40), 0), (Heads(7, 1, 40), 17)]
CUT = [(heads, window, kv, isa) for heads, window in WINDOWS for kv, isa in EACH_ISA]
SOME_CUT = [(heads, window, kv, isa) for (heads, window), (kv, isa) in every_third(WINDOWS, EACH_ISA)]


@pytest.mark.parametrize(("heads", "window", "kv", "isa"), SOME_CUT, ids=str)
def test_bits_do_not_depend_on_cuts_company_or_threads(isa: str, kv: str, window: int, heads: Heads) -> None:
    attention, length = Attention(heads, window, kv=kv), 561
    alone = attention.run(isa, [whole(heads, length)])[0]

    for sizes in [(1,), (256, 256, 7), (3, 250, 61), (255, 2, 100)]:
        pieces = cuts(whole(heads, length), *sizes)[-40:]
        together = torch.cat(attention.run(isa, pieces, threads=2))
        assert torch.equal(together, alone[pieces[0].start :]), f"cut in {sizes}"

    others = [decode(heads, 40 + 19 * seed, seed) for seed in range(1, 29)] + [whole(heads, 100, 30)]
    batch = [*others, decode(heads, length), Chunk(text(heads, length), 300, 333), decode(heads, 513)]
    for threads in (1, 3):
        results = attention.run(isa, batch, threads)
        assert torch.equal(results[-3], alone[-1:])
        assert torch.equal(results[-2], alone[300:333])
        assert torch.equal(attention.run(isa, [whole(heads, length)], threads)[0], alone)


SPLIT_CASES = [(window, *case) for case in EACH_ISA for window in (0, 300)]
SOME_SPLIT_CASES = [case for n, case in enumerate(SPLIT_CASES) if n % 4 in (0, 3)]  # each ISA and KV dtype


@pytest.mark.parametrize(("window", "kv", "isa"), SOME_SPLIT_CASES)
def test_shared_splits_have_the_same_bits(isa: str, kv: str, window: int) -> None:
    attention = Attention(SMOL, window, kv=kv)
    chunks = [decode(SMOL, 700), decode(SMOL, 1000, 1), decode(SMOL, 20, 2)]
    alone, shared = attention.run_and_look(isa, chunks, threads=1)
    assert not shared
    for threads in (2, 3, 7):
        results, shared = attention.run_and_look(isa, chunks, threads)
        assert shared
        assert all(torch.equal(a, b) for a, b in zip(results, alone, strict=True))
    crowd = [*chunks, *(decode(SMOL, 90 + seed, seed) for seed in range(3, 60))]
    results, shared = attention.run_and_look(isa, [chunks[0]] + crowd[3:] * 3, threads=2)
    assert not shared
    assert torch.equal(results[0], alone[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
def test_nan_stays_in_its_sequence(isa: str, kv: str) -> None:
    bad = random_text(SMOL, 300, seed=9)
    bad.q[299, 4, 7] = torch.nan
    result = Attention(SMOL, kv=kv).run(isa, [decode(SMOL, 270), Chunk(bad, 290, 300), whole(SMOL, 31)], threads=2)
    assert result[1][9, 4].isnan().all()
    result[1][9, 4] = 0
    assert all(not part.isnan().any() for part in result)
    assert torch.equal(result[0], Attention(SMOL, kv=kv).run(isa, [decode(SMOL, 270)])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("damaged", ["k", "v"])
def test_a_damaged_row_of_kv_shows_where_it_is_seen(isa: str, kv: str, damaged: str) -> None:
    """The row is of one kv head and position; codes have no NaN but in their scale. Earlier queries have weight 0 for
    its V, and may get 0 * NaN: all this is one sequence.
    """
    bad = random_text(SMOL, 300, seed=9)
    getattr(bad, damaged)[295, 1] = torch.nan
    result = Attention(SMOL, kv=kv).run(isa, [decode(SMOL, 270), Chunk(bad, 290, 300), whole(SMOL, 31)], threads=2)
    assert result[1][5:, 3:6].isnan().all()
    result[1][5 if damaged == "k" else 0 :, 3:6] = 0
    assert all(not part.isnan().any() for part in result)
    assert torch.equal(result[0], Attention(SMOL, kv=kv).run(isa, [decode(SMOL, 270)])[0])


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("does not divide 'heads'", {"kv_heads": 2}),
        ("heads of another shape", {"head_dim": 32, "heads": 18}),
        ("even 'head_dim'", {"head_dim": 3, "heads": 192}),
        ("576 columns, not 512", {"heads": 9, "width": 512}),
        ("must not be negative", {"softcap": -1.0}),
        ("'window' must be in", {"window": -1}),
        ("'lookahead' must be in", {"lookahead": -1}),
        ("'partials' must have", {"partials": 720 - 64}),
        ("'scale' must be finite", {"scale": float("nan")}),
    ],
)
def test_malformed_operands_are_refused(message: str, change: dict[str, object]) -> None:
    inputs = {
        "query_start": (np.array([0, 1]), SEQUENCE_ENDS, ONE_COLUMN),
        "kv_len": (np.array([1]), SEQUENCES, ONE_COLUMN),
        "block_table": (np.zeros((1, 1), np.int32), SEQUENCES, KV_BLOCKS),
    }
    runner = KernelRunner("portable", kv_blocks=1, kv_splits=1, inputs=inputs)
    width = int(str(change.pop("width", 576)))
    linear = change.pop("linear", KV_SPLITS)
    operands = {
        "q": runner.filled(torch.zeros(1, width).bfloat16()),
        **kv_operands(kv_blocks(1, 1, 3, 64), 0),
        **{name: _cpu.OperandSpec.step(name) for name in inputs},
        "partials": runner.buffer(1, int(str(change.pop("partials", 720))), "f32", linear),  # type: ignore[arg-type]
        "out": runner.buffer(1, width, "f32"),
    }
    attributes = {"heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125, "window": 0, "softcap": 0.0, **change}
    with pytest.raises(ValueError, match=message):
        runner.call("paged_attention@1", operands, attributes)  # type: ignore[arg-type]


def test_planes_of_different_shapes_are_refused() -> None:
    """Keys and values are of one form, whichever caches they come from."""
    inputs = {
        "query_start": (np.array([0, 1]), SEQUENCE_ENDS, ONE_COLUMN),
        "kv_len": (np.array([1]), SEQUENCES, ONE_COLUMN),
        "block_table": (np.zeros((1, 1), np.int32), SEQUENCES, KV_BLOCKS),
    }
    attributes = {"heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125, "window": 0, "softcap": 0.0}
    key = kv_operands(kv_blocks(1, 2, 3, 64), 0)
    for value in (kv_blocks(1, 3, 3, 64), kv_blocks(2, 2, 3, 64), kv_blocks(1, 2, 3, 64, "i8"), kv_blocks(1, 2, 1, 64)):
        runner = KernelRunner("portable", kv_blocks=1, kv_splits=1, inputs=inputs)
        operands = {
            "q": runner.filled(torch.zeros(1, 576).bfloat16()),
            **key,
            "value": kv_operands(value, 0)["value"],
            **{name: _cpu.OperandSpec.step(name) for name in inputs},
            "partials": runner.buffer(1, 720, "f32", KV_SPLITS),
            "out": runner.buffer(1, 576, "f32"),
        }
        with pytest.raises(ValueError, match="planes of different shapes"):
            runner.call("paged_attention@1", operands, dict(attributes))


def test_more_splits_than_rows_for_them_are_refused() -> None:
    """`partials` with rows of another dim, which are too few in this step."""
    inputs = {
        "query_start": (np.array([0, 1]), SEQUENCE_ENDS, ONE_COLUMN),
        "kv_len": (np.array([257]), SEQUENCES, ONE_COLUMN),
        "block_table": (np.zeros((1, 9), np.int32), SEQUENCES, KV_BLOCKS),
    }
    runner = KernelRunner("portable", kv_blocks=9, kv_splits=2, inputs=inputs)
    operands = {
        "q": runner.filled(torch.zeros(1, 576).bfloat16()),
        **kv_operands(kv_blocks(1, 1, 3, 64), 0),
        **{name: _cpu.OperandSpec.step(name) for name in inputs},
        "partials": runner.buffer(1, 720, "f32", SEQUENCES),
        "out": runner.buffer(1, 576, "f32"),
    }
    attributes = {"heads": 9, "kv_heads": 3, "head_dim": 64, "scale": 0.125, "window": 0, "softcap": 0.0}
    with pytest.raises(ValueError, match="more splits than 'partials' has rows"):
        runner.call("paged_attention@1", operands, dict(attributes))
