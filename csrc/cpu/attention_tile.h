// Attention of a tile, some queries that share a KV head, over one split: 256 positions aligned to absolute
// 0.
//
//   s = q · k * scale, then cap * tanh(s / cap) if there is a cap
//   p = bf16(e^(s - max s))      over the split's visible positions; 0 elsewhere
//   o = Σ p v,  sum = Σ p
//
// A split's result for a query is a partial row: o (head_dim_pad floats), max s, sum. Partial rows are
// combined in ascending order of splits by one function. No number depends on which other queries are in the
// tile, or on where the sequence was cut: a score is one chain over head_dim, an output one chain over the
// split's pairs of positions, and what a query doesn't see adds exact zeros to it. The sum is of the rounded
// p, so that weights add up to one and rounding them doesn't shrink or swell the result.
#pragma once

#include "simd_math.h"
#include "step_checks.h"

namespace enginewright {
namespace {

constexpr int64_t kTileRows = 24;  // queries in a tile, four register tiles of six
constexpr int64_t kGroup = 16;     // positions whose scores are the lanes of a register
constexpr int64_t kSplitGroups = kSplitPositions / kGroup;
constexpr int64_t kKeyGroups = 8;  // that stay in L1 while the tile's queries pass

// A tile's queries. q: (rows, q_stride) bf16. Query r sees the positions low[r] … high[r]; both rise with r.
struct TileQueries {
  const uint16_t* q;
  int64_t q_stride, rows;
  int64_t low[kTileRows], high[kTileRows];
};

// The part of a split that a tile sees: groups of 16 positions from `begin` on.
struct SplitKv {
  const uint16_t* keys[kSplitGroups];    // each (head_dim_pad / 2, 16 positions, 2)
  const uint16_t* values[kSplitGroups];  // each (8, head_dim_pad, 2 positions)
  int64_t begin, groups;
};

// What a query row of a tile takes in scratch, beside its partial rows.
struct TileScratch {
  float* scores;  // (kTileRows, kSplitPositions)
  uint16_t* p;    // the same
};

inline int64_t partial_floats(int64_t head_dim_pad) { return head_dim_pad + 16; }

template <class S>
class SplitAttention {
 public:
  using F = typename S::F;
  SplitAttention(int64_t head_dim, int64_t head_dim_pad, float scale, float softcap)
      : pairs_(head_dim / 2), width_(head_dim_pad), scale_(scale), softcap_(softcap) {}

  // partial: (rows, partial_floats)
  void run(const TileQueries& tile, const SplitKv& kv, const TileScratch& scratch, float* partial) const {
    for (int64_t g = 0; g < kv.groups; g += kKeyGroups) {
      const int64_t groups = kv.groups - g < kKeyGroups ? kv.groups - g : kKeyGroups;
      for_row_chunks(tile.rows, [&](int64_t row, auto chunk) {
        const uint16_t* q = tile.q + row * tile.q_stride;
        score<decltype(chunk)::rows>(q, tile.q_stride, kv.keys + g, groups,
                                     scratch.scores + row * kSplitPositions + g * kGroup);
      });
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      float* result = partial + row * partial_floats(width_);
      const int64_t at = row * kSplitPositions;
      softmax(scratch.scores + at, kv, tile.low[row], tile.high[row], scratch.p + at, result + width_);
    }
    for (int64_t dim = 0; dim < width_; dim += kKeyGroups * 16) {
      const int64_t blocks = (width_ - dim) / 16 < kKeyGroups ? (width_ - dim) / 16 : kKeyGroups;
      for_row_chunks(tile.rows, [&](int64_t row, auto chunk) {
        weigh<decltype(chunk)::rows>(scratch.p + row * kSplitPositions, kv, dim, blocks,
                                     partial + row * partial_floats(width_) + dim);
      });
    }
  }

  // total := total and then `next`; both partial rows.
  void combine(float* total, const float* next) const {
    if (next[width_ + 1] == 0.0f) return;  // sees nothing of that split
    if (total[width_ + 1] == 0.0f) {
      std::memcpy(total, next, static_cast<size_t>(width_ + 2) * sizeof(float));
      return;
    }
    const F total_max = S::set1(total[width_]), next_max = S::set1(next[width_]);
    const F max = S::max(next_max, total_max);
    const F keep = exp<S>(S::sub(total_max, max)), take = exp<S>(S::sub(next_max, max));
    for (int64_t i = 0; i < width_; i += 16) {
      S::store(total + i, S::fma(S::load(total + i), keep, S::mul(S::load(next + i), take)));
    }
    const F sum = S::fma(S::set1(total[width_ + 1]), keep, S::mul(S::set1(next[width_ + 1]), take));
    S::store_first(total + width_, max, 1);
    S::store_first(total + width_ + 1, sum, 1);
  }

 private:
  template <int R>
  struct Chunk {
    static constexpr int rows = R;
  };

  // Calls f(first row, Chunk<R>) for runs of R <= S::tile_tokens rows, of nearly the same R each.
  template <class Function>
  static ENGINEWRIGHT_INLINE void for_row_chunks(int64_t rows, const Function& f) {
    int64_t chunks = (rows + S::tile_tokens - 1) / S::tile_tokens;
    for (int64_t row = 0; row < rows; --chunks) {
      const int64_t n = (rows - row + chunks - 1) / chunks;
      call_chunk<S::tile_tokens>(row, n, f);
      row += n;
    }
  }
  template <int R, class Function>
  static ENGINEWRIGHT_INLINE void call_chunk(int64_t row, int64_t n, const Function& f) {
    if constexpr (R > 0) {
      if (n == R) return f(row, Chunk<R>{});
      call_chunk<R - 1>(row, n, f);
    }
  }

  // Accumulators side by side, for R rows: what registers hold.
  template <int R>
  static constexpr int wide = R * 2 <= S::tile_tokens ? S::gemv_blocks : S::tile_blocks;

  // scores (R, kSplitPositions) of R queries and some groups of keys, N at once, then half as many.
  template <int R, int N = wide<R>>
  ENGINEWRIGHT_INLINE void score(const uint16_t* q, int64_t q_stride, const uint16_t* const* keys,
                                 int64_t groups, float* scores) const {
    for (; groups >= N; groups -= N, keys += N, scores += N * kGroup)
      score_tile<R, N>(q, q_stride, keys, scores);
    if constexpr (N > 1) {
      if (groups > 0) score<R, N / 2>(q, q_stride, keys, groups, scores);
    }
  }
  template <int R, int N>
  void score_tile(const uint16_t* q, int64_t q_stride, const uint16_t* const* keys, float* scores) const {
    F acc[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) acc[r][n] = S::zero();
    }
    for (int64_t i = 0; i < pairs_; ++i) {
      typename S::Line lines[N];
      for (int n = 0; n < N; ++n) lines[n] = S::load_line(keys[n] + i * 2 * kGroup);
      for (int r = 0; r < R; ++r) {
        const typename S::Pair pair = S::load_pair(q + r * q_stride + 2 * i);
        for (int n = 0; n < N; ++n) acc[r][n] = S::dot(acc[r][n], pair, lines[n]);
      }
    }
    const F scale = S::set1(scale_);
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n)
        S::store(scores + r * kSplitPositions + n * kGroup, S::mul(acc[r][n], scale));
    }
  }

  // One query's scores to p; max and sum to max_sum[0], [1].
  void softmax(float* scores, const SplitKv& kv, int64_t low, int64_t high, uint16_t* p,
               float* max_sum) const {
    const int64_t positions = kv.groups * kGroup;
    low = clamp(low - kv.begin, 0, positions);
    const int64_t end = clamp(high + 1 - kv.begin, 0, positions);
    const F minus_infinity = S::set1(-INFINITY);
    max_sum[0] = -INFINITY;
    max_sum[1] = 0.0f;
    if (low >= end) {
      std::memset(p, 0, static_cast<size_t>(positions) * sizeof(uint16_t));
      return;
    }
    F max = minus_infinity;
    for (int64_t i = 0; i < positions; i += kGroup) {
      F s = S::load(scores + i);
      if (softcap_ > 0) s = S::mul(S::set1(softcap_), tanh<S>(S::div(s, S::set1(softcap_))));
      if (i < low) s = S::first(clamp(low - i, 0, kGroup), minus_infinity, s);
      if (i + kGroup > end) s = S::first(clamp(end - i, 0, kGroup), s, minus_infinity);
      S::store(scores + i, s);
      max = S::max(s, max);
    }
    max_sum[0] = S::reduce_max(max);
    max = S::set1(max_sum[0]);
    F sum = S::zero();
    for (int64_t i = 0; i < positions; i += kGroup) {
      S::store_bf16(p + i, exp<S>(S::sub(S::load(scores + i), max)));
      sum = S::add(sum, S::load_bf16(p + i));
    }
    max_sum[1] = S::reduce_add(sum);
  }
  static ENGINEWRIGHT_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x < high ? x : high;
  }

  // out (R, partial_floats) = p · v for `blocks` x 16 dims from `dim` on.
  template <int R, int N = wide<R>>
  ENGINEWRIGHT_INLINE void weigh(const uint16_t* p, const SplitKv& kv, int64_t dim, int64_t blocks,
                                 float* out) const {
    for (; blocks >= N; blocks -= N, dim += N * 16, out += N * 16) weigh_tile<R, N>(p, kv, dim, out);
    if constexpr (N > 1) {
      if (blocks > 0) weigh<R, N / 2>(p, kv, dim, blocks, out);
    }
  }
  template <int R, int N>
  void weigh_tile(const uint16_t* p, const SplitKv& kv, int64_t dim, float* out) const {
    F acc[R][N];
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) acc[r][n] = S::zero();
    }
    for (int64_t g = 0; g < kv.groups; ++g, p += kGroup) {
      const uint16_t* values = kv.values[g] + dim * 2;
      for (int64_t i = 0; i < kGroup; i += 2, values += 2 * width_) {
        typename S::Line lines[N];
        for (int n = 0; n < N; ++n) lines[n] = S::load_line(values + n * 32);
        for (int r = 0; r < R; ++r) {
          const typename S::Pair pair = S::load_pair(p + r * kSplitPositions + i);
          for (int n = 0; n < N; ++n) acc[r][n] = S::dot(acc[r][n], pair, lines[n]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int n = 0; n < N; ++n) S::store(out + r * partial_floats(width_) + n * 16, acc[r][n]);
    }
  }

  const int64_t pairs_, width_;
  const float scale_, softcap_;
};

}  // namespace
}  // namespace enginewright
