"""Facts about a matrix product on a GPU, its format and its sizes, by which gemm_tiles.py chooses."""

from dataclasses import dataclass

from enginewright.plugins.kernel import ceil_div

CHUNK = 64  # columns of K, as in gemm.cuh


@dataclass(frozen=True)
class GemmFormat:
    """The format of a product's operands: a Format of gemm.cuh."""

    name: str  # name of the Format
    lines: int  # lines of 64 bytes that 16 rows of weights have in a chunk of K
    x_bytes: int = 2  # bytes of an element of x
    scale_bytes: int = 4  # bytes of a group's scale, where weights have groups
    wgmma_chunks: int = 1  # chunks from a barrier of gemm_wgmma to the next


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

    format: GemmFormat  # format of the operands
    features: int  # rows of the weight
    columns: int  # columns of x and of the weight
    gated: bool  # True if the weight's rows are gates, then ups, whose blocks of 16 alternate
    groups: int = 0  # parts of a chunk with scales of their own; 0 if scales are those of whole rows
    zeros: bool = False  # True if groups have zero points
    batch_invariant: bool = False  # True if sums have one order for any number of tokens
    experts: int = 0  # matrices with this number of features each; 0 if there is one, for all tokens
    all_features: int = 0  # rows of the weight of which a rank has `features`; 0 if it has all

    @property
    def chunks(self) -> int:
        """Chunks of K."""
        return ceil_div(self.columns, CHUNK)

    @property
    def blocks_of_16(self) -> int:
        """Blocks of 16 rows of the weight."""
        return 2 * ceil_div(self.features // 2, 16) if self.gated else ceil_div(self.features, 16)

    @property
    def sums_are_exact(self) -> bool:
        """True if sums do not depend on their order."""
        return self.format.name == "w8a8" and not self.groups

    @property
    def scale_bytes(self) -> int:
        """Bytes of scales and zero points of a weight's row in a chunk."""
        return self.groups * (self.format.scale_bytes + self.zeros)

    def weight_bytes(self, features: int) -> int:
        """Computes the bytes of a chunk of weights, without scales; `features` is a multiple of 16."""
        return features // 16 * self.format.lines * 64

    def x_bytes(self, tokens: int) -> int:
        """Computes the bytes of a chunk of x, scales included."""
        scale_bytes = 4 * self.groups if self.format.x_bytes == 1 else 0
        return tokens * (CHUNK * self.format.x_bytes + scale_bytes)
