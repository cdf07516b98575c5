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
// split's positions, and what a query doesn't see adds exact zeros to it. The sum is of the rounded p, so
// that weights add up to one and rounding them neither shrinks nor swells the result.
//
// Here is what all instruction sets share: the softmax and the combination. attention_tile.h and
// attention_amx.h add the two products.
#pragma once

#include "simd_math.h"
#include "step_checks.h"

namespace enginewright {
namespace {

constexpr int64_t kMostTileRows = 32;
constexpr int64_t kGroup = 16;          // positions whose scores are the lanes of a register
constexpr int64_t kStepPositions = 32;  // what a tile sees of a split is whole steps, aligned to absolute 0
constexpr int64_t kSplitGroups = kSplitPositions / kGroup;

// A tile's queries. q: (rows, head_dim_pad) bf16. Query r sees the positions low[r] … high[r]; both rise with
// r.
struct TileQueries {
  const uint16_t* q;
  int64_t rows;
  int64_t low[kMostTileRows], high[kMostTileRows];
};

// The part of a split that a tile sees: whole steps of positions from `begin` on.
struct SplitKv {
  const uint16_t* keys[kSplitGroups];    // each (head_dim_pad / 2, 16 positions, 2)
  const uint16_t* values[kSplitGroups];  // each (8, head_dim_pad, 2 positions)
  int64_t begin, groups;
};

struct TileScratch {
  float* scores;  // (rows, kSplitPositions)
  uint16_t* p;    // the same
};

inline int64_t partial_floats(int64_t head_dim_pad) { return head_dim_pad + 16; }

// 2^x for x <= 0, relative error 1e-7; 0 from -150 down, NaN stays NaN. The polynomial is the minimax one for
// 2^r, |r| <= 1/2, among those that are 1 at 0.
template <class S>
ENGINEWRIGHT_INLINE typename S::F exp2_of_negative(typename S::F x) {
  x = S::max(S::set1(-160.0f), x);
  const auto n = S::round(x), r = S::sub(x, n);
  auto p = S::set1(1.32647272e-3f);
  p = S::fma(p, r, S::set1(9.67151281e-3f));
  p = S::fma(p, r, S::set1(5.55073374e-2f));
  p = S::fma(p, r, S::set1(2.40222421e-1f));
  p = S::fma(p, r, S::set1(6.93146978e-1f));
  p = S::fma(p, r, S::set1(1.0f));
  return S::scale_pow2(p, n);
}

template <class S>
class SplitSoftmax {
 public:
  using F = typename S::F;
  SplitSoftmax(int64_t head_dim_pad, float scale, float softcap)
      : width_(head_dim_pad), scale_(scale), softcap_(softcap) {}

  // total := total and then `next`; both partial rows. An empty total, of maximum -infinity, weighs exactly
  // 0.
  void combine(float* total, const float* next) const {
    if (next[width_ + 1] == 0.0f) return;  // sees nothing of that split
    const F total_max = S::set1(total[width_]), next_max = S::set1(next[width_]);
    const F max = S::max(next_max, total_max);
    const F keep = exp2_of_negative<S>(S::sub(total_max, max)),
            take = exp2_of_negative<S>(S::sub(next_max, max));
    for (int64_t i = 0; i < width_; i += 16) {
      S::store(total + i, S::fma(S::load(total + i), keep, S::mul(S::load(next + i), take)));
    }
    const F sum = S::fma(S::set1(total[width_ + 1]), keep, S::mul(S::set1(next[width_ + 1]), take));
    S::store_first(total + width_, max, 1);
    S::store_first(total + width_ + 1, sum, 1);
  }

 protected:
  // q · k in scratch.scores to p in scratch.p, and max and sum of the partial rows.
  void softmax(const TileQueries& tile, const SplitKv& kv, const TileScratch& scratch, float* partial) const {
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t at = row * kSplitPositions;
      softmax_row(scratch.scores + at, kv, tile.low[row], tile.high[row], scratch.p + at,
                  partial + row * partial_floats(width_) + width_);
    }
  }

  const int64_t width_;  // head_dim_pad

 private:
  // max_sum[0]: max s, as a power of 2: s * log2(e). max_sum[1]: the sum.
  void softmax_row(float* scores, const SplitKv& kv, int64_t low, int64_t high, uint16_t* p,
                   float* max_sum) const {
    const int64_t positions = kv.groups * kGroup;
    const int64_t begin = clamp(low - kv.begin, 0, positions), end = clamp(high + 1 - kv.begin, 0, positions);
    if (begin >= end) {
      std::memset(p, 0, static_cast<size_t>(positions) * sizeof(uint16_t));
      max_sum[0] = -INFINITY;
      max_sum[1] = 0.0f;
      return;
    }
    if (softcap_ > 0) cap(scores, positions);
    mask(scores, begin, end, positions);
    F max = S::load(scores);
    for (int64_t i = kGroup; i < positions; i += kGroup) max = S::max(S::load(scores + i), max);
    const float log2e = 1.44269504088896341f, factor = softcap_ > 0 ? log2e : scale_ * log2e;
    max_sum[0] = S::reduce_max(max) * factor;
    const F scale = S::set1(factor), offset = S::set1(-max_sum[0]);
    for (int64_t i = 0; i < positions; i += kGroup) {
      S::store_bf16(p + i, exp2_of_negative<S>(S::fma(S::load(scores + i), scale, offset)));
    }
    F sum = S::zero();
    for (int64_t i = 0; i < positions; i += kStepPositions) {
      sum = S::dot(sum, S::pair(0x3f803f80u), S::load_line(p + i));  // 1, 1
    }
    max_sum[1] = S::reduce_add(sum);
  }

  void cap(float* scores, int64_t positions) const {
    const F inverse = S::set1(scale_ / softcap_), cap = S::set1(softcap_);
    for (int64_t i = 0; i < positions; i += kGroup) {
      S::store(scores + i, S::mul(cap, tanh<S>(S::mul(S::load(scores + i), inverse))));
    }
  }

  // -infinity outside of [begin, end).
  static void mask(float* scores, int64_t begin, int64_t end, int64_t positions) {
    const F minus_infinity = S::set1(-INFINITY);
    for (int64_t i = 0; i < begin; i += kGroup) {
      S::store(scores + i, S::first(clamp(begin - i, 0, kGroup), minus_infinity, S::load(scores + i)));
    }
    for (int64_t i = end / kGroup * kGroup; i < positions; i += kGroup) {
      S::store(scores + i, S::first(clamp(end - i, 0, kGroup), S::load(scores + i), minus_infinity));
    }
  }
  static ENGINEWRIGHT_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) {
    return x < low ? low : x < high ? x : high;
  }

  const float scale_, softcap_;
};

}  // namespace
}  // namespace enginewright
