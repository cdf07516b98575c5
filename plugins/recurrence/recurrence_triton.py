"""Recurrences over many tokens of a sequence, 64 at a time: csrc/cuda/triton/recurrence.py."""

from collections.abc import Sequence

import numpy as np

from enginewright.dtypes import DTYPES
from enginewright.plan import Extent, Launch, Linear, linear
from enginewright.plugins.kernel import ONE, Call, blocks
from enginewright.triton_instance import TritonInstance

MODULE = "enginewright.csrc.cuda.triton.recurrence"
CHUNK = 64  # tokens
FACTORS = 4  # numbers of a token and head, after its rows of matrices
BLOCK_V = 16  # columns of a state in a program
# They are chosen so that nothing spills on any architecture, and not measured, since no GPU was available.
PREPARE_WARPS, SCAN_WARPS = 8, 4
INTEGERS = ("sizes", "query_start", "kv_len", "slots")
PREPARE_ARGUMENTS = ("query", "key", "decay", "beta", "log_a", "dt_bias", "query_start", "kv_len", "chunks")
SCAN_ARGUMENTS = ("query", "key", "value", "skip", "state", "query_start", "kv_len", "slots", "chunks", "out")


def chunk_scratch(call: Call, delta: bool) -> tuple[str, Linear, int]:
    """Returns the buffer for prepared chunks: for each token a row of one matrix, or of two, and factors.

    Args:
        call: the call.
        delta: True for the gated delta rule, False for Mamba-2.
    """
    return "chunks", linear(tokens=1), int(call.attributes["heads"]) * _width(delta)


def _width(delta: bool) -> int:
    return (2 if delta else 1) * CHUNK + FACTORS


def chunk_instances(call: Call, delta: bool) -> tuple[TritonInstance, TritonInstance]:
    """Returns the kernels that prepare chunks, and that scan them.

    Args:
        call: the call.
        delta: True for the gated delta rule, False for Mamba-2.
    """
    operands, attributes = call.operands, call.attributes
    heads, key_heads = int(attributes["heads"]), int(attributes["key_heads"])
    shared: dict[str, int | bool | float] = {
        "DELTA": delta,
        "SHARED": heads // key_heads,
        "K": operands["key"].columns // key_heads,
        "QUERY_STRIDE": operands["query"].stride,
        "KEY_STRIDE": operands["key"].stride,
        "CHUNKS_STRIDE": operands["chunks"].stride,
        "WIDTH": _width(delta),
    }
    prepare = {
        "DECAY_STRIDE": operands["decay"].stride,
        "BETA_STRIDE": operands["beta"].stride if delta else 0,
        "SCALE": _f32(attributes["scale"]) if delta else 1.0,
        "EPSILON": _f32(attributes["epsilon"]) if delta else 0.0,
        "DT_MIN": 0.0 if delta else _f32(attributes["dt_min"]),
    }
    scan = {
        "V": operands["value"].columns // heads,
        "VALUE_STRIDE": operands["value"].stride,
        "OUT_STRIDE": operands["out"].stride,
        "SLOT_STRIDE": operands["state"].block_stride // DTYPES["f32"].bytes,
        "BLOCK_V": BLOCK_V,
    }
    return (
        _instance(call, "prepare_chunks", PREPARE_ARGUMENTS, shared | prepare, PREPARE_WARPS),
        _instance(call, "scan_chunks", SCAN_ARGUMENTS, shared | scan, SCAN_WARPS),
    )


def _f32(value: int | float | str) -> float:
    return float(np.float32(value))


def _instance(
    call: Call, function: str, arguments: Sequence[str], constants: dict[str, int | bool | float], num_warps: int
) -> TritonInstance:
    roles = ("sizes", *arguments)
    return TritonInstance(
        MODULE,
        function,
        signature=tuple((role, "*i32" if role in INTEGERS else "*fp32") for role in roles),
        constants=tuple(constants.items()),
        num_warps=num_warps,
        num_stages=1,
        unaligned=tuple(role for role in roles if not _is_aligned(call, role)),
    )


def _is_aligned(call: Call, role: str) -> bool:
    """Checks alignment to 16 bytes: buffers, weights and pools have it; columns of a buffer, and states, may not."""
    matrix = call.operands.get(role)
    return matrix is None or matrix.column * DTYPES[matrix.dtype].bytes % 16 == 0


def chunk_launches(call: Call, delta: bool) -> tuple[Launch, Launch]:
    """Returns the launches over chunks; they run if a sequence has more than one token in the step.

    Args:
        call: the call.
        delta: True for the gated delta rule, False for Mamba-2.
    """
    heads = int(call.attributes["heads"])
    columns = call.operands["value"].columns // heads
    prepare, scan = chunk_instances(call, delta)
    # n tokens at any position are in at most (n + 2 · 63) / 64 chunks.
    chunks = Extent(linear(tokens=1, sequences=2 * (CHUNK - 1)), CHUNK)
    more = linear(tokens=1, sequences=-1)

    def launch(instance: TritonInstance, arguments: tuple[str, ...], grid: tuple[Extent, Extent, Extent]) -> Launch:
        return Launch(instance.expression, arguments, grid, 32 * instance.num_warps, rows=more)

    return (
        launch(prepare, PREPARE_ARGUMENTS, (chunks, blocks(heads), ONE)),
        launch(scan, SCAN_ARGUMENTS, (blocks(columns, BLOCK_V), blocks(heads), blocks(linear(sequences=1)))),
    )
