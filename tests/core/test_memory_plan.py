"""The memory plan: exact, within what was given, and the same as what the executor then allocates."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from enginewright.builder.build import BuildConfig, build_engine
from enginewright.dtypes import KV_CACHES
from enginewright.errors import NotEnoughMemoryError, UsageError
from enginewright.plan import (
    COMMON_DIMS,
    Buffer,
    PagedCache,
    Plan,
    Plane,
    RecurrentState,
    StateTensor,
    StepSizes,
    linear,
)
from enginewright.runtime.cache.paged import blocks_of
from enginewright.runtime.config import RuntimeConfig
from enginewright.runtime.device import memory_plan as module
from enginewright.runtime.device.cpu.executor import CpuExecutor
from enginewright.runtime.device.memory_plan import plan_memory, sequence_bytes
from enginewright.runtime.engine import Engine
from tests.helpers.tiny import MemoryCheckpoint, tiny_config, tiny_model

DTYPE_BYTES = {"f32": 4, "bf16": 2}


def plan_of(groups: Sequence[PagedCache], buffers: Sequence[Buffer], longest: int) -> Plan:
    return Plan("cpu", DIMS, (), tuple(groups), tuple(buffers), (), {"logits": 0}, buffers[0].columns, longest)


PLANES = (Plane("key", 1, 8, "bf16", 16), Plane("value", 1, 8, "bf16", 16))
GROUPS = st.builds(
    PagedCache,
    layers=st.just((0,)),
    planes=st.tuples(st.builds(Plane, st.just("key"), st.just(1), st.just(8), st.just("bf16"), st.integers(1, 2**20))),
    block_size=st.sampled_from([16, 32]),
    window=st.sampled_from([0, 0, 7, 512, 4096]),
)
DIMS = (*COMMON_DIMS, "kv_blocks", "kv_splits")
ROWS = st.builds(
    linear,
    constant=st.integers(0, 3),
    tokens=st.integers(0, 2),
    sequences=st.integers(0, 2),
    logit_rows=st.integers(0, 2),
    kv_blocks=st.integers(0, 2),
    kv_splits=st.integers(0, 2),
)
BUFFERS = st.builds(
    Buffer, dtype=st.sampled_from(["f32", "bf16"]), rows=ROWS, columns=st.integers(1, 300), slot=st.integers(0, 3)
)


def naive_blocks(kv: PagedCache, length: int, chunk: int) -> int:
    """Blocks that are touched from the first position a chunk sees to its last, over all places to begin."""
    if not kv.window:
        return -(-length // kv.block_size)
    span = kv.window + chunk - 1
    return max(
        len({p // kv.block_size for p in (*range(kv.kept_tokens), *range(start, start + span)) if p < length})
        for start in range(length)
    )


@settings(max_examples=200, deadline=None)
@given(
    window=st.integers(0, 70),
    kept=st.integers(0, 40),
    block_size=st.integers(1, 33),
    length=st.integers(1, 300),
    chunk=st.integers(1, 80),
)
def test_blocks_of_a_sequence(window: int, kept: int, block_size: int, length: int, chunk: int) -> None:
    """A sequence gets the blocks that some chunk needs at once: never fewer, and no more unless the text ends early."""
    kv = PagedCache((0,), PLANES, block_size, window, kept)
    whole, needed = -(-length // block_size), naive_blocks(kv, length, chunk)
    assert needed <= blocks_of(kv, length, chunk) <= whole
    if not window or length > kept + 3 * block_size + window + chunk:
        assert blocks_of(kv, length, chunk) == needed


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(GROUPS, min_size=1, max_size=3),
    buffers=st.lists(BUFFERS, min_size=1, max_size=8),
    longest=st.integers(1, 3000),
    sequences=st.integers(1, 40),
    tokens=st.integers(1, 600),
    rows=st.none() | st.integers(1, 100),
    memory=st.integers(0, 2**45),
    caching=st.booleans(),
)
def test_the_arithmetic(
    groups: list[PagedCache],
    buffers: list[Buffer],
    longest: int,
    sequences: int,
    tokens: int,
    rows: int | None,
    memory: int,
    caching: bool,
) -> None:
    plan = plan_of(groups, buffers, longest)
    config = RuntimeConfig(
        max_num_seqs=sequences,
        max_num_batched_tokens=tokens,
        max_logit_rows=rows,
        kv_cache_memory=memory + 1,
        enable_prefix_caching=caching,
    )
    chunk = max(min(tokens, sequences * longest), sequences)
    block = {kv: kv.block_size * kv.bytes_per_token for kv in groups}
    one = sum(blocks_of(kv, longest, chunk) * block[kv] for kv in groups)
    assert sequence_bytes(groups, longest, chunk) == one
    if memory + 1 < one:
        with pytest.raises(NotEnoughMemoryError) as refused:
            plan_memory(plan, config)
        assert refused.value.exit_code == 4 and str(longest) in str(refused.value)
        return
    result = plan_memory(plan, config)
    limits = result.limits
    assert result.max_model_len == longest
    assert (limits.tokens, limits.sequences, limits.logit_rows) == (chunk, sequences, max(rows or 0, sequences))
    assert limits["kv_blocks"] == max(-(-longest // kv.block_size) for kv in groups), "as wide as the widest table"
    assert limits["kv_splits"] == -(-longest // 256)
    assert result.kv_bytes == sum(count * block[kv] for count, kv in zip(result.num_blocks, groups, strict=True))
    assert one <= result.kv_bytes <= memory + 1
    whole = sequences * one <= memory + 1  # all running sequences have room
    shared = caching and len({kv.block_size for kv in groups}) == 1
    for kv, count in zip(groups, result.num_blocks, strict=True):
        max_blocks = blocks_of(kv, longest, chunk)
        assert max_blocks <= count
        # Nothing that would be of use is left over: prefixes of no running sequence can use all, if they are shared.
        if whole and shared:
            assert count == (memory + 1) // one * max_blocks
        else:
            assert count <= max_blocks * sequences
            assert count == max_blocks * sequences or memory + 1 - result.kv_bytes < block[kv]
    if result.kv_bytes > sequences * one:
        running = plan_memory(plan, config, for_running_only=True)
        assert running.kv_bytes == sequences * one
    assert result.arena_bytes == naive_arena(buffers, limits)


def naive_arena(buffers: Sequence[Buffer], limits: StepSizes) -> int:
    total = 0
    for slot in range(max(buffer.slot for buffer in buffers) + 1):
        sizes = [0]
        for buffer in buffers:
            if buffer.slot == slot:
                counts = (1, *limits.counts)
                rows = sum(factor * count for factor, count in zip(buffer.rows.by_position(DIMS), counts, strict=True))
                lines = (buffer.columns + 63) // 64
                stride = 64 * (lines if lines % 2 else lines + 1)
                sizes.append(rows * stride * DTYPE_BYTES[buffer.dtype])
        total += (max(sizes) + 63) // 64 * 64
    return total


KV = PagedCache((0,), PLANES, 32)
PLAN = plan_of([KV], [Buffer("f32", linear(logit_rows=1), 100, 0)], 500)


def test_a_length_beyond_the_engine_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match="501") as refused:
        plan_memory(PLAN, RuntimeConfig(max_model_len=501))
    assert refused.value.exit_code == 2 and "500" in str(refused.value)
    assert plan_memory(PLAN, RuntimeConfig(max_model_len=500)).max_model_len == 500


def test_one_byte_less_than_a_sequence_takes_is_not_enough() -> None:
    one = 16 * 32 * 32
    fits = plan_memory(PLAN, RuntimeConfig(kv_cache_memory=one))
    assert fits.num_blocks == (16,) and fits.kv_bytes == one
    with pytest.raises(NotEnoughMemoryError) as refused:
        plan_memory(PLAN, RuntimeConfig(kv_cache_memory=one - 1))
    assert refused.value.exit_code == 4
    assert plan_memory(PLAN, RuntimeConfig(kv_cache_memory=one - 1, max_model_len=480)).num_blocks == (15,)


def test_the_machine_is_asked_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RuntimeConfig(max_num_seqs=1000)
    monkeypatch.setattr(module, "free_memory", lambda: 4_000_000)
    result = plan_memory(PLAN, config)
    assert 0 < result.kv_bytes <= 2_000_000 - result.arena_bytes // 2
    monkeypatch.setattr(module, "free_memory", lambda: 1000)
    with pytest.raises(NotEnoughMemoryError):
        plan_memory(PLAN, config)


def test_adapters_take_memory_from_the_kv_cache() -> None:
    config, free, adapters = RuntimeConfig(max_num_seqs=1000), 4_000_000, 1_000_000
    without, result = (plan_memory(PLAN, config, free=free, adapter_bytes=count) for count in (0, adapters))
    assert (result.adapter_bytes, without.adapter_bytes) == (adapters, 0)
    block = 32 * 32
    assert without.kv_bytes - adapters // 2 - block <= result.kv_bytes <= without.kv_bytes - adapters // 2 + block
    for count, hint in (0, ""), (free, "--max-loras and --max-lora-rank"):
        with pytest.raises(NotEnoughMemoryError) as refused:
            plan_memory(PLAN, config, 0 if count else free, free=free, adapter_bytes=count)
        assert hint in str(refused.value) and ("--max-loras" in str(refused.value)) == bool(hint)


def test_weights_that_are_read_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped ones need not, where somebody says how large the KV cache is."""
    mapped = RuntimeConfig(max_num_seqs=1000, kv_cache_memory=1 << 20)
    arena_bytes = plan_memory(PLAN, mapped).arena_bytes
    monkeypatch.setattr(module, "free_memory", lambda: 10_000_000 + arena_bytes)
    for weight_bytes in (10_000_000, 10_000_001):
        plan_memory(PLAN, mapped, weight_bytes)
    read = replace(mapped, mmap=False)
    plan_memory(PLAN, read, 10_000_000)
    plan_memory(PLAN, read, 10_000_001, free=30_000_000)  # on a GPU they are not in the machine's memory
    with pytest.raises(NotEnoughMemoryError, match="Leave out --no-mmap") as refused:
        plan_memory(PLAN, read, 10_000_001)
    assert refused.value.exit_code == 4
    kv_bytes = [
        plan_memory(PLAN, replace(config, kv_cache_memory=None), 6_000_000).kv_bytes for config in (mapped, read)
    ]
    assert kv_bytes[0] == kv_bytes[1] <= 2_000_000, "half of what the weights leave, either way"


BUILT = [(family, kv) for kv in KV_CACHES for family in ("llama", "gemma3_text")]
SOME_BUILT = [case for n, case in enumerate(BUILT) if n % 4 in (0, 3)]  # each dtype, one family


@pytest.mark.parametrize(("family", "kv_cache_dtype"), SOME_BUILT)
def test_the_executor_allocates_what_the_memory_plan_says(family: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    config, build_config = tiny_config(family), BuildConfig(kv_cache_dtype=kv_cache_dtype)
    build_engine(MemoryCheckpoint.of(tiny_model(config), config), build_config, tmp_path / "tiny.engine")
    limits = RuntimeConfig(max_model_len=301, max_num_seqs=5, max_num_batched_tokens=37, threads=1)
    with Engine.open(tmp_path / "tiny.engine") as engine:
        for memory in (2_000_000, 20_000_000):
            executor = CpuExecutor(engine, replace(limits, kv_cache_memory=memory))
            plan, planned = engine.plan, executor.memory_plan
            assert sum(pool.nbytes for pool in executor.pools) == planned.kv_bytes <= memory
            last = plan.arena_offsets(planned.limits)
            assert last[1] == planned.arena_bytes
            for offset, buffer in zip(last[0], plan.buffers, strict=True):
                assert offset + buffer.bytes_at(planned.limits) <= planned.arena_bytes


def test_a_recurrent_state_takes_a_slot_and_a_snapshot_a_sequence() -> None:
    """A state takes as much memory for a short sequence as for a long one; blocks and slots are allocated together."""
    state = RecurrentState((0, 1), (StateTensor("state", (4, 8), "f32"), StateTensor("conv", (16,), "bf16")), 512)
    assert state.bytes_per_sequence == 2 * (4 * 8 * 4 + 16 * 2)
    plan = plan_of([KV, state], PLAN.buffers, 500)  # type: ignore[list-item]
    one = 16 * 32 * 32 + 2 * 320
    assert sequence_bytes([KV, state], 500, 100) == one and sequence_bytes([KV, state], 1, 100) == 32 * 32 + 2 * 320
    config = RuntimeConfig(max_num_seqs=3, kv_cache_memory=one)
    assert plan_memory(plan, config).num_blocks == (16, 2)
    with pytest.raises(NotEnoughMemoryError):
        plan_memory(plan, replace(config, kv_cache_memory=one - 1))
    assert plan_memory(plan, replace(config, kv_cache_memory=one + 2 * (32 * 32 + 2 * 320))).num_blocks == (18, 6)
    ample = plan_memory(plan, replace(config, kv_cache_memory=1 << 30), for_running_only=True)
    assert ample.num_blocks == (48, 6) and ample.kv_bytes == 3 * one
    cached = plan_memory(plan, replace(config, kv_cache_memory=8 * one - 1))  # for prefixes of no running sequence
    assert cached.num_blocks == (7 * 16, 7 * 2)
