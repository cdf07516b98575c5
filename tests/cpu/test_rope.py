"""rope_table@1 against float64, rope_kv_write@1 against the layout of the KV pools."""

import numpy as np
import pytest
import torch

from enginewright import _cpu
from tests.helpers.kernel_runner import ONE_COLUMN, TOKENS, KernelRunner, weight
from tests.helpers.paged_kv import (
    BLOCK_SIZE,
    KV_CODES,
    KV_DTYPES,
    Heads,
    PoolViews,
    kv_blocks,
    kv_operands,
    rotated,
)
from tests.tolerances import ROPE_TABLE

ISAS = _cpu.isa_names()
POISON = 0x43


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("columns", "scale"), [(1, 1.0), (20, 1.3465736), (64, 0.5)])
def test_rope_table(isa: str, columns: int, scale: float) -> None:
    positions = np.array([0, 1, 2, 77, 8191, 131071, 1000003, 2**24 - 1], np.int32)
    inv_freq = 10000.0 ** (-torch.arange(columns, dtype=torch.float32) / columns)
    runner = KernelRunner(isa, 3, tokens=len(positions), inputs={"positions": (positions, TOKENS, ONE_COLUMN)})
    cos, sin = (runner.buffer(len(positions), columns, "f32") for _ in range(2))
    operands = {
        "positions": _cpu.OperandSpec.step("positions"),
        "inv_freq": weight(inv_freq),
        "cos": cos,
        "sin": sin,
    }
    runner.call("rope_table@1", operands, {"scale": scale})
    angles = (torch.from_numpy(positions).float()[:, None] * inv_freq).double()  # the product is fp32
    for table, expected in ((cos, angles.cos()), (sin, angles.sin())):
        assert float((runner.read(table) - expected * scale).abs().max()) < ROPE_TABLE * scale


class Write:
    """Some tokens' q, k, v, their angles, and the slots they go to."""

    def __init__(self, heads: Heads, tokens: int, rotated: int, kv: str = "bf16") -> None:
        self.heads, self.tokens, self.rotated, self.kv = heads, tokens, rotated, kv
        generator = torch.Generator().manual_seed(tokens)
        counts = (heads.heads, heads.kv_heads, heads.kv_heads)
        self.qkv = torch.randn(tokens, sum(counts) * heads.head_dim, generator=generator)
        self.q, self.k, self.v = self.qkv.reshape(tokens, -1, heads.head_dim).split(counts, dim=1)
        angles = torch.randn(tokens, rotated // 2, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()
        blocks = -(-tokens // BLOCK_SIZE) + 2
        self.slots = torch.randperm(blocks * BLOCK_SIZE, generator=generator)[:tokens].int().numpy()
        self.pools = self.poisoned_pools(blocks)

    def poisoned_pools(self, blocks: int) -> _cpu.CacheBlocks:
        pools = kv_blocks(2, blocks, self.heads.kv_heads, self.heads.head_dim, self.kv)
        for layer in (0, 1):
            pools.plane(layer, "key")[:] = POISON
            pools.plane(layer, "value")[:] = POISON
        return pools

    def run(self, isa: str, threads: int = 1, queries_alone: bool = False) -> torch.Tensor:
        """q_out [tokens, heads, head_dim]; k and v go to layer 1 of `pools`."""
        heads = self.heads
        runner = KernelRunner(isa, threads, tokens=self.tokens, inputs={"slots.0": (self.slots, TOKENS, ONE_COLUMN)})
        self.fill_scratch(runner)
        fused, out = runner.filled(self.qkv), runner.buffer(self.tokens, self.q[0].numel(), "bf16")
        q_columns, kv_columns = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        operands = {
            "q": fused.view(0, q_columns),
            "k": fused.view(q_columns, kv_columns),
            "v": fused.view(q_columns + kv_columns, kv_columns),
            **({"cos": runner.filled(self.cos), "sin": runner.filled(self.sin)} if self.rotated else {}),
            "slots": _cpu.OperandSpec.step("slots.0"),
            **kv_operands(self.pools, 1),
            "q_out": out,
        }
        attributes = {"heads": heads.heads, "kv_heads": heads.kv_heads, "head_dim": heads.head_dim}
        if queries_alone:
            operands = {role: operand for role, operand in operands.items() if role not in ("k", "v", "slots")}
        runner.call("rope_queries@1" if queries_alone else "rope_kv_write@1", operands, dict(attributes))
        assert not runner.read_pad(out).any()
        return runner.read(out).reshape(self.tokens, heads.heads, heads.head_dim)

    def fill_scratch(self, runner: KernelRunner) -> None:
        """A kernel before this one that leaves numbers in the threads' scratch."""
        ones = torch.ones(16 * 8, 512, dtype=torch.int8)
        operands = {
            "x": runner.filled(torch.ones(self.tokens, 512).bfloat16()),
            "weight": weight(ones, "r16"),
            "scale": weight(torch.ones(len(ones))),
            "out": runner.buffer(self.tokens, len(ones), "f32"),
        }
        runner.call("gemm_w8a16@1", operands, {"epilogue": "none"})

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        """Rotates in fp32 and in transformers' order; each product and sum is rounded, so even the bits agree."""
        cos, sin = (torch.cat((table, table), dim=-1)[:, None] for table in (self.cos, self.sin))
        first, second = x[..., : self.rotated].chunk(2, dim=-1)
        turned = x[..., : self.rotated] * cos + torch.cat((-second, first), dim=-1) * sin
        turned = torch.cat((turned, x[..., self.rotated :]), dim=-1)
        return rotated(turned) if self.kv == "u4" else turned

    def check(self, isa: str, threads: int = 1) -> None:
        assert torch.equal(self.run(isa, threads), self.turned(self.q).bfloat16().float())
        expected = self.poisoned_pools(len(self.pools.plane(0, "key")))
        PoolViews(self.heads, expected, 1, self.kv).write(self.slots, self.turned(self.k), self.v)
        for layer in (0, 1):  # other slots and layers are as they were
            assert np.array_equal(self.pools.plane(layer, "key"), expected.plane(layer, "key"))
            assert np.array_equal(self.pools.plane(layer, "value"), expected.plane(layer, "value"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 20, 40, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("counts", [(9, 3), (4, 4), (7, 1)], ids=str)
def test_rope_kv_write(isa: str, kv: str, head_dim: int, counts: tuple[int, int]) -> None:
    Write(Heads(*counts, head_dim), 37, head_dim, kv).check(isa)
    Write(Heads(*counts, head_dim), 1, head_dim, kv).check(isa, threads=3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("rotated", [0, 2, 6, 32, 50])
def test_the_first_dims_turn_alone(isa: str, kv: str, rotated: int) -> None:
    Write(Heads(4, 2, 50), 19, rotated, kv).check(isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize(("head_dim", "rotated"), [(50, 0), (50, 32), (512, 512)])
def test_queries_alone(isa: str, kv: str, head_dim: int, rotated: int) -> None:
    """Queries alone, for KV that another layer has written, have the same bits, and no KV is written."""
    write = Write(Heads(4, 2, head_dim), 19, rotated, kv)
    before = write.poisoned_pools(len(write.pools.plane(0, "key")))
    assert torch.equal(write.run(isa, 3, queries_alone=True), write.turned(write.q).bfloat16().float())
    for layer in (0, 1):
        for plane in ("key", "value"):
            assert np.array_equal(write.pools.plane(layer, plane), before.plane(layer, plane))
    write.check(isa)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("threads", [2, 3, 8])
def test_threads_do_not_disturb_each_other(isa: str, kv: str, threads: int) -> None:
    """Neighbours in a line of K or V are different threads' tokens: all slots of some blocks in their order."""
    write = Write(Heads(2, 1, 16), 5 * BLOCK_SIZE, 16, kv)
    write.slots = np.arange(5 * BLOCK_SIZE, dtype=np.int32)
    for _ in range(20):
        write.check(isa, threads)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_CODES)
def test_rows_of_codes_that_are_not_finite_have_no_scale(isa: str, kv: str) -> None:
    """Rows that are not finite have a NaN scale, and their codes mean nothing; rows of zeros have scale 0."""
    heads = Heads(4, 2, 20)
    write = Write(heads, 6, 20, kv)
    write.slots = np.arange(6, dtype=np.int32)
    write.k[1, 0, 3], write.k[2, 1, 19], write.v[3, 0, 7] = torch.nan, torch.inf, -torch.inf  # views of qkv
    write.k[4, 1] = 0
    write.run(isa)
    views = PoolViews(heads, write.pools, 1, write.kv)
    lost = [
        [np.isnan(scales[0, :, :6]).nonzero()[i].tolist() for i in (1, 0)]
        for scales in (views.key_scales, views.value_scales)
    ]
    assert lost == [[[1, 2], [0, 1]], [[3], [0]]]
    assert views.key_scales[0, 1, 4] == 0 and not (views.keys[0, 1, 0, :, 4] & 127).any()  # a zero may have a sign


@pytest.mark.parametrize("isa", ISAS)
def test_groups_of_4_bits_at_the_limits(isa: str) -> None:
    """In groups of 32 numbers, one that is not finite loses its group alone, and in keys' rotation all of a block.
    Equal numbers are kept exactly, and numbers that are too small, absolutely or next to others, become 0.
    """
    heads = Heads(1, 1, 64)
    write = Write(heads, 6, 2, "u4")
    write.slots = np.arange(6, dtype=np.int32)
    write.v[0, 0, 3], write.v[1, 0, 40], write.k[2, 0, 9] = torch.nan, torch.inf, -torch.inf  # views of qkv
    write.v[2, 0, :32], write.v[3, 0, :32], write.v[4, 0, :32] = -0.3, 1e-38, torch.linspace(1000, 1000.001, 32)
    write.v[5, 0, :32] = torch.linspace(1e-6, 1, 32)
    write.run(isa)
    views = PoolViews(heads, write.pools, 1, write.kv)
    scales, zeros = (views.value_scales[0, 0, :, :, kind].swapaxes(1, 2).reshape(-1, 2) for kind in (0, 1))
    assert (scales[:6] > 0x7F80).nonzero()[0].tolist() == [0, 1] and (scales[:6] > 0x7F80).nonzero()[1].tolist() == [
        0,
        1,
    ]
    assert (views.key_scales[0, 0, 0, :, 0, :6] > 0x7F80).nonzero()[1].tolist() == [2, 2]
    assert scales[2:5, 0].tolist() == [0, 0, 0] and scales[5, 0] > 0
    assert zeros[2:6, 0].tolist() == [0xBE9A, 0, 0x447A, 0]


def test_a_slot_outside_of_the_pool_is_refused() -> None:
    for slot in (-1, 3 * BLOCK_SIZE):
        write = Write(Heads(2, 1, 16), 2, 16)
        write.slots[1] = slot
        with pytest.raises(ValueError, match=r"slots\.0\[1\] is"):
            write.run("portable")
        assert (write.pools.plane(1, "key") == POISON).all()


@pytest.mark.parametrize(
    ("message", "heads", "rotated", "pool_heads"),
    [
        ("wider than a head", Heads(2, 1, 16), 18, Heads(2, 1, 16)),
        ("heads of another shape", Heads(2, 1, 16), 16, Heads(2, 2, 16)),
        ("heads of another shape", Heads(2, 1, 16), 16, Heads(2, 1, 8)),
    ],
)
def test_malformed_operands_are_refused(message: str, heads: Heads, rotated: int, pool_heads: Heads) -> None:
    write = Write(heads, 2, rotated)
    write.pools = kv_blocks(2, 3, pool_heads.kv_heads, pool_heads.head_dim)
    with pytest.raises(ValueError, match=message):
        write.run("portable")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rotated", [2, 40, 50])
def test_rope_alone(isa: str, rotated: int) -> None:
    write = Write(Heads(7, 1, 50), 19, rotated)
    runner = KernelRunner(isa, 3, tokens=19)
    x, out = runner.filled(write.qkv).view(0, 350), runner.buffer(19, 350, "f32")
    operands = {"x": x, "cos": runner.filled(write.cos), "sin": runner.filled(write.sin), "out": out}
    runner.call("rope@1", operands, {"heads": 7})
    assert torch.equal(runner.read(out).reshape(19, 7, 50), write.turned(write.q))
    assert runner.read_pad(out).isnan().all()
