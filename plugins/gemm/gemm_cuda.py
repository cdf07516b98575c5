"""GPU launches of matrix products, in the tiles that gemm_tiles.py chooses, on each architecture of the engine."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import gcd

from enginewright.plan import Extent, Launch, Linear
from enginewright.plugins.architectures import ARCHITECTURES, ArchSpec, by_architecture
from enginewright.plugins.gemm import gemm
from enginewright.plugins.gemm.gemm_format import CHUNK, FORMATS, GemmDesc, GemmFormat
from enginewright.plugins.gemm.gemm_tiles import (
    TILES,
    GemmConfig,
    Split,
    Tiles,
    configs,
    feature_blocks,
    of_experts,
    of_heads,
)
from enginewright.plugins.kernel import ONE, Call, CudaKernel, KernelBinding, blocks, ceil_div, cuda_type, expression

ARGUMENTS = ("x", "weight", "x_scale", "scale", "zero", "bias", "out")
OF_ADAPTERS = ("adapters", "slots", "delta")  # roles that only the runtime gives, where rows may have adapters
# Fields of a GemmConfig that kernels are specialized to, as in Gemm of gemm.cuh.
TILE = ("feature_warps", "token_warps", "k_warps", "turns", "units", "tiles", "splits", "stages", "shared_bytes")


def gemm_on_cuda(binding: KernelBinding, format: str) -> CudaKernel:
    """Makes the GPU kernel of a matrix product.

    Args:
        binding: the kernel call.
        format: a name in FORMATS.
    """
    headers = {name: name for name in ("gemm_small", "gemm_large", "gemm_wgmma", "gemm_experts")}
    return tiled(binding.on_cuda(lambda _: (), **headers), FORMATS[format], TILES[format])


def tiled(kernel: CudaKernel, format: GemmFormat, tiles: Tiles) -> CudaKernel:
    """Replaces the tiles of a matrix product.

    Args:
        kernel: the GPU kernel.
        format: format of its operands.
        tiles: tiles to choose from.
    """

    def launches(call: Call) -> tuple[Launch, ...]:
        return by_architecture(call, lambda arch: launches_on(arch, call, format, tiles))

    return replace(
        kernel,
        launches=launches,
        scratch=partial(_partial, format, tiles),
        counters=partial(_counters, format, tiles),
    )


def launches_on(arch: ArchSpec, call: Call, format: GemmFormat, tiles: Tiles) -> list[Launch]:
    """Lists the launches of a matrix product on an architecture.

    Args:
        arch: the architecture.
        call: the call.
        format: format of its operands.
        tiles: tiles to choose from.
    """
    desc = desc_of(call, format)
    if desc.experts:
        return [_launch_of_experts(call, desc, config) for config in of_experts(desc, tiles)]
    return [_launch(call, desc, config) for config in configs(desc, arch, tiles)]


def desc_of(call: Call, format: GemmFormat) -> GemmDesc:
    """Describes the product of a call.

    Args:
        call: the call.
        format: format of its operands.
    """
    weight, group = call.operands["weight"], int(call.attributes.get("group", 0))
    return GemmDesc(
        format,
        features=weight.rows.constant,
        columns=weight.columns,
        gated=call.attributes["epilogue"] in gemm.GATED,
        groups=CHUNK // gcd(group, CHUNK) if group else 0,
        zeros="zero" in call.operands,
        batch_invariant=call.batch_invariant,
        experts=call.operands["starts"].columns - 1 if "starts" in call.operands else 0,
        all_features=call.part_of.operands["weight"].rows.constant if call.part_of else 0,
    )


def _launch_of_experts(call: Call, desc: GemmDesc, config: GemmConfig) -> Launch:
    """Makes a launch with a block for every possible tile: those that rows fill, and one more for each expert."""
    out = call.operands["out"]
    rows = Linear(desc.experts * config.tokens, out.rows.terms)
    return Launch(
        expression(config.kernel, "Gemm", **_fields(call, desc), **_tile(config), experts=desc.experts),
        arguments=(*ARGUMENTS, "starts"),
        grid=(blocks(rows, config.tokens), _features(desc, config), ONE),
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        rows=out.rows,
        low=config.low,
        high=config.high,
    )


def heads_on_cuda(binding: KernelBinding) -> CudaKernel:
    """Makes the GPU kernel of products with a bf16 weight for each head."""
    return binding.on_cuda(_launches_of_heads, gemm_heads="gemm_heads")


def _launches_of_heads(call: Call) -> tuple[Launch, ...]:
    heads, weight, out = int(call.attributes["heads"]), call.operands["weight"], call.operands["out"]
    features = weight.rows.constant // heads
    own = {
        "weight": replace(weight, rows=Linear(features)),
        "out": replace(out, columns=features, padded=features),
    }
    one = replace(call, operands={**call.operands, **own}, attributes={"epilogue": "none"}, part_of=None)
    desc = desc_of(one, FORMATS["bf16"])
    zeros_behind = 0 if out.dtype == "f32" else out.padded - out.columns
    return tuple(
        Launch(
            expression(config.kernel, "Gemm", **_fields(one, desc), **_tile(config), zeros_behind=zeros_behind),
            arguments=("x", "weight", "out"),
            grid=(blocks(out.rows, config.tokens), _features(desc, config), blocks(heads)),
            threads=config.threads,
            shared_bytes=config.shared_bytes,
            rows=out.rows,
            low=config.low,
            high=config.high,
        )
        for config in of_heads(desc, TILES["bf16"])
    )


def _launch(call: Call, desc: GemmDesc, config: GemmConfig) -> Launch:
    tile = _tile(config)
    if config.split_chunks:
        tile["split_chunks"] = config.split_chunks
    out, features = call.operands["out"], _features(desc, config)
    few = config.kernel == "gemm_small"
    return Launch(
        expression(config.kernel, "Gemm", **_fields(call, desc), **tile),
        arguments=(*ARGUMENTS, *(("partial", "counters") if few else ()), *OF_ADAPTERS),
        grid=(features, blocks(config.splits), ONE) if few else (blocks(out.rows, config.tokens), features, ONE),
        threads=config.threads,
        shared_bytes=config.shared_bytes,
        rows=out.rows,
        low=config.low,
        high=config.high,
    )


def _tile(config: GemmConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in TILE}


def _features(desc: GemmDesc, config: GemmConfig) -> Extent:
    """Returns the blocks in the grid's dimension of features."""
    return blocks(ceil_div(desc.blocks_of_16, config.features // 16))


def _fields(call: Call, desc: GemmDesc) -> Mapping[str, int | bool | str]:
    """Returns the constants of a kernel, without its tile."""
    x, out, x_scale = call.operands["x"], call.operands["out"], call.operands.get("x_scale")
    return {
        "format": f"Format::{desc.format.name}",
        "epilogue": f"Epilogue::{call.attributes['epilogue']}",
        "rows": 0 if desc.experts else call.rows("out"),  # kernels for experts read them from starts
        "type": cuda_type(out.dtype),
        "features": desc.features,
        "columns": desc.columns,
        "x_stride": x.stride,
        "x_scale_stride": x_scale.stride if x_scale else 0,
        "out_stride": out.stride,
        "padded": out.columns if out.dtype == "f32" else out.padded,
        "group": int(call.attributes.get("group", 0)),
        "zeros": desc.zeros,
        "bias": "bias" in call.operands,
    }


def _partial(format: GemmFormat, tiles: Tiles, call: Call) -> tuple[str, Linear, int]:
    """Returns the buffer for sums of splits, for the architecture with the most of them."""
    desc = desc_of(call, format)
    if desc.experts:
        return "partial", Linear(0), 1
    splits = max(Split.of(desc, ARCHITECTURES[name], tiles).splits for name in call.architectures)
    rows = splits * tiles.small_tokens[-1] if splits > 1 else 0
    return "partial", Linear(rows), feature_blocks(desc, tiles) * tiles.feature_warps * 32


def _counters(format: GemmFormat, tiles: Tiles, call: Call) -> tuple[str, Linear, int]:
    desc = desc_of(call, format)
    return "counters", Linear(1), 1 if desc.experts else feature_blocks(desc, tiles)
