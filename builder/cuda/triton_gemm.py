"""Which tiles Triton's GEMMs are compiled with on each architecture."""

from typing import NamedTuple

from enginewright.triton_instance import TritonInstance


class Tiles(NamedTuple):
    """Rows, columns and depth of a tile; its warps, and the stages of depth that are in flight."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# Chosen to fit shared memory with outputs in f32, not measured: no GPU has been at hand.
TILES = {
    "sm_80": Tiles(128, 128, 64, 8, 3),
    "sm_86": Tiles(128, 128, 32, 8, 3),
    "sm_89": Tiles(128, 128, 32, 8, 3),
    "sm_90a": Tiles(128, 128, 64, 8, 4),
    "sm_100a": Tiles(128, 128, 64, 8, 4),
    "sm_120": Tiles(128, 128, 32, 8, 3),
    "ptx": Tiles(128, 128, 32, 8, 3),
}
_GROUP_M = 8  # tiles of rows that share columns in the L2 cache


def gemm_bf16(
    sm: str, columns: int, depth: int, strides: tuple[int, int, int], *, bias: bool, out: str = "bf16"
) -> TritonInstance:
    """y = x · Wᵀ (+ bias), `csrc/cuda/triton/gemm.py`.

    Args:
        columns: of y, the rows of W. depth: columns of x and W.
        strides: elements from one row to the next, of x, W and y; multiples of 16 bytes.
        out: of y, "bf16" or "f32".
    """
    tiles, (x, w, y) = TILES[sm], strides
    constants = {
        "N": columns,
        "K": depth,
        "X_STRIDE": x,
        "W_STRIDE": w,
        "Y_STRIDE": y,
        "HAS_BIAS": bias,
        "BLOCK_M": tiles.m,
        "BLOCK_N": tiles.n,
        "BLOCK_K": tiles.k,
        "GROUP_M": _GROUP_M,
    }
    types = {"x": "*bf16", "w": "*bf16", "bias": "*fp32", "y": {"bf16": "*bf16", "f32": "*fp32"}[out], "rows": "*i32"}
    return TritonInstance(
        module="enginewright.csrc.cuda.triton.gemm",
        function="gemm_bf16",
        signature=tuple(types.items()),
        constants=tuple(constants.items()),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
