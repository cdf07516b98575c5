// GEMM of experts: gemm_large over each expert's own rows, with its part of the weight.
//
// starts, [experts + 1], says where the rows of experts start. Blocks in x are tiles of rows, more than there
// can be: as many as rows fill, and one for each expert. A warp finds out which expert its tile is of by
// counting the tiles before it. Sums go through K in ascending order, so that a row has the same bits in
// tiles of all sizes. Blocks that follow one another have the same features, and mostly the same weights.
#pragma once

#include "gemm_large.cuh"

namespace enginewright {

// A tile of `size` rows: its expert, its first row, and the row after the expert's last one; expert -1 where
// there are fewer tiles. By all lanes of a warp.
struct ExpertTile {
  int expert, first, end;

  static DEVICE ExpertTile of(int index, const int32_t* starts, int experts, int size) {
    int before = 0;  // tiles
    for (int begin = 0; begin < experts; begin += WARP) {
      int e = begin + lane(), first = e < experts ? starts[e] : 0, end = e < experts ? starts[e + 1] : 0;
      int tiles = (end - first + size - 1) / size, sum = tiles;
      UNROLL
      for (int distance = 1; distance < WARP; distance *= 2) {
        int below = shuffle_up(sum, distance);
        if (lane() >= distance) sum += below;
      }
      sum += before;
      uint32_t later = ballot(sum > index);  // experts whose last tile is this one or a later one
      if (later != 0) {
        int from = first_bit(later);
        int tile = index - shuffle(sum - tiles, from);
        int row = shuffle(first, from) + tile * size;
        return {begin + from, row, shuffle(end, from)};
      }
      before = shuffle(sum, WARP - 1);
    }
    return {-1, 0, 0};
  }
};

template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, 1)
gemm_experts(const Sizes*, const uint8_t* x, const uint8_t* weight, const float* x_scale,
             const uint8_t* scale, const uint8_t* zero, const float* bias, stored_t<S.type>* out,
             const int32_t* starts) {
  using Of = Shape<S>;
  const ExpertTile tile = ExpertTile::of(block_x(), starts, S.experts, Of::TOKENS);
  if (tile.expert < 0) return;
  int64_t expert = tile.expert, groups = expert * S.blocks() * Of::GROUPS * 16;
  weight += expert * S.blocks() * Of::BLOCK_BYTES;
  if constexpr (S.row_scales()) scale += expert * S.features * 4;
  if constexpr (S.weight_groups()) scale += groups * Of::GROUP_SCALE_BYTES;
  if constexpr (S.zeros) zero += groups;
  if constexpr (S.bias) bias += expert * S.features;
  multiply_tile<S>(x, weight, x_scale, scale, zero, bias, out, tile.first, tile.end,
                   block_y() * Of::FEATURES);
}

}  // namespace enginewright
