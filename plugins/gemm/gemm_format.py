"""What a matrix product is to a GPU: the facts of its format and its sizes, by which gemm_tiles.py chooses."""

from dataclasses import dataclass

from enginewright.plugins.kernel import ceil_div

CHUNK = 64  # of K, as gemm.cuh has it


@dataclass(frozen=True)
class GemmFormat:
    """A Format of gemm.cuh."""

    name: str
    lines: int  # of 64 bytes, that 16 rows of weights have in a chunk of K
    x_bytes: int = 2  # of an element of x
    scale_bytes: int = 4  # of a group's scale, where weights have groups
    wgmma_chunks: int = 1  # from a barrier of gemm_wgmma to the next


FORMATS = {
    format.name: format
    for format in (
        GemmFormat("bf16", 32),
        GemmFormat("w8a16", 16),
        GemmFormat("fp8a16", 16),
        GemmFormat("w4a16", 8, scale_bytes=2),
        GemmFormat("mxfp4a16", 8, scale_bytes=2),
        GemmFormat("w8a8", 16, x_bytes=1, scale_bytes=0),
        GemmFormat("fp8a8", 16, x_bytes=1, wgmma_chunks=2),
    )
}


@dataclass(frozen=True)
class GemmDesc:
    """A product of x [tokens, columns] with a weight [features, columns]."""

    format: GemmFormat
    features: int
    columns: int
    gated: bool  # the weight's rows are gates, then ups, and their blocks of 16 alternate
    groups: int = 0  # parts of a chunk that are scaled by themselves; 0 where scales are of whole rows
    zeros: bool = False  # whether groups have zero points
    batch_invariant: bool = False  # sums have one order for any number of tokens
    experts: int = 0  # matrices, each of so many features; 0 where there is one, for all tokens

    @property
    def chunks(self) -> int:
        return ceil_div(self.columns, CHUNK)

    @property
    def blocks_of_16(self) -> int:
        return 2 * ceil_div(self.features // 2, 16) if self.gated else ceil_div(self.features, 16)

    @property
    def sums_are_exact(self) -> bool:
        return self.format.name == "w8a8" and not self.groups

    @property
    def scale_bytes(self) -> int:
        """What groups of a chunk have beside a row of weights: scales and zero points."""
        return self.groups * (self.format.scale_bytes + self.zeros)

    def weight_bytes(self, features: int) -> int:
        """Of a chunk of some rows of weights, multiples of 16, without scales."""
        return features // 16 * self.format.lines * 64

    def x_bytes(self, tokens: int) -> int:
        """Of a chunk of x, with its scales."""
        scale_bytes = 4 * self.groups if self.format.x_bytes == 1 else 0
        return tokens * (CHUNK * self.format.x_bytes + scale_bytes)
