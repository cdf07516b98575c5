// The products of attention over int8 KV on AMX tiles: what attention_i8.h computes, bit for bit, since both
// sums of integers are exact.
//
// KV planes are B tiles as they lie in memory: 8 lines of keys are 32 dims x 16 positions, 8 rows of values
// 32 positions x 16 dims. A tiles are up to 16 queries, or one of the two bytes of their weights.
#pragma once

#include "attention_i8.h"
#include "gemm_amx.h"

namespace enginewright {
namespace {

class AmxSplitAttentionI8 : public SplitAttentionI8<Avx512> {
 public:
  static constexpr int64_t tile_rows = 32;
  using SplitAttentionI8<Avx512>::SplitAttentionI8;

  // Around run()s with `rows` queries, and after all of a thread. Tiles: C 0 … 3, A 4 5, B 6 7.
  static void begin(int64_t rows) {
    TileConfig config = rows > kHalf ? tile_config(kHalf, rows - kHalf) : tile_config(rows, 0);
    for (const int a : {4, 5}) config.row_bytes[a] = kStep;
    for (const int b : {6, 7}) config.rows[b] = kStep / 4;
    Amx::configure(config);
  }
  static void end() { Amx::release(); }

  // partial: (rows, partial_floats)
  void run(const TileQueries<int8_t>& tile, const SplitKv<int8_t>& kv, const TileScratch& scratch,
           Ahead<Avx512>& ahead, float* partial) const {
    if (tile.rows <= kFewRows) return SplitAttentionI8<Avx512>::run(tile, kv, scratch, ahead, partial);
    Amx::written();
    if (tile.rows > kHalf) {
      score<true>(tile, kv, scratch.scores);
    } else {
      score<false>(tile, kv, scratch.scores);
    }
    float units[tile_rows];  // of the weights
    softmax(tile, kv, scratch, ahead, partial, units, store_bytes);
    Amx::written();
    for (int64_t dim = 0; dim < width_; dim += 16) {
      if (tile.rows > kHalf) {
        weigh<true>(tile.rows, codes(scratch), units, kv, dim, partial + dim);
      } else {
        weigh<false>(tile.rows, codes(scratch), units, kv, dim, partial + dim);
      }
    }
  }

 private:
  static constexpr int64_t kHalf = 16, kStep = 32;
  static constexpr int64_t kFewRows = 8;  // up to which KV that comes from memory is what takes the time

  // Lower bytes of a row's weights, and after those of all positions the upper ones.
  static void store_bytes(int8_t* row, int64_t position, F weights) {
    const __m512i words = _mm512_cvtps_epi32(weights);
    auto* low = reinterpret_cast<__m128i*>(row + position);
    auto* high = reinterpret_cast<__m128i*>(row + kSplitPositions + position);
    _mm_storeu_si128(low, _mm512_cvtepi32_epi8(words));
    _mm_storeu_si128(high, _mm512_cvtepi32_epi8(_mm512_srli_epi32(words, 8)));
  }

  // scores (rows, kSplitPositions), without the queries' scales; two groups of keys at once.
  template <bool two>
  void score(const TileQueries<int8_t>& tile, const SplitKv<int8_t>& kv, float* scores) const {
    auto* sums = reinterpret_cast<int32_t*>(scores);
    for (int64_t g = 0; g < kv.groups; g += 2) {
      zero<two>();
      for (int64_t dim = 0; dim < width_; dim += kStep) {
        Amx::load<4>(tile.q + dim, q_stride());
        Amx::load<6>(kv.keys[g] + dim * kGroup, kTileRowBytes);
        I8Product::dot<0, 4, 6>();
        Amx::load<7>(kv.keys[g + 1] + dim * kGroup, kTileRowBytes);
        I8Product::dot<1, 4, 7>();
        if (!two) continue;
        Amx::load<5>(tile.q + kHalf * q_stride() + dim, q_stride());
        I8Product::dot<2, 5, 6>();
        I8Product::dot<3, 5, 7>();
      }
      int32_t* const to = sums + g * kGroup;
      Amx::store<0>(to, kSplitPositions * 4);
      Amx::store<1>(to + kGroup, kSplitPositions * 4);
      if (two) Amx::store<2>(to + kHalf * kSplitPositions, kSplitPositions * 4);
      if (two) Amx::store<3>(to + kHalf * kSplitPositions + kGroup, kSplitPositions * 4);
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      for (int64_t g = 0; g < kv.groups; ++g) {
        const int64_t at = row * kSplitPositions + g * kGroup;
        const F sum = Avx512::to_float(Avx512::load_i(sums + at));
        Avx512::store(scores + at, Avx512::mul(sum, Avx512::load(kv.key_scales[g])));
      }
    }
  }

  // out (rows, partial_floats) = weights · v for 16 dims from `dim` on.
  template <bool two>
  void weigh(int64_t rows, const int8_t* weights, const float* units, const SplitKv<int8_t>& kv, int64_t dim,
             float* out) const {
    constexpr int64_t stride = 2 * kSplitPositions;
    zero<two>();
    for (int64_t g = 0; g < kv.groups; g += 2) {
      const int8_t *low = weights + g * kGroup, *high = low + kSplitPositions;
      Amx::load<6>(kv.values[g] + dim * 4, 4 * width_);
      Amx::load<4>(low, stride);
      U8Product::dot<0, 4, 6>();
      if (two) Amx::load<5>(low + kHalf * stride, stride);
      if (two) U8Product::dot<2, 5, 6>();
      Amx::load<4>(high, stride);
      U8Product::dot<1, 4, 6>();
      if (!two) continue;
      Amx::load<5>(high + kHalf * stride, stride);
      U8Product::dot<3, 5, 6>();
    }
    alignas(64) int32_t sums[2][tile_rows][16];  // of the lower bytes, and of the upper ones
    Amx::store<0>(sums[0][0], kTileRowBytes);
    Amx::store<1>(sums[1][0], kTileRowBytes);
    if (two) Amx::store<2>(sums[0][kHalf], kTileRowBytes);
    if (two) Amx::store<3>(sums[1][kHalf], kTileRowBytes);
    const F high_unit = Avx512::set1(256.0f);
    for (int64_t row = 0; row < rows; ++row) {
      const F low = Avx512::to_float(Avx512::load_i(sums[0][row])),
              high = Avx512::to_float(Avx512::load_i(sums[1][row]));
      Avx512::store(out + row * partial_floats(width_),
                    Avx512::mul(Avx512::fma(high, high_unit, low), Avx512::set1(units[row])));
    }
  }

  template <bool two>
  static ENGINEWRIGHT_INLINE void zero() {
    Amx::zero<0>();
    Amx::zero<1>();
    if (two) Amx::zero<2>();
    if (two) Amx::zero<3>();
  }
};

}  // namespace
}  // namespace enginewright
