// The products of attention for AVX2 (attention_split.h says what they are for).
//
// A few rows, as in decoding, pass keys and values in registers, as on any instruction set
// (attention_tile.h). With more, a group of 16 keys, or the 16 dims of a split's values, become fp32 once in
// L1, and the rows pass them by FMAs (fma_avx2.h): in the same order, and thus with the same bits.
#pragma once

#include "attention_tile.h"
#include "fma_avx2.h"

namespace enginewright {
namespace {

class SplitAttentionAvx2 : public SplitAttention<Avx2> {
 public:
  SplitAttentionAvx2(int64_t head_dim, int64_t head_dim_pad, float scale, float softcap)
      : SplitAttention<Avx2>(head_dim, head_dim_pad, scale, softcap), head_dim_(head_dim) {}

  void run(const TileQueries& tile, const SplitKv& kv, const TileScratch& scratch, float* partial) const {
    if (tile.rows < kExpandRows) return SplitAttention<Avx2>::run(tile, kv, scratch, partial);
    float x[tile_rows * kStride], w[kSplitPositions * 16];
    for (int64_t dim = 0; dim < head_dim_; dim += kSplitPositions) {
      const int64_t left = head_dim_ - dim, count = left < kSplitPositions ? left : kSplitPositions;
      expand_rows(tile.q + dim, width_, tile.rows, (count + 15) / 16 * 16, 1.0f, x, kStride);
      for (int64_t g = 0; g < kv.groups; ++g) {
        expand_lines<Bf16Floats>(bytes(kv.keys[g] + dim * kGroup), 64, count, w);
        fma_rows<kStride>(x, tile.rows, w, count, dim == 0, scratch.scores + g * kGroup, kSplitPositions);
      }
    }
    softmax(tile, kv, scratch, partial);
    const int64_t positions = kv.groups * kGroup;
    expand_rows(scratch.p, kSplitPositions, tile.rows, positions, 1.0f, x, kStride);
    for (int64_t dim = 0; dim < width_; dim += 16) {
      for (int64_t g = 0; g < kv.groups; ++g) {
        expand_lines<Bf16Floats>(bytes(kv.values[g] + dim * 2), width_ * 4, kGroup, w + g * kGroup * 16);
      }
      fma_rows<kStride>(x, tile.rows, w, positions, true, partial + dim, partial_floats(width_));
    }
  }

 private:
  static constexpr int64_t kExpandRows = 6;
  static constexpr int64_t kStride = kSplitPositions + 16;  // rows do not share the sets of L1
  static const std::byte* bytes(const uint16_t* p) { return reinterpret_cast<const std::byte*>(p); }

  const int64_t head_dim_;
};

}  // namespace
}  // namespace enginewright
