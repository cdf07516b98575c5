// The products of attention on AMX tiles (attention_split.h says what they are for; gemm_amx.h has the
// tiles).
//
// KV pools are B tiles as they lie in memory: 16 lines of K are 32 dims x 16 positions, 16 rows of V are 32
// positions x 16 dims. A tiles are up to 16 queries, or their p; C goes straight to the scores, or to the
// partial rows. TDPBF16PS adds 32 dims, or 32 positions, at a time: steps aligned to absolute 0 make a
// query's bits the same wherever a tile begins and whatever else it holds.
#pragma once

#include "attention_split.h"
#include "gemm_amx.h"

namespace enginewright {
namespace {

class AmxSplitAttention : public SplitSoftmax<Avx512> {
 public:
  static constexpr int64_t tile_rows = 32;

  AmxSplitAttention(int64_t, int64_t head_dim_pad, float scale, float softcap)
      : SplitSoftmax(head_dim_pad, scale, softcap) {}

  // Around run()s with `rows` queries, and after all of a thread.
  static void begin(int64_t rows) {
    Amx::configure(rows > 16 ? tile_config(16, rows - 16) : tile_config(rows, 0));
  }
  static void end() { Amx::release(); }

  // partial: (rows, partial_floats)
  void run(const TileQueries<uint16_t>& tile, const SplitKv<uint16_t>& kv, const TileScratch& scratch,
           Ahead<Avx512>& ahead, float* partial) const {
    Amx::written();
    if (tile.rows > 16) {
      for (int64_t g = 0; g < kv.groups; g += 2) score_two(tile.q, kv.keys + g, scratch.scores + g * kGroup);
    } else {
      int64_t g = 0;
      for (; g + 4 <= kv.groups; g += 4) score_one<4>(tile.q, kv.keys + g, scratch.scores + g * kGroup);
      if (g < kv.groups) score_one<2>(tile.q, kv.keys + g, scratch.scores + g * kGroup);
    }
    softmax(tile, kv, scratch, ahead, partial);
    Amx::written();
    if (tile.rows > 16) {
      for (int64_t dim = 0; dim < width_; dim += 32) weigh_two(scratch.p, kv, dim, partial + dim);
    } else {
      int64_t dim = 0;
      for (; dim + 64 <= width_; dim += 64) weigh_one<4>(scratch.p, kv, dim, partial + dim);
      if (dim < width_) weigh_one<2>(scratch.p, kv, dim, partial + dim);
    }
  }

 private:
  // 2 x 2 tiles: C 0 1 / 2 3, A 4 / 5, B 6 7.
  static ENGINEWRIGHT_INLINE void zero_tiles() {
    Amx::zero<0>();
    Amx::zero<1>();
    Amx::zero<2>();
    Amx::zero<3>();
  }
  static ENGINEWRIGHT_INLINE void dot_two(const uint16_t* a, int64_t a_stride, const uint16_t* first,
                                          const uint16_t* second, int64_t b_bytes) {
    Amx::load<4>(a, a_stride * 2);
    Amx::load<6>(first, b_bytes);
    Bf16Product::dot<0, 4, 6>();
    Amx::load<7>(second, b_bytes);
    Bf16Product::dot<1, 4, 7>();
    Amx::load<5>(a + 16 * a_stride, a_stride * 2);
    Bf16Product::dot<2, 5, 6>();
    Bf16Product::dot<3, 5, 7>();
  }
  static ENGINEWRIGHT_INLINE void store_two(float* c, int64_t stride) {
    Amx::store<0>(c, stride * 4);
    Amx::store<1>(c + 16, stride * 4);
    Amx::store<2>(c + 16 * stride, stride * 4);
    Amx::store<3>(c + 16 * stride + 16, stride * 4);
  }

  // 17 … 32 queries and two groups of keys.
  void score_two(const uint16_t* q, const uint16_t* const* keys, float* scores) const {
    zero_tiles();
    for (int64_t dim = 0; dim < width_; dim += 32) {
      dot_two(q + dim, width_, keys[0] + dim * kGroup, keys[1] + dim * kGroup, kTileRowBytes);
    }
    store_two(scores, kSplitPositions);
  }

  // p · v for 32 dims.
  void weigh_two(const uint16_t* p, const SplitKv<uint16_t>& kv, int64_t dim, float* out) const {
    zero_tiles();
    for (int64_t g = 0; g < kv.groups; g += 2) {
      const uint16_t* v = kv.values[g] + dim * 2;
      dot_two(p + g * kGroup, kSplitPositions, v, v + 32, width_ * 4);
    }
    store_two(out, partial_floats(width_));
  }

  // 1 x N tiles: C 0 … 3, A 4, B 5 … 7.
  template <int N>
  static ENGINEWRIGHT_INLINE void dot_one(const uint16_t* a, int64_t a_stride, const uint16_t* const* b,
                                          int64_t b_bytes) {
    Amx::load<4>(a, a_stride * 2);
    Amx::load_once<5>(b[0], b_bytes);
    Bf16Product::dot<0, 4, 5>();
    Amx::load_once<6>(b[1], b_bytes);
    Bf16Product::dot<1, 4, 6>();
    if (N > 2) {
      Amx::load_once<7>(b[2], b_bytes);
      Bf16Product::dot<2, 4, 7>();
      Amx::load_once<5>(b[3], b_bytes);
      Bf16Product::dot<3, 4, 5>();
    }
  }
  template <int N>
  static ENGINEWRIGHT_INLINE void store_one(float* c, int64_t stride) {
    Amx::store<0>(c, stride * 4);
    Amx::store<1>(c + 16, stride * 4);
    if (N > 2) Amx::store<2>(c + 32, stride * 4);
    if (N > 2) Amx::store<3>(c + 48, stride * 4);
  }

  // 1 … 16 queries and N groups of keys.
  template <int N>
  void score_one(const uint16_t* q, const uint16_t* const* keys, float* scores) const {
    zero_tiles();
    for (int64_t dim = 0; dim < width_; dim += 32) {
      const uint16_t* b[N];
      for (int n = 0; n < N; ++n) b[n] = keys[n] + dim * kGroup;
      dot_one<N>(q + dim, width_, b, kTileRowBytes);
    }
    store_one<N>(scores, kSplitPositions);
  }

  // p · v for N x 16 dims.
  template <int N>
  void weigh_one(const uint16_t* p, const SplitKv<uint16_t>& kv, int64_t dim, float* out) const {
    zero_tiles();
    for (int64_t g = 0; g < kv.groups; g += 2) {
      const uint16_t* b[N];
      for (int n = 0; n < N; ++n) b[n] = kv.values[g] + (dim + 16 * n) * 2;
      dot_one<N>(p + g * kGroup, kSplitPositions, b, width_ * 4);
    }
    store_one<N>(out, partial_floats(width_));
  }
};

}  // namespace
}  // namespace enginewright
