"""y = x · Wᵀ (+ bias) for many rows: tensor cores, tiles taken in turn by as many programs as the GPU runs at once."""

import triton
import triton.language as tl


@triton.jit
def gemm_bf16(
    x,  # [rows, K] bf16
    w,  # [N, K] bf16
    bias,  # [N] f32, not read without HAS_BIAS
    y,  # [rows, N] bf16 or f32
    rows,  # [1] i32, so that launches can be replayed as a graph
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,  # elements from one row to the next; a multiple of 16 bytes
    W_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,  # tiles of rows that go over the columns together, so that they share W in the L2 cache
):
    """Every output is summed over K in ascending order, in f32, whatever else there is (docs/design.md).

    Descriptors become TMA where the GPU has it, and pointers with masks elsewhere; they read zeros beyond rows and K.
    """
    m = tl.load(rows)
    x_tiles = tl.make_tensor_descriptor(x, [m, K], [X_STRIDE, 1], [BLOCK_M, BLOCK_K])
    w_tiles = tl.make_tensor_descriptor(w, [N, K], [W_STRIDE, 1], [BLOCK_N, BLOCK_K])
    y_tiles = tl.make_tensor_descriptor(y, [m, N], [Y_STRIDE, 1], [BLOCK_M, BLOCK_N])
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group, place = tile // (GROUP_M * tiles_n), tile % (GROUP_M * tiles_n)
        group_rows = min(tiles_m - group * GROUP_M, GROUP_M)
        row = (group * GROUP_M + place % group_rows) * BLOCK_M
        column = place // group_rows * BLOCK_N
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            sums = tl.dot(x_tiles.load([row, k]), w_tiles.load([column, k]).T, sums)
        if HAS_BIAS:
            columns = column + tl.arange(0, BLOCK_N)
            sums += tl.load(bias + columns, mask=columns < N, other=0.0)[None, :]
        y_tiles.store([row, column], sums.to(y.dtype.element_ty))
