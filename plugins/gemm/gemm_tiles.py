"""Chooses the GPU kernels of a matrix product and their tiles: a heuristic that changes no result.

gemm_small.cuh is for few tokens, gemm_large.cuh or gemm_wgmma.cuh for many. TILES come from calculation and are not
measured: the results of `python -m benchmarks.gpu --parts tiles` on a GPU are to replace them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from enginewright.plugins.architectures import ArchSpec
from enginewright.plugins.gemm.gemm_format import CHUNK, GemmDesc
from enginewright.plugins.kernel import ceil_div

WARP = 32
K_WARPS = 2  # warps of a block of gemm_small, for each of its feature_warps
SHARED_BYTES = 99 << 10  # limit of a block's shared memory in gemm_small and gemm_large: large GPUs have room for two
MANY = 2**31 - 1  # tokens


@dataclass(frozen=True)
class Tiles:
    """The choices for a format."""

    feature_warps: int = 4  # warps of a block of gemm_small over features; K_WARPS share each
    turns: int = 1  # chunks of each of these warps in a step
    waves: int = 2  # limit of the blocks for each multiprocessor, where K is split
    in_flight_bytes: int = 36 << 10  # minimum of the bytes in flight of a block of gemm_small, if they fit
    small_tokens: tuple[int, ...] = (8, 16, 32, 64)  # limits of tokens of gemm_small, each a kernel of its own
    large_stages: int = 4  # stages of kernels for more tokens, if they fit
    large_units: int = 2  # units of a warp of gemm_large, where there are no groups
    # minimum of blocks for each multiprocessor: with fewer large tiles, smaller ones are used
    fewest_blocks: float = 1.0


TILES: Mapping[str, Tiles] = {
    "bf16": Tiles(feature_warps=2),
    "w8a16": Tiles(),
    "fp8a16": Tiles(),
    "w4a16": Tiles(turns=2, small_tokens=(8, 16, 32)),
    "mxfp4a16": Tiles(turns=2, small_tokens=(8, 16, 32)),
    "w8a8": Tiles(),
    "fp8a8": Tiles(large_units=1),
}


@dataclass(frozen=True)
class GemmConfig:
    """A kernel with its tile, for a range of tokens. The names are those of Gemm in gemm.cuh."""

    kernel: str  # name of the kernel, and of its header in csrc/cuda
    low: int  # minimum of tokens
    high: int  # maximum of tokens
    features: int  # features of a block
    tokens: int  # tokens of a block
    stages: int  # stages of the pipeline of copies
    shared_bytes: int  # shared memory of a block, in bytes
    token_warps: int = 1  # warps of a block over tokens
    k_warps: int = 1  # warps of a block over K
    turns: int = 1  # chunks of a warp in a step
    units: int = 1  # units of 32 features of a warp
    splits: int = 1  # parts of K
    split_chunks: int = 0  # chunks of a split of gemm_small, where gemm_large has to add in its order; otherwise 0

    @property
    def feature_warps(self) -> int:
        """Warps of a block over features."""
        return self.features // 32 // self.units

    @property
    def tiles(self) -> int:
        """Tiles of 8 tokens of a warp."""
        return self.tokens // 8 // self.token_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.feature_warps * self.token_warps * self.k_warps * WARP


@dataclass(frozen=True)
class Split:
    """The parts of K in gemm_small. K_WARPS and these fix the order of sums, so it does not depend on tokens."""

    splits: int  # parts of K
    chunks: int  # chunks of each part

    @staticmethod
    def of(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles) -> "Split":
        """Chooses the split of a product, for a part of one as for all of it: sums then have the same order.

        Args:
            gemm: the product.
            arch: the architecture.
            tiles: tiles to choose from.
        """
        step = K_WARPS * tiles.turns  # chunks
        whole = replace(gemm, features=gemm.all_features or gemm.features)
        steps, blocks = ceil_div(gemm.chunks, step), feature_blocks(whole, tiles)
        wanted = max(min(tiles.waves * arch.multiprocessors // blocks, steps // 2), 1)
        split_steps = ceil_div(steps, wanted)
        return Split(ceil_div(steps, split_steps), split_steps * step)


def feature_blocks(gemm: GemmDesc, tiles: Tiles) -> int:
    """Returns the blocks of gemm_small for each split.

    Args:
        gemm: the product.
        tiles: tiles to choose from.
    """
    return ceil_div(gemm.blocks_of_16, 2 * tiles.feature_warps)


def configs(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles) -> list[GemmConfig]:
    """Lists the kernels of a product, one for each range of tokens.

    Args:
        gemm: the product.
        arch: the architecture.
        tiles: tiles to choose from.
    """
    wgmma = arch.wgmma_gemm and not gemm.batch_invariant
    return [*_small(gemm, arch, tiles), *(_wgmma if wgmma else _large)(gemm, arch, tiles)]


def of_experts(gemm: GemmDesc, tiles: Tiles) -> list[GemmConfig]:
    """Lists the kernels of experts' products, one for each range of rows.

    Tiles are small while experts have few rows on average. Sums have the same order in all of them.

    Args:
        gemm: the product.
        tiles: tiles to choose from.
    """
    found, low = list[GemmConfig](), 1
    for tokens, max_rows in ((8, 8 * gemm.experts), (32, 48 * gemm.experts), (64, MANY)):
        token_warps, features = (1, 128) if tokens == 8 else (2, 64)
        stage_bytes = _stage_bytes(gemm, features, tokens)
        stages = min(SHARED_BYTES // stage_bytes, tiles.large_stages)
        found.append(
            GemmConfig(
                "gemm_experts",
                low,
                max_rows,
                features,
                tokens,
                stages=stages,
                shared_bytes=stages * stage_bytes,
                token_warps=token_warps,
            )
        )
        low = max_rows + 1
    return found


def of_heads(gemm: GemmDesc, tiles: Tiles) -> list[GemmConfig]:
    """Lists the kernels of heads' products, one for each range of tokens: as for an expert that has all tokens.

    Args:
        gemm: the product of one head.
        tiles: tiles to choose from.
    """
    return [replace(config, kernel="gemm_heads") for config in of_experts(replace(gemm, experts=1), tiles)]


def _small(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles) -> list[GemmConfig]:
    features, found, low = tiles.feature_warps * 32, list[GemmConfig](), 1
    weight_bytes = gemm.weight_bytes(features) + features * 4 * gemm.scale_bytes  # a lane has the scales of four rows
    for tokens in tiles.small_tokens:
        stage_bytes = tiles.turns * K_WARPS * (weight_bytes + gemm.x_bytes(tokens))
        stages = min(SHARED_BYTES // stage_bytes, ceil_div(tiles.in_flight_bytes, stage_bytes) + 1)
        sum_bytes = K_WARPS * tokens * (features + 4) * 4
        found.append(
            GemmConfig(
                "gemm_small",
                low,
                tokens,
                features,
                tokens,
                stages=stages,
                shared_bytes=max(stages * stage_bytes, sum_bytes),
                k_warps=K_WARPS,
                turns=tiles.turns,
                splits=Split.of(gemm, arch, tiles).splits,
            )
        )
        low = tokens + 1
    return found


def _large(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles) -> list[GemmConfig]:
    """Lists the kernels of gemm_large.

    Tiles are 64 x 64 while larger ones are fewer than multiprocessors, then 128 x 128; they are 128 features x 64
    tokens where sums in gemm_small's order leave no registers for more.
    """
    in_order = gemm.batch_invariant and not gemm.sums_are_exact
    split_chunks = Split.of(gemm, arch, tiles).chunks if in_order else 0
    max_tokens = 64 if in_order and (gemm.groups or split_chunks * CHUNK < gemm.columns) else 128

    def config(low: int, high: int, features: int, tokens: int) -> GemmConfig:
        units = 1 if features == 64 or gemm.groups or in_order else tiles.large_units
        stage_bytes = _stage_bytes(gemm, features, tokens)
        stages = min(SHARED_BYTES // stage_bytes, tiles.large_stages)
        return GemmConfig(
            "gemm_large",
            low,
            high,
            features,
            tokens,
            stages=stages,
            shared_bytes=stages * stage_bytes,
            token_warps=2,
            units=units,
            split_chunks=split_chunks,
        )

    first, max_small = tiles.small_tokens[-1] + 1, _too_few(gemm, arch, tiles, 128, max_tokens)
    small = [config(first, max_small, 64, 64)] if max_small >= first else []
    return [*small, config(max(first, max_small + 1), MANY, 128, max_tokens)]


def _wgmma(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles) -> list[GemmConfig]:
    """Lists the kernels of gemm_wgmma.

    Tiles have 128 features, of which a multiprocessor has room for two, while larger ones are fewer than
    multiprocessors; then 256.
    """
    chunks = gemm.format.wgmma_chunks
    tokens = 64 if gemm.groups and chunks == 1 else 128

    def config(low: int, high: int, features: int, shared_bytes: int) -> GemmConfig:
        stage_bytes = ceil_div(_stage_bytes(gemm, features, tokens), 1024) * 1024
        stages = min(shared_bytes // (stage_bytes * chunks), tiles.large_stages) * chunks
        return GemmConfig("gemm_wgmma", low, high, features, tokens, stages=stages, shared_bytes=stages * stage_bytes)

    first, max_small = tiles.small_tokens[-1] + 1, _too_few(gemm, arch, tiles, 256, tokens)
    small = [config(first, max_small, 128, arch.shared_bytes_of_two)] if max_small >= first else []
    return [*small, config(max(first, max_small + 1), MANY, 256, arch.shared_bytes)]


def _too_few(gemm: GemmDesc, arch: ArchSpec, tiles: Tiles, features: int, tokens: int) -> int:
    """Returns the maximum of tokens for which tiles of features x tokens are too few."""
    max_blocks = int(arch.multiprocessors * tiles.fewest_blocks) - 1
    return max_blocks // ceil_div(gemm.blocks_of_16, features // 16) * tokens


def _stage_bytes(gemm: GemmDesc, features: int, tokens: int) -> int:
    """Computes the bytes of a chunk of weights and of x, scales included, in a kernel for many tokens."""
    return gemm.weight_bytes(features) + features * gemm.scale_bytes + gemm.x_bytes(tokens)
