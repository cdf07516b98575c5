// The products of attention for any instruction set (attention_split.h says what they are for), over KV of
// bf16 and of FP8, which becomes bf16 in registers.
//
// Sixteen scores, or sixteen dims of a result, are the lanes of a register; a few queries and a few such
// groups keep their accumulators in registers while head_dim, or the positions, pass once.
#pragma once

#include "attention_split.h"
#include "bf16_lines.h"

namespace enginewright {
namespace {

constexpr int64_t kKeyGroups = 8;  // that stay in L1 while the tile's queries pass

template <int R>
struct Chunk {
  static constexpr int rows = R;
};

template <int R, class Function>
ENGINEWRIGHT_INLINE void call_chunk(int64_t row, int64_t n, const Function& f) {
  if constexpr (R > 0) {
    if (n == R) return f(row, Chunk<R>{});
    call_chunk<R - 1>(row, n, f);
  }
}

// Calls f(first row, Chunk<R>) for runs of R <= Most rows, of nearly the same R each.
template <int Max, class Function>
ENGINEWRIGHT_INLINE void for_row_chunks(int64_t rows, const Function& f) {
  int64_t chunks = (rows + Max - 1) / Max;
  for (int64_t row = 0; row < rows; --chunks) {
    const int64_t n = (rows - row + chunks - 1) / chunks;
    call_chunk<Max>(row, n, f);
    row += n;
  }
}

// Accumulators side by side, for R rows: what registers hold.
template <class S, int R>
constexpr int wide = R * 2 <= S::tile_tokens ? S::gemv_blocks : S::tile_blocks;

// KvLines: Bf16Lines or Fp8Lines.
template <class S, class KvLines = Bf16Lines<S>>
class SplitAttention : public SplitSoftmax<S, typename KvLines::Element> {
 public:
  using F = typename S::F;
  using Element = typename KvLines::Element;
  static constexpr int64_t tile_rows = 24;  // four register tiles of six

  SplitAttention(int64_t head_dim, int64_t head_dim_pad, float scale, float softcap)
      : SplitSoftmax<S, Element>(head_dim_pad, scale, softcap), lines_((head_dim + kDepth - 1) / kDepth) {}

  // Around run()s with `rows` queries, and after all of a thread.
  static void begin(int64_t) {}
  static void end() {}

  // partial: (rows, partial_floats)
  void run(const TileQueries<uint16_t>& tile, const SplitKv<Element>& kv, const TileScratch& scratch,
           Ahead<S>& ahead, float* partial) const {
    for (int64_t g = 0; g < kv.groups; g += kKeyGroups) {
      const int64_t groups = kv.groups - g < kKeyGroups ? kv.groups - g : kKeyGroups;
      for_row_chunks<S::tile_tokens>(tile.rows, [&](int64_t row, auto chunk) {
        score<decltype(chunk)::rows>(tile.q + row * width_, kv.keys + g, kv.values + g, groups, ahead,
                                     scratch.scores + row * kSplitPositions + g * kGroup);
      });
    }
    this->softmax(tile, kv, scratch, ahead, partial);
    for (int64_t dim = 0; dim < width_; dim += kKeyGroups * 16) {
      const int64_t blocks = (width_ - dim) / 16 < kKeyGroups ? (width_ - dim) / 16 : kKeyGroups;
      for_row_chunks<S::tile_tokens>(tile.rows, [&](int64_t row, auto chunk) {
        weigh<decltype(chunk)::rows>(scratch.p + row * kSplitPositions, kv, dim, blocks, ahead,
                                     partial + row * partial_floats(width_) + dim);
      });
    }
  }

 private:
  using SplitSoftmax<S, Element>::width_;
  static constexpr int kPairs = KvLines::kPairs, kDepth = 2 * kPairs;  // of a line: along dims, or positions
  static constexpr int kLine = 16 * kDepth;                            // elements
  template <int R>
  static constexpr int side_by_side = wide<S, R> / kPairs;  // lines of bf16 take registers, too

  // scores (R, kSplitPositions) of R queries and some groups of keys, N at once, then half as many.
  template <int R, int N = side_by_side<R>>
  ENGINEWRIGHT_INLINE void score(const uint16_t* q, const Element* const* keys, const Element* const* values,
                                 int64_t groups, Ahead<S>& ahead, float* scores) const {
    for (; groups >= N; groups -= N, keys += N, values += N, scores += N * kGroup) {
      score_tile<R, N>(q, keys, values, ahead, scores);
    }
    if constexpr (N > 1) {
      if (groups > 0) score<R, N / 2>(q, keys, values, groups, ahead, scores);
    }
  }
  template <int R, int N>
  void score_tile(const uint16_t* q, const Element* const* keys, const Element* const* values,
                  Ahead<S>& ahead, float* scores) const {
    F acc[R][N];
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = S::zero();
    }
    for (int64_t i = 0; i < lines_; ++i) {
      typename S::Line lines[N][kPairs];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        KvLines::load(keys[n] + i * kLine, lines[n]);
        S::prefetch_l2(values[n] + i * kLine);
      }
      ahead.fetch();
      ENGINEWRIGHT_UNROLL
      for (int r = 0; r < R; ++r) {
        ENGINEWRIGHT_UNROLL
        for (int p = 0; p < kPairs; ++p) {
          const typename S::Pair pair = S::load_pair(q + r * width_ + i * kDepth + 2 * p);
          ENGINEWRIGHT_UNROLL
          for (int n = 0; n < N; ++n) acc[r][n] = S::dot(acc[r][n], pair, lines[n][p]);
        }
      }
    }
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store(scores + r * kSplitPositions + n * kGroup, acc[r][n]);
    }
  }

  // out (R, partial_floats) = p · v for `blocks` x 16 dims from `dim` on.
  template <int R, int N = side_by_side<R>>
  ENGINEWRIGHT_INLINE void weigh(const uint16_t* p, const SplitKv<Element>& kv, int64_t dim, int64_t blocks,
                                 Ahead<S>& ahead, float* out) const {
    for (; blocks >= N; blocks -= N, dim += N * 16, out += N * 16) weigh_tile<R, N>(p, kv, dim, ahead, out);
    if constexpr (N > 1) {
      if (blocks > 0) weigh<R, N / 2>(p, kv, dim, blocks, ahead, out);
    }
  }
  template <int R, int N>
  void weigh_tile(const uint16_t* p, const SplitKv<Element>& kv, int64_t dim, Ahead<S>& ahead,
                  float* out) const {
    F acc[R][N];
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[r][n] = S::zero();
    }
    for (int64_t g = 0; g < kv.groups; ++g, p += kGroup) {
      const Element *values = kv.values[g] + dim * kDepth, *next_keys = kv.next_keys[g] + dim * kDepth;
      for (int64_t i = 0; i < kGroup; i += kDepth, values += kDepth * width_, next_keys += kDepth * width_) {
        typename S::Line lines[N][kPairs];
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) {
          KvLines::load(values + n * kLine, lines[n]);
          S::prefetch_l2(next_keys + n * kLine);
        }
        ahead.fetch();
        ENGINEWRIGHT_UNROLL
        for (int r = 0; r < R; ++r) {
          ENGINEWRIGHT_UNROLL
          for (int pair = 0; pair < kPairs; ++pair) {
            const typename S::Pair weights = S::load_pair(p + r * kSplitPositions + i + 2 * pair);
            ENGINEWRIGHT_UNROLL
            for (int n = 0; n < N; ++n) acc[r][n] = S::dot(acc[r][n], weights, lines[n][pair]);
          }
        }
      }
    }
    ENGINEWRIGHT_UNROLL
    for (int r = 0; r < R; ++r) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store(out + r * partial_floats(width_) + n * 16, acc[r][n]);
    }
  }

  const int64_t lines_;  // of a group of keys
};

}  // namespace
}  // namespace enginewright
