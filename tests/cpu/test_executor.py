"""The executor: what it binds, what it refuses, and its threads. Kernels have their own tests."""

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from enginewright import _cpu
from tests.helpers.kernel_runner import ONE_COLUMN, TOKENS, KernelRunner, Operands, aligned, weight
from tests.helpers.paged_kv import KV_CODES

SEQUENCES = (0, 0, 1, 0, 0, 0)
SEQUENCE_ENDS = (1, 0, 1, 0, 0, 0)
LIMITS = (8, 2, 2, 4, 1)
spec = _cpu.OperandSpec


def int32(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_isas_are_listed_best_first() -> None:
    with_avx512 = [["avx512", "avx512-vnni"], ["avx512-vnni", "avx512"]]  # by how fast its BF16 is
    orders = [["amx", *both, "avx2-vnni", "avx2", "portable"] for both in with_avx512]
    names = _cpu.isa_names()
    assert names[-1] == "portable" and names in [[name for name in order if name in names] for order in orders]
    assert len({tuple(_cpu.kernel_names(name)) for name in names}) == 1, "every ISA has every kernel"


def test_an_unknown_isa_is_refused_with_those_known() -> None:
    with pytest.raises(ValueError, match=r"no instruction set 'sse9'; it has .*portable"):
        _cpu.Executor("sse9", 1, LIMITS, [], 0)


def test_an_unknown_kernel_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="gemm_bf16@7"):
        _cpu.Executor("portable", 1, LIMITS, [], 0).add_kernel("gemm_bf16@7", {}, {})


@pytest.mark.parametrize(
    ("threads", "limits", "arena_bytes"),
    [
        (0, LIMITS, 0),
        (-1, LIMITS, 0),
        (100_000, LIMITS, 0),
        (1, (0, 1, 1, 1, 1), 0),
        (1, (1, -1, 1, 1, 1), 0),
        (1, (2**31, 1, 1, 1, 1), 0),
        (1, (2**62, 1, 1, 1, 1), 0),
        (1, LIMITS, -1),
        (1, LIMITS, 2**63 - 1),
    ],
)
def test_senseless_limits_are_refused(threads: int, limits: tuple[int, int, int, int, int], arena_bytes: int) -> None:
    with pytest.raises(ValueError):
        _cpu.Executor("portable", threads, limits, [], arena_bytes)


@pytest.mark.parametrize("rows", [(0, 2**62, 0, 0, 0, 0), (0, -1, 0, 0, 0, 0), (2**62, 1, 1, 1, 1, 1)])
def test_inputs_whose_size_overflows_are_refused(rows: tuple[int, int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="overflows"):
        _cpu.Executor("portable", 1, LIMITS, [("tokens", rows, (4, 0, 0, 0, 0, 0))], 0)


def test_two_inputs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two inputs"):
        _cpu.Executor("portable", 1, LIMITS, [("a", TOKENS, ONE_COLUMN), ("a", TOKENS, ONE_COLUMN)], 0)


def cast(executor: _cpu.Executor, x: _cpu.OperandSpec, out: _cpu.OperandSpec) -> None:
    executor.add_kernel("cast@1", {"x": x, "out": out}, {})


def arena(offset: int, columns: int = 64, stride: int = 64, column: int = 0, pad: int = 0) -> _cpu.OperandSpec:
    return spec.arena(offset, "f32", TOKENS, columns, stride, column, pad)


ROW_BYTES = 8 * 64 * 4  # of a buffer as above, at the limits


@pytest.mark.parametrize(
    ("operand", "message"),
    [
        (arena(ROW_BYTES + 64), "after the arena"),
        (arena(2**62), "after the arena|overflows"),
        (arena(-64), "odd address"),
        (arena(32), "odd address"),
        (arena(0, stride=63, columns=63), "no proper columns"),
        (arena(0, stride=2**31), "no proper columns"),
        (arena(0, columns=0), "no proper columns"),
        (arena(0, column=1), "narrower"),
        (arena(0, pad=1), "narrower"),
        (arena(0, pad=2**63 - 1), "overflows"),
        (arena(0, column=-1), "no proper columns"),
        (spec.arena(0, "f32", (0, -1, 0, 0, 0, 0), 64, 64), "overflows"),
        (spec.arena(0, "f32", (0, 2**61, 0, 0, 0, 0), 64, 64), "overflows"),
        (spec.step("nothing"), "no input 'nothing'"),
    ],
)
def test_operands_outside_of_the_arena_are_refused(operand: _cpu.OperandSpec, message: str) -> None:
    executor = _cpu.Executor("portable", 1, LIMITS, [], 2 * ROW_BYTES)
    cast(executor, arena(0), arena(ROW_BYTES))
    with pytest.raises(ValueError, match=message):
        cast(executor, arena(0), operand)


@pytest.mark.parametrize(
    ("nbytes", "dtype", "layout", "rows", "columns", "message"),
    [
        (4 * 64 - 1, "f32", "plain", 1, 64, "255 bytes, but its shape takes 256"),
        (6143, "bf16", "r16", 33, 64, "6143 bytes, but its shape takes 6144"),
        (2048 * 2 - 1, "bf16", "r16_pairs", 4, 64, "takes 4096"),
        (4096, "bf16", "r16_pairs", 5, 64, "no two halves"),
        (4096, "bf16", "r16", 0, 64, "is empty"),
        (4096, "bf16", "r16", -16, 64, "is empty"),
        (4096, "i8", "r16", 2**39, 2**30, "overflows"),
        (4096, "i8", "r16", 2**62, 64, "too many rows"),
        (4096, "f32", "r16", 16, 64, "layout of bf16, i8, e4m3, u4 and e2m1"),
    ],
)
def test_weights_smaller_than_their_shape_are_refused(
    nbytes: int, dtype: str, layout: str, rows: int, columns: int, message: str
) -> None:
    executor = _cpu.Executor("portable", 1, LIMITS, [], ROW_BYTES)
    operand = spec.weight(aligned(bytes(nbytes)), dtype, layout, rows, columns)
    with pytest.raises(ValueError, match=message):
        executor.add_kernel("rms_norm@1", {"x": arena(0), "weight": operand, "out": arena(0)}, {"epsilon": 0.0})


def test_unaligned_weights_are_refused() -> None:
    operand = spec.weight(aligned(bytes(4096 + 64))[32:], "bf16", "r16", 16, 64)
    with pytest.raises(ValueError, match="not aligned to 64 bytes"):
        _cpu.Executor("portable", 1, LIMITS, [], 0).add_kernel("gemm_bf16@1", {"weight": operand}, {})


def test_unknown_dtypes_and_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match="no dtype 'fp8'"):
        spec.arena(0, "fp8", TOKENS, 1, 64)
    with pytest.raises(ValueError, match="no layout 'r32'"):
        spec.weight(b"", "bf16", "r32", 1, 1)


def test_strided_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        spec.weight(np.zeros(200, np.uint8)[::2], "i8", "plain", 1, 100)


def sequence_executor() -> _cpu.Executor:
    inputs = [
        ("tokens", TOKENS, ONE_COLUMN),
        ("positions", TOKENS, ONE_COLUMN),
        ("query_start", SEQUENCE_ENDS, ONE_COLUMN),
        ("kv_len", SEQUENCES, ONE_COLUMN),
        ("block_table.0", SEQUENCES, (0, 0, 0, 0, 1, 0)),
    ]
    return _cpu.Executor("portable", 2, LIMITS, inputs, 0)


def sequence_step() -> dict[str, NDArray[np.int32]]:
    """Two sequences: the tokens at positions 3, 4, 5 of one, and at position 9 of another."""
    return {
        "tokens": int32(1, 2, 3, 4),
        "positions": int32(3, 4, 5, 9),
        "query_start": int32(0, 3, 4),
        "kv_len": int32(6, 10),
        "block_table.0": np.zeros((2, 3), np.int32),
    }


SIZES = (4, 2, 0, 3, 1)


def test_a_step_may_be_smaller_than_the_limits() -> None:
    executor = sequence_executor()
    executor.run(list(sequence_step().values()), SIZES)
    one = [int32(5), int32(0), int32(0, 1), int32(1), np.zeros((1, 1), np.int32)]
    executor.run(one, (1, 1, 0, 1, 1))
    none = [int32(), int32(), int32(0), int32(), np.zeros((0, 0), np.int32)]
    executor.run(none, (0, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("query_start", int32(1, 3, 4), "begins with 1"),
        ("query_start", int32(0, 3, 3), "does not rise at sequence 1"),
        ("query_start", int32(0, 5, 4), "does not rise at sequence 1|less than"),
        ("query_start", int32(0, 3, 5), "ends with 5"),
        ("query_start", int32(0, -(2**31), 4), "does not rise at sequence 0"),
        ("kv_len", int32(2, 10), "kv_len of sequence 0 is less than its 3"),
        ("kv_len", int32(-1, 10), "kv_len of sequence 0"),
        ("positions", int32(3, 4, 6, 9), "token 2 is not at the position"),
        ("positions", int32(3, 4, 5, -1), "token 3 is not at the position"),
        ("tokens", int32(1, 2, 3), r"must be \[4, 1\] in this step, not \[3, 1\]"),
        ("block_table.0", np.zeros((2, 4), np.int32), r"must be \[2, 3\]"),
        ("block_table.0", np.zeros(6, np.int32), r"must be \[2, 3\]"),
        ("tokens", np.zeros(4, np.int64), "int32"),
        ("tokens", np.zeros(8, np.int32)[::2], "contiguous"),
        ("tokens", np.zeros((4, 1, 1), np.int32), "one or two dimensions"),
    ],
)
def test_inputs_that_contradict_each_other_are_refused(name: str, value: NDArray[np.int32], message: str) -> None:
    step = sequence_step() | {name: value}
    with pytest.raises(ValueError, match=message):
        sequence_executor().run(list(step.values()), SIZES)


@pytest.mark.parametrize(
    "sizes", [(9, 2, 0, 3, 1), (4, 3, 0, 3, 1), (4, 2, 3, 3, 1), (4, 2, 0, 5, 1), (-1, 2, 0, 3, 1)]
)
def test_a_step_beyond_the_limits_is_refused(sizes: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="larger than the limits"):
        sequence_executor().run(list(sequence_step().values()), sizes)


def test_a_step_with_too_few_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 5 inputs, not 1"):
        sequence_executor().run([int32(1)], SIZES)


def test_buffer_is_a_view_that_keeps_the_executor() -> None:
    executor = _cpu.Executor("portable", 1, LIMITS, [], 4096)
    view = executor.buffer(64, 3, 5, 64, "f32")
    assert view.shape == (3, 5) and view.strides == (256, 4) and not view.any()
    view[2, 4] = 7.0
    assert executor.buffer(64 + 2 * 256, 1, 5, 64, "f32")[0, 4] == 7.0
    assert executor.buffer(64, 3, 5, 64, "bf16").dtype == np.uint16
    del executor
    gc.collect()
    assert view[2, 4] == 7.0


@pytest.mark.parametrize("shape", [(0, 17, 5, 64), (4096, 1, 1, 64), (0, 1, 65, 64), (-64, 1, 1, 64), (2, 1, 1, 64)])
def test_a_view_outside_of_the_arena_is_refused(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError):
        _cpu.Executor("portable", 1, LIMITS, [], 4096).buffer(*shape, "f32")


def test_weights_live_as_long_as_the_executor() -> None:
    executor = _cpu.Executor("portable", 1, LIMITS, [], ROW_BYTES)
    data = aligned(np.ones(64, np.float32).tobytes())
    alive = weakref.ref(data)
    operands = {"x": arena(0), "weight": spec.weight(data, "f32", "plain", 1, 64), "out": arena(0)}
    executor.add_kernel("rms_norm@1", operands, {"epsilon": 1.0})
    del data, operands
    gc.collect()
    assert alive() is not None
    del executor
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("dtype", "row", "row_bytes"), [("bf16", 64, 128), *((name, 68, 68) for name in KV_CODES)])
def test_cache_blocks(dtype: str, row: int, row_bytes: int) -> None:
    blocks = _cpu.CacheBlocks(
        layers=2, num_blocks=5, block_size=32, planes=[("key", 3, 40, dtype), ("value", 3, 40, dtype)]
    )
    assert blocks.nbytes == 2 * 2 * 5 * 3 * 32 * row_bytes
    planes = [blocks.plane(layer, name) for layer in (0, 1) for name in ("key", "value")]
    for array in planes:
        assert array.shape == (5, 3, 32 * row) and not array.any() and array.ctypes.data % 64 == 0
        array[:] = 1
    blocks.scrub([4, 1])
    for array in planes:
        assert not array[[1, 4]].any() and array[[0, 2, 3]].all()
    for some in ([5], [-1], [0, 5]):
        with pytest.raises(ValueError, match="no block"):
            blocks.scrub(some)
    assert planes[0][0].all(), "nothing is scrubbed where one block is refused"
    for value, array in enumerate(planes):
        array[:] = np.arange(5)[:, None, None] + 10 * value
    blocks.copy([(0, 3), (3, 1)])
    for value, array in enumerate(planes):
        assert (array == np.array([0, 0, 2, 0, 4])[:, None, None] + 10 * value).all(), "pair by pair"
    for pairs in ([(0, 5)], [(-1, 0)], [(2, 2)]):
        with pytest.raises(ValueError, match=r"no block|onto itself"):
            blocks.copy(pairs)
    for layer, name, message in ((-1, "key", "no layer"), (2, "key", "no layer"), (0, "keys", "no plane")):
        with pytest.raises(ValueError, match=message):
            blocks.plane(layer, name)
        with pytest.raises(ValueError, match=message):
            spec.cache(blocks, layer, name)


def test_planes_of_different_shapes_share_blocks() -> None:
    """[layers][planes][heads][tile] in a block, whatever each plane's shape."""
    blocks = _cpu.CacheBlocks(2, 3, 16, [("latent", 1, 96, "bf16"), ("index_key", 2, 40, "i8")])
    latent_bytes, index_bytes = 16 * 96 * 2, 2 * 16 * (64 + 4)
    assert blocks.nbytes == 3 * 2 * (latent_bytes + index_bytes)
    whole = blocks.places()
    for layer in (0, 1):
        latent, index = blocks.plane(layer, "latent"), blocks.plane(layer, "index_key")
        assert latent.shape == (3, 1, 16 * 96) and index.shape == (3, 2, 16 * 68)
        latent[1], index[1] = 0x0101 + layer, 3 + layer
        start = layer * (latent_bytes + index_bytes)
        assert not whole[[0, 2]].any()
        assert set(whole[1, start + 1 : start + latent_bytes : 2]) == {1}
        assert (whole[1, start + latent_bytes : start + latent_bytes + index_bytes] == 3 + layer).all()


NO_SIZE = [(0, 1, 32, 1, 64), (1, 0, 32, 1, 64), (1, 1, 24, 1, 64), (1, 1, 0, 1, 64), (1, 1, 32, 0, 64)]
OVERFLOWS = [(2**40, 2**40, 32, 1, 64), (1, 2**62, 32, 1, 64), (1, 1, 32, 1, 2**62)]


@pytest.mark.parametrize("shape", [*NO_SIZE, *OVERFLOWS])
def test_cache_blocks_of_impossible_sizes_are_refused(shape: tuple[int, int, int, int, int]) -> None:
    layers, num_blocks, block_size, heads, dim = shape
    with pytest.raises(ValueError):
        _cpu.CacheBlocks(layers, num_blocks, block_size, [("key", heads, dim, "bf16")])


def test_a_cache_without_planes_is_refused() -> None:
    with pytest.raises(ValueError, match="no size"):
        _cpu.CacheBlocks(1, 1, 32, [])


@pytest.mark.parametrize("dtype", ["f32", "e2m1"])
def test_planes_of_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=f"the plane 'key' cannot hold {dtype}"):
        _cpu.CacheBlocks(1, 1, 32, [("key", 1, 64, dtype)])
    with pytest.raises(ValueError, match="there is no dtype 'int8'"):
        _cpu.CacheBlocks(1, 1, 32, [("key", 1, 64, "int8")])


def slow_runner(threads: int) -> KernelRunner:
    """A step of some 50 ms on one thread."""
    runner = KernelRunner("portable", threads, tokens=64, arena_bytes=1 << 20)
    x, out = runner.filled(torch.randn(64, 1000)), runner.buffer(64, 1000, "f32")
    for _ in range(100):
        runner.executor.add_kernel("softcap@1", {"x": x.spec(), "out": out.spec()}, {"cap": 3.0})
    return runner


def test_python_runs_while_a_step_computes() -> None:
    """One of some steps at least shows it: a busy machine may not run this thread during a short one."""
    runner = slow_runner(1)
    for _ in range(20):
        started, ended = threading.Event(), threading.Event()

        def step(started: threading.Event = started, ended: threading.Event = ended) -> None:
            started.set()
            runner.run()
            ended.set()

        thread = threading.Thread(target=step)
        thread.start()
        started.wait()
        ticks = 0
        while not ended.is_set():
            ticks += 1
            time.sleep(0.001)
        thread.join()
        if ticks > 3:
            break
    assert ticks > 3


def test_steps_from_many_python_threads_take_turns() -> None:
    x, w = torch.randn(3, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    runner = KernelRunner("portable", 2, tokens=3)
    out = runner.buffer(3, 40, "f32")
    operands: Operands = {"x": runner.filled(x), "weight": weight(w, "r16"), "out": out}
    runner.call("gemm_bf16@1", operands, {"epilogue": "none"})
    expected = runner.read(out)

    def steps() -> None:
        for _ in range(50):
            runner.run()

    threads = [threading.Thread(target=steps) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(runner.read(out), expected)


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_every_kernel_sees_what_the_one_before_wrote(threads: int) -> None:
    """GEMMs, whose columns threads divide, and casts, whose rows they divide, pass a matrix around its columns."""
    rounds, columns = 40, 128
    x = torch.randn(5, columns).bfloat16()
    turn = weight(torch.eye(columns).roll(1, dims=0).bfloat16(), "r16")
    runner = KernelRunner("portable", threads, tokens=5)
    half, full = runner.filled(x), runner.buffer(5, columns, "f32")
    for _ in range(rounds):
        gemm = {"x": half.spec(), "weight": turn, "out": full.spec()}
        runner.executor.add_kernel("gemm_bf16@1", gemm, {"epilogue": "none"})
        runner.executor.add_kernel("cast@1", {"x": full.spec(), "out": half.spec()}, {})
    for step in range(1, 11):
        runner.run()
        assert torch.equal(runner.read(half), x.float().roll(step * rounds, dims=1))


def test_an_idle_pool_sleeps() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("looks at threads in /proc")
    others = set(os.listdir(tasks))
    runner = slow_runner(4)
    runner.run()
    own = set(os.listdir(tasks)) - others
    assert len(own) == 3
    stats = [tasks / one / "stat" for one in own]
    limit = time.monotonic() + 60
    while {stat.read_text().rpartition(")")[2].split()[0] for stat in stats} != {"S"}:
        assert time.monotonic() < limit, "a thread never sleeps"


def test_threads_end_with_their_executor() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("looks at threads in /proc")
    others = set(os.listdir(tasks))  # some of them may still be ending
    for _ in range(20):
        runner = KernelRunner("portable", 4, arena_bytes=1 << 16)
        runner.run()
        own = set(os.listdir(tasks)) - others
        assert len(own) == 3
        del runner
        deadline = time.monotonic() + 10  # Linux lists a joined thread a moment longer
        while own & set(os.listdir(tasks)):
            assert time.monotonic() < deadline
