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
// That is for bf16 KV. Of FP8 KV, k and v are codes, which bf16 has exactly, s is multiplied by the key's
// scale, the weight of a position is bf16(p * the value's scale), and the sum is of p in fp32. attention_i8.h
// says what int8 KV changes. Here is what all of them share: the softmax and the combination.
// attention_tile.h, attention_fma.h, attention_amx.h and attention_i8.h add the two products.
#pragma once

#include "simd_math.h"
#include "step_checks.h"

namespace enginewright {
namespace {

constexpr int64_t kMaxTileRows = 32;
constexpr int64_t kGroup = 16;          // positions whose scores are the lanes of a register
constexpr int64_t kStepPositions = 32;  // what a tile sees of a split is whole steps, aligned to absolute 0
constexpr int64_t kSplitGroups = kSplitPositions / kGroup;

// A tile's queries. q: (rows, head_dim_pad). Query r sees the positions low[r] … high[r]; both rise with r.
template <class Element>
struct TileQueries {
  Element* q;
  int64_t rows;
  int64_t low[kMaxTileRows], high[kMaxTileRows];
  float scale[kMaxTileRows];  // of int8 alone, see attention_i8.h
  int32_t excess[kMaxTileRows];
};

// The part of a split that a tile sees: whole steps of positions from `begin` on, by groups as they lie in
// the planes (kv.h).
template <class Element>
struct SplitKv {
  const Element *keys[kSplitGroups], *values[kSplitGroups];
  const float *key_scales[kSplitGroups], *value_scales[kSplitGroups];  // each (16); not of bf16
  int64_t begin, groups;
  // Of what is attended to next, or of this: kernels fetch values while they read keys, and these while they
  // read values.
  const Element* next_keys[kSplitGroups];

  void set_next(const SplitKv& next) {
    for (int64_t g = 0; g < groups; ++g) next_keys[g] = g < next.groups ? next.keys[g] : keys[g];
  }
};

// Fetches towards L2 what is attended to after that: pieces of memory in its order, some lines a call.
// Kernels call fetch() in all that they do, since a core keeps few lines on their way and drops what is asked
// for beyond; what SplitKv's users fetch themselves, just before they need it, makes up for that.
template <class S>
class Ahead {
 public:
  void start(int64_t piece_bytes) {
    piece_bytes_ = piece_bytes;
    pieces_ = piece_ = left_ = 0;
  }
  void add(const std::byte* piece) { starts_[pieces_++] = piece; }

  ENGINEWRIGHT_INLINE void fetch() {
    if (left_ <= 0) {
      if (piece_ == pieces_) return;
      line_ = starts_[piece_++];
      left_ = piece_bytes_;
    }
    ENGINEWRIGHT_UNROLL
    for (int i = 0; i < kLines; ++i) S::prefetch_l2(line_ + 64 * i);
    line_ += 64 * kLines;
    left_ -= 64 * kLines;
  }

 private:
  static constexpr int kLines = 4;  // a call: with as many, most arrive in time; measured
  const std::byte* starts_[2 * kSplitPositions / kStepPositions];
  const std::byte* line_ = nullptr;
  int64_t piece_bytes_ = 0, pieces_ = 0, piece_ = 0, left_ = 0;
};

struct TileScratch {
  float* scores;   // (rows, kSplitPositions)
  uint16_t* p;     // the same
  std::byte* own;  // 64-byte aligned, Split::scratch_bytes()
};

inline int64_t partial_floats(int64_t head_dim_pad) { return head_dim_pad + 16; }

// 2^x for x <= 0, relative error 3e-6; 0 from -150 down, NaN stays NaN. The polynomial is the minimax one for
// 2^r, 0 <= r <= 1, among those that are 1 at 0.
template <class S>
ENGINEWRIGHT_INLINE typename S::F exp2_of_negative(typename S::F x) {
  const auto r = S::fraction(x);
  auto p = S::set1(1.34266848e-2f);
  p = S::fma(p, r, S::set1(5.22424728e-2f));
  p = S::fma(p, r, S::set1(2.41280198e-1f));
  p = S::fma(p, r, S::set1(6.93044841e-1f));
  p = S::fma(p, r, S::set1(1.0f));
  return S::scale_pow2_floor(p, x);
}

constexpr float kLog2e = 1.44269504088896341f;

template <class S>
class SplitBase {
 public:
  static constexpr bool latent = false;  // whether values are the first columns of keys: attention_latent.h
  int64_t scratch_bytes() const { return 0; }
  int64_t width() const { return width_; }

  using F = typename S::F;
  SplitBase(int64_t head_dim_pad, float scale, float softcap)
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

  // What o of a partial row is multiplied by where a sink, a logit that belongs to no position, joins the sum
  // (https://arxiv.org/abs/2309.17453): e^(max s - m) / (sum e^(max s - m) + e^(sink - m)), m the larger.
  F inverse_with_sink(float sink, const float* total) const {
    const F own = S::set1(total[width_]), other = S::set1(sink * kLog2e), max = S::max(other, own);
    const F keep = exp2_of_negative<S>(S::sub(own, max)), take = exp2_of_negative<S>(S::sub(other, max));
    return S::div(keep, S::fma(S::set1(total[width_ + 1]), keep, take));
  }

 protected:
  // e^(s - max s) is 2^(score * factor + offset); 0 of a score of -infinity.
  struct Power {
    float factor, offset;
  };

  // A query's scores (q · k; s is score * scale) are capped, and become -infinity where it doesn't see.
  // max_sum[0]: max s, as a power of 2: s * log2(e).
  Power prepare(float* scores, int64_t first, int64_t positions, int64_t low, int64_t high, float scale,
                float* max_sum) const {
    const int64_t begin = clamp(low - first, 0, positions), end = clamp(high + 1 - first, 0, positions);
    if (softcap_ > 0) cap(scores, scale, positions);
    mask(scores, begin, end, positions);
    if (begin >= end) {
      max_sum[0] = -INFINITY;
      return {1.0f, 0.0f};
    }
    F max = S::load(scores);
    for (int64_t i = kGroup; i < positions; i += kGroup) max = S::max(S::load(scores + i), max);
    const float factor = softcap_ > 0 ? kLog2e : scale * kLog2e;
    max_sum[0] = S::reduce_max(max) * factor;
    return {factor, -max_sum[0]};
  }

  const int64_t width_;  // head_dim_pad
  const float scale_;

 private:
  void cap(float* scores, float scale, int64_t positions) const {
    const F inverse = S::set1(scale / softcap_), cap = S::set1(softcap_);
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

  const float softcap_;
};

// The softmax of bf16 and FP8 KV. KvElement: uint16_t or uint8_t.
template <class S, class KvElement = uint16_t>
class SplitSoftmax : public SplitBase<S> {
 public:
  using F = typename S::F;
  using Query = uint16_t;
  using Element = KvElement;
  using SplitBase<S>::SplitBase;

  // Query r of a tile, from its head_dim bf16.
  void put_query(const uint16_t* from, int64_t head_dim, int64_t r, TileQueries<uint16_t>& tile) const {
    uint16_t* row = tile.q + r * width_;
    std::memcpy(row, from, static_cast<size_t>(head_dim) * sizeof(uint16_t));
    std::memset(row + head_dim, 0, static_cast<size_t>(width_ - head_dim) * sizeof(uint16_t));
  }

 protected:
  using SplitBase<S>::width_;

  // q · k in scratch.scores to p in scratch.p, and max and sum of the partial rows. In sweeps over all rows:
  // the next one's start overlaps with the folding of a row's maximum.
  void softmax(const TileQueries<uint16_t>& tile, const SplitKv<Element>& kv, const TileScratch& scratch,
               Ahead<S>& ahead, float* partial) const {
    const int64_t positions = kv.groups * kGroup;
    if constexpr (scaled) {
      for (int64_t row = 0; row < tile.rows; ++row) scale(kv, scratch.scores + row * kSplitPositions);
    }
    const auto max_sum = [&](int64_t row) { return partial + row * partial_floats(width_) + width_; };
    Power powers[kMaxTileRows];
    for (int64_t row = 0; row < tile.rows; ++row) {
      powers[row] = this->prepare(scratch.scores + row * kSplitPositions, kv.begin, positions, tile.low[row],
                                  tile.high[row], this->scale_, max_sum(row));
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
      const int64_t at = row * kSplitPositions;
      max_sum(row)[1] = weights(scratch.scores + at, kv, powers[row], ahead, scratch.p + at);
    }
  }

 private:
  using Power = typename SplitBase<S>::Power;
  static constexpr bool scaled = std::is_same_v<Element, uint8_t>;

  static void scale(const SplitKv<Element>& kv, float* scores) {
    for (int64_t g = 0; g < kv.groups; ++g, scores += kGroup) {
      S::store(scores, S::mul(S::load(scores), S::load(kv.key_scales[g])));
    }
  }

  // To p, or the weights. Returns the sum of p.
  static float weights(const float* scores, const SplitKv<Element>& kv, Power power, Ahead<S>& ahead,
                       uint16_t* p) {
    const int64_t positions = kv.groups * kGroup;
    const F factor = S::set1(power.factor), offset = S::set1(power.offset);
    F sum = S::zero();
    for (int64_t i = 0; i < positions; i += kGroup) {
      F weight = exp2_of_negative<S>(S::fma(S::load(scores + i), factor, offset));
      if constexpr (scaled) {
        sum = S::add(sum, weight);
        weight = S::mul(weight, S::load(kv.value_scales[i / kGroup]));
      }
      S::store_bf16(p + i, weight);
      ahead.fetch();
    }
    if constexpr (scaled) return S::reduce_add(sum);
    for (int64_t i = 0; i < positions; i += kStepPositions) {
      sum = S::dot(sum, S::pair(0x3f803f80u), S::load_line(p + i));  // 1, 1
    }
    return S::reduce_add(sum);
  }
};

}  // namespace
}  // namespace enginewright
