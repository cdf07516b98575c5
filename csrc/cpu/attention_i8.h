// Attention of a tile over one split of int8 KV (attention_split.h says what that is, and what bf16 KV has).
//
//   s = (Σ qi ki) * key_scale * q_scale * scale      qi: the query's bf16 as int8 with a scale, quantize.h
//   p = e^(s - max s), w = p * value_scale           in fp32
//   wi = round(w * M / max w)                        max w over the split's visible positions
//   o = (Σ wi vi) * max w / M, sum = Σ p
//
// Both sums of integers are exact. wi is two bytes, of 8 bits or as many as the instruction set can multiply,
// and M the largest that they hold: with one byte, all positions that weigh less than 1/510 of the split's
// heaviest would be lost. A scale that is NaN, of a key or a value that was not finite, makes the result NaN.
#pragma once

#include "attention_tile.h"
#include "quantize.h"

namespace enginewright {
namespace {

template <class S>
class SplitAttentionI8 : public SplitBase<S> {
 public:
  using F = typename S::F;
  using I = typename S::I;
  using Query = int8_t;
  using Element = int8_t;
  static constexpr int64_t tile_rows = 24;

  SplitAttentionI8(int64_t head_dim, int64_t head_dim_pad, float scale, float softcap)
      : SplitBase<S>(head_dim_pad, scale, softcap), quads_((head_dim + 3) / 4) {}

  // Around run()s with `rows` queries, and after all of a thread.
  static void begin(int64_t) {}
  static void end() {}

  // Query r of a tile, from its head_dim bf16.
  void put_query(const uint16_t* from, int64_t head_dim, int64_t r, TileQueries<int8_t>& tile) const {
    int8_t* row = tile.q + r * q_stride();
    std::memset(row, 0, static_cast<size_t>(q_stride()));
    const float scale = quantize_run<S>(RowReader<S>(from), 0, head_dim, row);
    tile.scale[r] = scale < 0x1p-100f ? 0x1p-100f : scale;  // not 0: the product with -infinity would be NaN
    tile.excess[r] = S::excess_i8(row, q_stride());
  }

  // partial: (rows, partial_floats)
  void run(const TileQueries<int8_t>& tile, const SplitKv<int8_t>& kv, const TileScratch& scratch,
           Ahead<S>& ahead, float* partial) const {
    for (int64_t g = 0; g < kv.groups; g += kKeyGroups) {
      const int64_t groups = kv.groups - g < kKeyGroups ? kv.groups - g : kKeyGroups;
      for_row_chunks<S::tile_tokens>(tile.rows, [&](int64_t row, auto chunk) {
        score<decltype(chunk)::rows>(tile, row, kv, g, groups, ahead, scratch.scores + row * kSplitPositions);
      });
    }
    float units[tile_rows];  // of the weights
    softmax(tile, kv, scratch, ahead, partial, units, [](int8_t* row, int64_t position, F weights) {
      S::store_two_bytes(row + 2 * position, weights);
    });
    for (int64_t dim = 0; dim < width_; dim += kKeyGroups * 16) {
      const int64_t blocks = (width_ - dim) / 16 < kKeyGroups ? (width_ - dim) / 16 : kKeyGroups;
      for_row_chunks<S::tile_tokens / 2>(tile.rows, [&](int64_t row, auto chunk) {
        weigh<decltype(chunk)::rows>(codes(scratch) + row * 2 * kSplitPositions, units + row, kv, dim, blocks,
                                     ahead, partial + row * partial_floats(width_) + dim);
      });
    }
  }

 protected:
  using SplitBase<S>::width_;

  int64_t q_stride() const { return 2 * width_; }
  static int8_t* codes(const TileScratch& scratch) { return reinterpret_cast<int8_t*>(scratch.p); }

  // Scores to weights, in codes(): two bytes of each, put there by store(row, position, 16 weights); and max
  // and sum of the partial rows. units: what one of a row's weights is. In sweeps over all rows, so that one
  // starts while another's maximum is still folded.
  template <class Store>
  void softmax(const TileQueries<int8_t>& tile, const SplitKv<int8_t>& kv, const TileScratch& scratch,
               Ahead<S>& ahead, float* partial, float* units, const Store& store) const {
    const int64_t positions = kv.groups * kGroup;
    const auto row_of = [&](int64_t row) { return scratch.scores + row * kSplitPositions; };
    const auto max_sum = [&](int64_t row) { return partial + row * partial_floats(width_) + width_; };
    Power powers[kMaxTileRows];
    float per_unit[kMaxTileRows];
    for (int64_t row = 0; row < tile.rows; ++row) {
      powers[row] = this->prepare(row_of(row), kv.begin, positions, tile.low[row], tile.high[row],
                                  this->scale_ * tile.scale[row], max_sum(row));
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      units[row] = weights(kv, powers[row], row_of(row), ahead, max_sum(row), &per_unit[row]);
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      const F factor = S::set1(per_unit[row]);
      const float* weight = row_of(row);
      int8_t* out = codes(scratch) + row * 2 * kSplitPositions;
      for (int64_t i = 0; i < positions; i += kGroup) store(out, i, S::mul(S::load(weight + i), factor));
    }
  }

 private:
  using Power = typename SplitBase<S>::Power;
  static constexpr float kLargestWeight = (1 << 2 * S::byte_bits) - 1;

  // scores (R, kSplitPositions), without the query's scale, of R queries and some groups of keys from g on; N
  // groups at once, then half as many.
  template <int R, int N = wide<S, R>>
  ENGINEWRIGHT_INLINE void score(const TileQueries<int8_t>& tile, int64_t row, const SplitKv<int8_t>& kv,
                                 int64_t g, int64_t groups, Ahead<S>& ahead, float* scores) const {
    for (; groups >= N; groups -= N, g += N) score_tile<R, N>(tile, row, kv, g, ahead, scores);
    if constexpr (N > 1) {
      if (groups > 0) score<R, N / 2>(tile, row, kv, g, groups, ahead, scores);
    }
  }
  template <int R, int N>
  void score_tile(const TileQueries<int8_t>& tile, int64_t row, const SplitKv<int8_t>& kv, int64_t g,
                  Ahead<S>& ahead, float* scores) const {
    I acc[R][N];
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = S::set1_i(-tile.excess[row + r]);
    }
    const int8_t* q = tile.q + row * q_stride();
    const int8_t *keys[N], *values[N];
    for (int n = 0; n < N; ++n) {
      keys[n] = kv.keys[g + n];
      values[n] = kv.values[g + n];
    }
    for (int64_t i = 0; i < quads_; ++i) {
      typename S::Line lines[N];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        lines[n] = S::load_i8(keys[n] + i * 4 * kGroup);
        S::prefetch_l2(values[n] + i * 4 * kGroup);
      }
      ahead.fetch();
      ENGINEWRIGHT_UNROLL
      for (int r = 0; r < R; ++r) {
        const typename S::Bytes4 x = S::load_bytes4(q + r * q_stride() + 4 * i);
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) acc[r][n] = S::dot_i8(acc[r][n], lines[n], x);
      }
    }
    int32_t sums[R][N][16];  // by way of memory: GCC would keep accumulators there that are converted
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store_i(sums[r][n], acc[r][n]);
    }
    for (int n = 0; n < N; ++n) {
      const F scale = S::load(kv.key_scales[g + n]);
      for (int r = 0; r < R; ++r) {
        const F score = S::mul(S::to_float(S::load_i(sums[r][n])), scale);
        S::store(scores + r * kSplitPositions + (g + n) * kGroup, score);
      }
    }
  }

  // A query's prepared scores to e^(s - max s) * value_scale in fp32, and the sum. Returns what a unit of
  // them is as integers, and its inverse.
  float weights(const SplitKv<int8_t>& kv, Power power, float* scores, Ahead<S>& ahead, float* max_sum,
                float* per_unit) const {
    const int64_t positions = kv.groups * kGroup;
    const F factor = S::set1(power.factor), offset = S::set1(power.offset);
    F sum = S::zero(), maxima = S::zero(), lost = S::zero();  // lost: NaN where a weight is not finite
    for (int64_t i = 0; i < positions; i += kGroup) {
      const F p = exp2_of_negative<S>(S::fma(S::load(scores + i), factor, offset));
      const F weight = S::mul(p, S::load(kv.value_scales[i / kGroup]));
      S::store(scores + i, weight);
      sum = S::add(sum, p);
      maxima = S::max(weight, maxima);
      lost = S::fma(weight, S::zero(), lost);
      ahead.fetch();
    }
    max_sum[1] = S::reduce_add(sum);
    const float largest = S::reduce_max(maxima);
    const bool zero = largest < 0x1p-100f;
    *per_unit = zero ? 0.0f : kLargestWeight / largest;
    return (zero ? 0.0f : largest / kLargestWeight) + S::reduce_add(lost);
  }

  // out (R, partial_floats) = w · v for `blocks` x 16 dims from `dim` on. w: R rows of
  // codes(), (kSplitPositions / 4, 2 bytes, 4 positions).
  template <int R, int N = wide<S, 2 * R>>
  ENGINEWRIGHT_INLINE void weigh(const int8_t* w, const float* scales, const SplitKv<int8_t>& kv, int64_t dim,
                                 int64_t blocks, Ahead<S>& ahead, float* out) const {
    for (; blocks >= N; blocks -= N, dim += N * 16, out += N * 16) {
      weigh_tile<R, N>(w, scales, kv, dim, ahead, out);
    }
    if constexpr (N > 1) {
      if (blocks > 0) weigh<R, N / 2>(w, scales, kv, dim, blocks, ahead, out);
    }
  }
  template <int R, int N>
  void weigh_tile(const int8_t* w, const float* scales, const SplitKv<int8_t>& kv, int64_t dim,
                  Ahead<S>& ahead, float* out) const {
    I acc[2 * R][N];
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < 2 * R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = S::set1_i(0);
    }
    for (int64_t g = 0; g < kv.groups; ++g, w += 2 * kGroup) {
      const int8_t *values = kv.values[g] + dim * 4, *next_keys = kv.next_keys[g] + dim * 4;
      for (int64_t i = 0; i < 2 * kGroup; i += 8, values += 4 * width_, next_keys += 4 * width_) {
        typename S::Line lines[N];
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) {
          lines[n] = S::load_line(values + n * 64);
          S::prefetch_l2(next_keys + n * 64);
        }
        ahead.fetch();
        ENGINEWRIGHT_UNROLL
        for (int r = 0; r < 2 * R; ++r) {
          const typename S::Bytes4 x = S::load_bytes4(w + r / 2 * 2 * kSplitPositions + i + r % 2 * 4);
          ENGINEWRIGHT_UNROLL
          for (int n = 0; n < N; ++n) acc[r][n] = S::dot_u(acc[r][n], lines[n], x);
        }
      }
    }
    int32_t sums[2 * R][N][16];
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < 2 * R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store_i(sums[r][n], acc[r][n]);
    }
    const F high_unit = S::set1(1 << S::byte_bits);
    for (int r = 0; r < R; ++r) {
      const F scale = S::set1(scales[r]);
      for (int n = 0; n < N; ++n) {
        const F low = S::to_float(S::load_i(sums[2 * r][n])),
                high = S::to_float(S::load_i(sums[2 * r + 1][n]));
        S::store(out + r * partial_floats(width_) + n * 16, S::mul(S::fma(high, high_unit, low), scale));
      }
    }
  }

  const int64_t quads_;
};

}  // namespace
}  // namespace enginewright
