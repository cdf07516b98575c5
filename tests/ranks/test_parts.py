"""Which rows of a weight, and which CPUs, belong to a rank; and what cannot be cut."""

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from enginewright.manifest import SectionForm
from enginewright.plan import Plan, WeightOperand, step_sizes
from enginewright.rank_layout import RankLayout
from enginewright.rank_plan import ALL_GATHER, Cut, exchange_bytes, plan_of_rank, units_of_rank
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device.cpu.weight_parts import part_of_weight
from enginewright.runtime.device.machine import cpus_of_ranks, memory_nodes
from enginewright.runtime.device.memory_plan import limits_of
from enginewright.runtime.device.ranks.member import weight_columns
from enginewright.runtime.device.ranks.shares import rank_shares
from enginewright.runtime.engine import Engine
from tests.helpers.engines import built_tiny


def form(dtype: str, shape: tuple[int, ...], layout: str) -> SectionForm:
    return SectionForm(nbytes=1 << 40, sha256="0" * 64, dtype=dtype, shape=shape, layout=layout)


@pytest.mark.parametrize("units", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_units_are_divided_without_gaps(units: int, size: int) -> None:
    parts = [units_of_rank(units, rank, size) for rank in range(size)]
    assert [unit for first, count in parts for unit in range(first, first + count)] == list(range(units))
    assert max(count for _, count in parts) - min(count for _, count in parts) <= 1
    for rank, (first, count) in enumerate(parts):
        begin, columns = Cut(100, units * 16, 16).part(rank, size)
        assert columns == max(count, 1) * 16 and (begin == 100 + first * 16)
        assert begin + columns <= 100 + units * 16


@pytest.mark.parametrize(
    ("dtype", "shape", "layout", "rows", "expected"),
    [
        ("bf16", (40, 70), "r16", ((16, 16),), ((4096, 8192),)),  # a block: 16 rows of 128 columns of 2 bytes
        ("bf16", (40, 70), "r16", ((32, 8),), ((8192, 12288),)),
        ("u4", (64, 128), "r16", ((16, 32),), ((1024, 3072),)),
        ("i8", (64, 64), "r16_pairs", ((16, 16), (48, 16)), ((2048, 4096),)),
        ("bf16", (48, 3), "r16_columns", ((16, 16),), ((96, 192),)),
        ("f32", (96,), "plain", ((16, 16), (64, 16)), ((64, 128), (256, 320))),
    ],
)
def test_rows_are_ranges_of_bytes(
    dtype: str,
    shape: tuple[int, ...],
    layout: str,
    rows: tuple[tuple[int, int], ...],
    expected: tuple[tuple[int, int], ...],
) -> None:
    part = part_of_weight(form(dtype, shape, layout), WeightOperand("w", rows=rows))
    assert part.ranges == expected
    assert part.shape[1:] == ((1, 32) if len(shape) == 1 else (sum(count for _, count in rows), shape[1]))


def test_experts_are_ranges_of_bytes() -> None:
    operand = WeightOperand("w", matrices=(1, 2, 5))
    part = part_of_weight(form("i8", (5, 20, 64), "r16"), operand)
    assert part.ranges == ((2048, 6144),) and part.shape == (2, 20, 64)
    part = part_of_weight(form("f32", (100,), "plain"), operand)
    assert part.ranges == ((80, 240),) and part.shape == (1, 1, 40)


def test_rows_of_each_expert_are_ranges_of_bytes() -> None:
    """As GPUs have them: in each matrix a range, of gates and ups side by side."""
    operand = WeightOperand("w", rows=((16, 16), (48, 16)), matrices=(0, 3, 3))
    part = part_of_weight(form("i8", (3, 64, 64), "r16_pairs"), operand)
    assert part.ranges == ((2048, 4096), (6144, 8192), (10240, 12288)) and part.shape == (3, 32, 64)
    part = part_of_weight(form("f32", (192,), "plain"), operand)
    ranges = [(256 * expert + 4 * first, 256 * expert + 4 * first + 64) for expert in range(3) for first in (16, 48)]
    assert part.ranges == tuple(ranges) and part.shape == (1, 1, 96)


@pytest.mark.parametrize(
    ("shape", "layout", "operand"),
    [
        ((5, 20, 64), "r16", WeightOperand("w", rows=((16, 16),), matrices=(0, 5, 5))),
        ((100,), "plain", WeightOperand("w", rows=((16, 16),), matrices=(0, 5, 5))),
        ((40, 70), "r16", WeightOperand("w", rows=((8, 16),))),  # begins inside of a block
        ((40, 70), "r16", WeightOperand("w", rows=((0, 8),))),
        ((40, 70), "r16", WeightOperand("w", rows=((32, 16),))),  # more than there are
        ((40, 70), "r16", WeightOperand("w", rows=((0, 16), (16, 16)))),
        ((64, 64), "r16_pairs", WeightOperand("w", rows=((0, 16), (16, 16)))),  # halves that do not match
        ((5, 20, 64), "r16", WeightOperand("w", rows=((0, 16),))),
        ((5, 20, 64), "r16", WeightOperand("w", matrices=(4, 2, 5))),
        ((5, 20, 64), "r16", WeightOperand("w", matrices=(0, 2, 4))),
        ((40,), "plain", WeightOperand("w", rows=((32, 16),))),
    ],
)
def test_rows_that_a_weight_does_not_have(shape: tuple[int, ...], layout: str, operand: WeightOperand) -> None:
    with pytest.raises(ValueError, match=r"(weight|vector) w"):
        part_of_weight(form("f32" if layout == "plain" else "bf16", shape, layout), operand)


def machine(root: Path, *cpus: str) -> Path:
    """A machine with memory nodes of these CPUs."""
    for number, text in enumerate(cpus):
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text)
    return root


def test_ranks_are_divided_among_memory_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(14)))
    root = machine(tmp_path, "0-3", "4-7", "8-11", "12-15,20")
    nodes = [tuple(range(0, 4)), tuple(range(4, 8)), tuple(range(8, 12)), (12, 13)]
    assert memory_nodes(root) == nodes
    assert cpus_of_ranks(4, root) == nodes
    assert cpus_of_ranks(2, root) == [nodes[0] + nodes[1], nodes[2] + nodes[3]]
    assert cpus_of_ranks(8, root) == [node for node in nodes for _ in range(2)]
    assert cpus_of_ranks(3, root) == [()] * 3
    assert cpus_of_ranks(2, machine(tmp_path / "one", "0-13")) == [()] * 2


def test_shares_add_up() -> None:
    """Parts of ranks add up to the whole, and exchanges fit the memory that is made for them."""
    with Engine.open(built_tiny("llama")) as engine:
        shares = rank_shares(engine.plan, lambda name: engine.weight(name)[1], RankLayout(3))
        assert sum(share.kv_bytes_per_token for share in shares) == engine.plan.kv_bytes_per_token()
        assert engine.weight_bytes < sum(share.weight_bytes for share in shares) < 3 * engine.weight_bytes
        _, limits = limits_of(engine.plan, RuntimeConfig(max_num_batched_tokens=100))
        slot = exchange_bytes(engine.plan, limits, 3, partial(weight_columns, engine))
        assert slot >= limits.tokens * engine.plan.buffers[0].element_bytes
        one = step_sizes(**dict.fromkeys(engine.plan.dims, 1))
        assert slot > exchange_bytes(engine.plan, one, 3, partial(weight_columns, engine))


def test_a_plan_of_one_rank_is_the_plan() -> None:
    with Engine.open(built_tiny("llama")) as engine:
        assert plan_of_rank(engine.plan, 0, 1, lambda _: 1) is engine.plan


def test_a_cache_that_another_kernel_reads_is_whole() -> None:
    """A kernel that cannot be cut by heads keeps its cache whole, and so all that touches the cache."""
    with Engine.open(built_tiny("llama")) as engine:
        first = next(call for call in engine.plan.calls if call.kernel == "paged_attention@1")
        others = (replace(call, kernel="other@1") if call is first else call for call in engine.plan.calls)
        plan = replace(engine.plan, calls=tuple(others))
        cut = plan_of_rank(plan, 0, 3, partial(weight_columns, engine))
    assert cut.caches == plan.caches
    of_heads = [call for call in cut.calls if "kv_heads" in call.attributes]
    assert of_heads and all(call.attributes["kv_heads"] == 3 for call in of_heads)


def test_every_rank_exchanges_in_the_same_order() -> None:
    with Engine.open(built_tiny("qwen3_next")) as engine:
        for size in (2, 3, 8):
            plans = [plan_of_rank(engine.plan, rank, size, partial(weight_columns, engine)) for rank in range(size)]
            assert len({tuple(exchanges(plan)) for plan in plans}) == 1


def exchanges(plan: Plan) -> list[str]:
    return [repr((call.operands, call.attributes)) for call in plan.calls if call.kernel == ALL_GATHER]
