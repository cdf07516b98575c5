"""What GPUs launch for matrix products: csrc/cuda/gemm_small.cuh for few tokens, gemm_large.cuh for many.

The tiles in FORMATS are reasoned on paper and unmeasured: what `python -m benchmarks.gpu --parts tiles` finds on a GPU
is to replace them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import onnx_ir as ir

from enginewright.plan import Extent, Launch, Linear
from enginewright.plugins import gemm, hopper
from enginewright.plugins.kernel import ONE, TYPES, Call, CudaKernel, KernelBinding, blocks, expression
from enginewright.plugins.plugin import dims_of, operand

CHUNK = 64  # of K, as gemm.cuh has it
WARP = 32
SHARED_BYTES = 99 << 10  # what a block may have on every GPU since SM 80
HOPPER_BYTES = 227 << 10, 113 << 10  # of shared memory for a block, and for each of two on a multiprocessor
MULTIPROCESSORS = 132  # of the GPU that tables are made for (H200); others have 84 to 188
ARGUMENTS = ("x", "weight", "x_scale", "scale", "zero", "bias", "out", "partial", "counters")


@dataclass(frozen=True)
class Format:
    """A Format of gemm.cuh. lines: 64-byte lines of 16 rows in a chunk of K. x_bytes: of an element of x. scale_bytes:
    of a group's scale, where weights have groups. turn: chunks from a barrier of gemm_wgmma to the next. What follows
    are its tiles.

    Of gemm_small, feature_warps: of a block, which has K_WARPS of each. turns: chunks of each of them in a step. waves:
    blocks for each multiprocessor, at most, where K is split. in_flight_bytes: of a block, at least, if they fit.
    small_tokens: of a launch, at most, each a kernel of its own. Of kernels for more, large_stages: if they fit.
    large_units: of a warp of gemm_large, where there are no groups. fewest_blocks: for each multiprocessor; where the
    largest tiles are fewer, smaller ones are taken.
    """

    name: str
    lines: int
    x_bytes: int = 2
    scale_bytes: int = 4
    turn: int = 1
    feature_warps: int = 4
    turns: int = 1
    waves: int = 2
    in_flight_bytes: int = 36 << 10
    small_tokens: tuple[int, ...] = (8, 16, 32, 64)
    large_stages: int = 4
    large_units: int = 2
    fewest_blocks: float = 1.0


K_WARPS = 2
FORMATS = {
    format.name: format
    for format in (
        Format("bf16", 32, feature_warps=2),
        Format("w8a16", 16),
        Format("fp8a16", 16),
        Format("w4a16", 8, turns=2, small_tokens=(8, 16, 32), scale_bytes=2),
        Format("mxfp4a16", 8, turns=2, small_tokens=(8, 16, 32), scale_bytes=2),
        Format("w8a8", 16, x_bytes=1, scale_bytes=0),
        Format("fp8a8", 16, x_bytes=1, turn=2, large_units=1),
    )
}


def gemm_on_cuda(binding: KernelBinding, format: str) -> CudaKernel:
    """format: a name in FORMATS."""
    headers = {name: name for name in ("gemm_small", "gemm_large", "gemm_wgmma")}
    return tiled(binding.on_cuda(partial(_launches, FORMATS[format]), **headers), FORMATS[format])


def tiled(kernel: CudaKernel, format: Format) -> CudaKernel:
    """The same product with the tiles of `format`."""
    return replace(
        kernel,
        launches=partial(_launches, format),
        scratch=partial(_partial, format),
        counters=partial(_counters, format),
    )


def _launches(format: Format, call: Call) -> tuple[Launch, ...]:
    large = hopper.in_place_of(_large_launches(format, call), wgmma_launches(format, call), hopper.GEMM_ON, call)
    return (*_small_launches(format, call), *large)


@dataclass(frozen=True)
class _Blocks:
    """How gemm_small divides a weight [features, columns]: blocks of threads in x (features) and y (splits of K).

    The order of sums follows from K_WARPS and splits, so neither depends on tokens.
    """

    features: int
    splits: int
    split_chunks: int

    @staticmethod
    def of(format: Format, features: int, columns: int, gated: bool) -> "_Blocks":
        count = _ceil(_blocks_of_16(features, gated), 2 * format.feature_warps)
        steps = _ceil(_ceil(columns, CHUNK), K_WARPS * format.turns)
        split_steps = _ceil(steps, max(min(format.waves * MULTIPROCESSORS // count, steps // 2), 1))
        return _Blocks(count, _ceil(steps, split_steps), split_steps * K_WARPS * format.turns)


def _blocks_of(format: Format, call: Call) -> _Blocks:
    weight = call.operands["weight"]
    return _Blocks.of(format, weight.rows.constant, weight.columns, call.attributes["epilogue"] in gemm.GATED)


def _small_launches(format: Format, call: Call) -> list[Launch]:
    divided, warps, runs = _blocks_of(format, call), format.feature_warps * K_WARPS, _runs(call)
    weight_bytes = warps * (format.lines // 4) * WARP * 16
    weight_bytes += warps * runs * WARP * 4 * _scale_bytes(format, call)
    launches, low = [], 1
    for tokens in format.small_tokens:
        stage_bytes = format.turns * (weight_bytes + K_WARPS * _x_bytes(format, call, tokens))
        stages = min(SHARED_BYTES // stage_bytes, _ceil(format.in_flight_bytes, stage_bytes) + 1)
        sum_bytes = K_WARPS * tokens * (format.feature_warps * 32 + 4) * 4
        tile = {
            "feature_warps": format.feature_warps,
            "token_warps": 1,
            "k_warps": K_WARPS,
            "turns": format.turns,
            "units": 1,
            "tiles": tokens // 8,
            "splits": divided.splits,
            "stages": stages,
            "shared_bytes": max(stages * stage_bytes, sum_bytes),
        }
        grid = (blocks(divided.features), blocks(divided.splits), ONE)
        launches.append(_launch("gemm_small", format, call, tile, grid, low, tokens))
        low = tokens + 1
    return launches


def _large_launches(format: Format, call: Call) -> list[Launch]:
    """Tiles of 64 x 64 while larger ones are fewer than multiprocessors, then of 128 x 128; of 128 features x 64 tokens
    where sums in gemm_small's order leave no registers for more.
    """
    grouped, order = _runs(call) > 0, _small_order(format, call) if call.batch_invariant else {}
    most_tokens = 64 if order and (grouped or order["split_chunks"] * CHUNK < call.operands["weight"].columns) else 128
    most_small = _most_tokens(format, call, 128, most_tokens)
    sizes = (*(((64, 64, most_small),) if most_small > format.small_tokens[-1] else ()), (128, most_tokens, 2**31 - 1))
    launches, low = [], format.small_tokens[-1] + 1
    for features, tokens, high in sizes:
        units = 1 if features == 64 or grouped or order else format.large_units
        stage_bytes = _stage_bytes(format, call, features, tokens)
        stages = min(SHARED_BYTES // stage_bytes, format.large_stages)
        tile = {**_tile(features // 32 // units, 2, units, tokens // 16, stages, stage_bytes), **order}
        launches.append(_large_launch("gemm_large", format, call, tile, features, tokens, low, high))
        low = high + 1
    return launches


def _most_tokens(format: Format, call: Call, features: int, tokens: int) -> int:
    """For which tiles of features x tokens are too few."""
    most_blocks = int(MULTIPROCESSORS * format.fewest_blocks) - 1
    return most_blocks // _ceil(_of_16(call), features // 16) * tokens


def _small_order(format: Format, call: Call) -> Mapping[str, int]:
    """What makes gemm_large add as gemm_small does; nothing where sums are exact."""
    if format.name == "w8a8" and not _runs(call):
        return {}
    return {"split_chunks": _blocks_of(format, call).split_chunks}


def wgmma_launches(format: Format, call: Call) -> list[Launch]:
    """In place of those of gemm_large: tiles of 128 features, of which a multiprocessor has room for two, while larger
    ones are fewer than multiprocessors; then of 256.
    """
    tokens = 64 if _runs(call) and format.turn == 1 else 128
    most_small = _most_tokens(format, call, 256, tokens)
    sizes = (*(((128, most_small),) if most_small > format.small_tokens[-1] else ()), (256, 2**31 - 1))
    launches, low = [], format.small_tokens[-1] + 1
    for features, high in sizes:
        stage_bytes = _ceil(_stage_bytes(format, call, features, tokens), 1024) * 1024
        most_stages = HOPPER_BYTES[features == 128] // (stage_bytes * format.turn)
        stages = min(most_stages, format.large_stages) * format.turn
        tile = _tile(features // 32, 1, 1, tokens // 8, stages, stage_bytes)
        launches.append(_large_launch("gemm_wgmma", format, call, tile, features, tokens, low, high))
        low = high + 1
    return launches


def _tile(
    feature_warps: int, token_warps: int, units: int, tiles: int, stages: int, stage_bytes: int
) -> Mapping[str, int]:
    """Of a kernel for many tokens."""
    return {
        "feature_warps": feature_warps,
        "token_warps": token_warps,
        "k_warps": 1,
        "turns": 1,
        "units": units,
        "tiles": tiles,
        "splits": 1,
        "stages": stages,
        "shared_bytes": stages * stage_bytes,
    }


def _large_launch(
    function: str, format: Format, call: Call, tile: Mapping[str, int], features: int, tokens: int, low: int, high: int
) -> Launch:
    grid = (blocks(call.operands["out"].rows, tokens), blocks(_ceil(_of_16(call), features // 16)), ONE)
    return _launch(function, format, call, tile, grid, low, high)


def _stage_bytes(format: Format, call: Call, features: int, tokens: int) -> int:
    """Of a chunk of weights and of x, for a tile."""
    weight_bytes = features // 16 * format.lines * 64 + features * _runs(call) * _scale_bytes(format, call)
    return weight_bytes + _x_bytes(format, call, tokens)


def _launch(
    function: str,
    format: Format,
    call: Call,
    tile: Mapping[str, int],
    grid: tuple[Extent, Extent, Extent],
    low: int,
    high: int,
) -> Launch:
    kernel = expression(function, "Gemm", **_fields(format, call), **tile)
    arguments = ARGUMENTS if function == "gemm_small" else ARGUMENTS[:-2]
    threads = tile["feature_warps"] * tile["token_warps"] * tile["k_warps"] * WARP
    return Launch(kernel, arguments, grid, threads, tile["shared_bytes"], call.operands["out"].rows, low, high)


def _runs(call: Call) -> int:
    """Runs of a chunk that are scaled by themselves; 0 where there are no groups."""
    group = int(call.attributes.get("group", 0))
    return CHUNK // gcd(group, CHUNK) if group else 0


def _scale_bytes(format: Format, call: Call) -> int:
    """Of a row of weights in a run: its scale, and its zero."""
    return format.scale_bytes + ("zero" in call.operands)


def _x_bytes(format: Format, call: Call, tokens: int) -> int:
    """Of a chunk of x in shared memory, with its scales."""
    scale_bytes = 4 * _runs(call) if format.x_bytes == 1 else 0
    return tokens * (CHUNK * format.x_bytes + scale_bytes)


def _of_16(call: Call) -> int:
    return _blocks_of_16(call.operands["weight"].rows.constant, call.attributes["epilogue"] in gemm.GATED)


def _blocks_of_16(features: int, gated: bool) -> int:
    return 2 * _ceil(features // 2, 16) if gated else _ceil(features, 16)


def _fields(format: Format, call: Call) -> dict[str, int | bool | str]:
    """What a kernel is specialized to, but for its shape."""
    x, weight, out = (call.operands[role] for role in ("x", "weight", "out"))
    x_scale = call.operands.get("x_scale")
    return {
        "format": f"Format::{format.name}",
        "epilogue": f"Epilogue::{call.attributes['epilogue']}",
        "rows": call.rows("out"),
        "type": TYPES[out.dtype],
        "features": weight.rows.constant,
        "columns": weight.columns,
        "x_stride": x.stride,
        "x_scale_stride": x_scale.stride if x_scale else 0,
        "out_stride": out.stride,
        "padded": out.columns if out.dtype == "f32" else out.padded,
        "group": int(call.attributes.get("group", 0)),
        "zeros": "zero" in call.operands,
        "bias": "bias" in call.operands,
    }


def _divided(format: Format, node: ir.Node) -> tuple[_Blocks, int]:
    """And the width of a row of `partial`."""
    features, columns = dims_of(operand(node, 1))
    assert isinstance(features, int) and isinstance(columns, int)
    divided = _Blocks.of(format, features, columns, node.attributes["epilogue"].as_string() in gemm.GATED)
    return divided, divided.features * format.feature_warps * 32


def _partial(format: Format, node: ir.Node) -> tuple[str, Linear, int]:
    """Sums of each split, where there are several."""
    divided, columns = _divided(format, node)
    rows = divided.splits * format.small_tokens[-1] if divided.splits > 1 else 0
    return "partial", Linear(rows), columns


def _counters(format: Format, node: ir.Node) -> tuple[str, Linear, int]:
    return "counters", Linear(1), _divided(format, node)[0].features


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
