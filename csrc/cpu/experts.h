// What stands around the products of experts (plugins/experts/route.py, sort_rows.py and combine_experts.py
// say the mathematics; gemm_kernel.h has the products).
//
//   route@1            x: f32 [tokens, K]; weight: bf16 r16_columns [E, K]; bias?, correction?: f32 [E];
//                      places: i32 [tokens, top]; share: f32 [tokens, top]; starts: i32 [1, E + 1];
//                      scores: f32 [tokens, E rounded up to 16], which only this kernel uses
//   sort_rows@1        x: f32 [tokens, K]; places; out: f32 or bf16 [tokens * top, K], or i8 as quantize.h
//   has
//                      it, with scale: f32 [tokens * top, runs]
//   combine_experts@1  y: f32 [tokens * top, H]; places; share; shared?: f32 [tokens, H]; gate?: f32 [tokens,
//                      1]; out: f32 [tokens, H]
//
// Products with the router are one chain of FMAs each, over K ascending; everything else is a token's own, in
// one order. So an expert is never chosen because of who else is in the step.
#pragma once

#include <limits>

#include "elementwise.h"
#include "operands.h"
#include "quantize.h"
#include "simd_math.h"

namespace enginewright {
namespace {

inline const Operand& buffer(const Operands& operands, const std::string& name, DType dtype) {
  const Operand& m = matrix(operands, name, dtype);
  require(m.kind == Operand::Kind::arena, "'" + name + "' must be a buffer");
  return m;
}

// `copies` has `top` rows for each row of `tokens`.
inline void require_copies(const Operand& copies, const Operand& tokens, int64_t top) {
  Linear rows = tokens.rows;
  rows.constant *= top;
  for (int64_t& factor : rows.factors) factor *= top;
  require(copies.rows == rows, "'" + copies.label + "' must have " + std::to_string(top) +
                                   " rows for each of '" + tokens.label + "'");
}

template <class S>
class Route final : public Kernel {
 public:
  using F = typename S::F;
  Route(const Operands& operands, const Attributes& attributes)
      : x_(buffer(operands, "x", DType::f32)),
        weight_(operand(operands, "weight")),
        places_(buffer(operands, "places", DType::i32)),
        share_(buffer(operands, "share", DType::f32)),
        starts_(buffer(operands, "starts", DType::i32)),
        scores_(buffer(operands, "scores", DType::f32)),
        experts_(weight_.max_rows),
        blocks_((experts_ + 15) / 16),
        top_(integer(attributes, "top", 1, experts_)),
        groups_(integer(attributes, "groups", 1, experts_)),
        chosen_groups_(integer(attributes, "chosen_groups", 1, groups_)),
        group_best_(integer(attributes, "group_best", 1, experts_)),
        normalized_(integer(attributes, "normalized", 0, 1) != 0),
        softmax_(text(attributes, "scores") == "softmax"),
        scale_(static_cast<float>(number(attributes, "scale"))) {
    require_known(operands, attributes,
                  {"x", "weight", "bias", "correction", "places", "share", "starts", "scores"},
                  {"top", "scores", "groups", "chosen_groups", "group_best", "normalized", "scale"});
    require(softmax_ || text(attributes, "scores") == "sigmoid", "'scores' must be softmax or sigmoid");
    require(weight_.kind == Operand::Kind::weight && weight_.dtype == DType::bf16 &&
                weight_.layout == Layout::r16_columns && weight_.matrices == 1,
            "'weight' must be one bf16 weight with the layout r16_columns");
    require(experts_ % groups_ == 0, "the experts cannot be cut into so many groups");
    const int64_t of_group = experts_ / groups_;
    require(groups_ == 1 || group_best_ <= of_group, "a group has fewer than 'group_best' experts");
    require(top_ <= chosen_groups_ * of_group, "the chosen groups have fewer than 'top' experts");
    require_columns(x_, weight_.columns);
    require_columns(places_, top_);
    require_columns(share_, top_);
    require_columns(starts_, experts_ + 1);
    require_columns(scores_, blocks_ * 16);
    require(starts_.max_rows == 1, "'starts' must have one row");
    for (const Operand* rows : {&places_, &share_, &scores_}) require_same_rows(x_, *rows);
    require(x_.max_rows * top_ < int64_t{1} << 31, "there are more rows than int32 counts");
    if (operands.count("bias") != 0) bias_ = vector_weight(operands, "bias", experts_).as<const float>();
    if (operands.count("correction") != 0) {
      correction_ = vector_weight(operands, "correction", experts_).as<const float>();
    }
  }

  // What experts, and groups, are chosen by and whether they are left; or where an expert's next row goes.
  int64_t scratch_bytes() const override { return (4 + 4 + 1 + 1) * experts_; }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &weight_, &places_, &share_, &starts_}, sizes);
    work.fp32_ops = 2 * x_.rows.at(sizes) * experts_ * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t tokens = x_.rows.at(sizes);
    multiply(tokens, worker);
    worker.sync();
    const Range mine = share(tokens, worker);
    for (int64_t token = mine.begin; token < mine.end; ++token) choose(token, worker.scratch);
    worker.sync();
    if (worker.index == 0) place(tokens, reinterpret_cast<int32_t*>(worker.scratch));
  }

 private:
  static constexpr int kTokens = 4, kBlocks = 4;  // of a tile: its sums stay in registers

  // scores = x · weightᵀ, a tile after the other.
  void multiply(int64_t tokens, Worker& worker) const {
    const int64_t across = (blocks_ + kBlocks - 1) / kBlocks;
    const Range mine = share((tokens + kTokens - 1) / kTokens * across, worker);
    for (int64_t tile = mine.begin; tile < mine.end; ++tile) {
      const int64_t token = tile / across * kTokens, block = tile % across * kBlocks;
      of_tokens<kTokens>(token, tokens - token, block, blocks_ - block);
    }
  }
  template <int M>
  void of_tokens(int64_t token, int64_t tokens, int64_t block, int64_t blocks) const {
    if constexpr (M > 1) {
      if (tokens < M) return of_tokens<M - 1>(token, tokens, block, blocks);
    }
    of_blocks<M, kBlocks>(token, block, blocks);
  }
  template <int M, int N>
  void of_blocks(int64_t token, int64_t block, int64_t blocks) const {
    if constexpr (N > 1) {
      if (blocks < N) return of_blocks<M, N - 1>(token, block, blocks);
    }
    F sums[M][N];
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) sums[m][n] = S::zero();
    }
    const int64_t columns = x_.columns;
    const float* x = x_.as<const float>() + token * x_.stride;
    const uint16_t* weight = weight_.as<const uint16_t>() + block * columns * 16;
    for (int64_t k = 0; k < columns; ++k, weight += 16) {
      F w[N];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) w[n] = S::load_bf16(weight + n * columns * 16);
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) {
        const F factor = S::set1(x[m * x_.stride + k]);
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) sums[m][n] = S::fma(factor, w[n], sums[m][n]);
      }
    }
    float* scores = scores_.as<float>() + token * scores_.stride + block * 16;
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store(scores + m * scores_.stride + n * 16, sums[m][n]);
    }
  }

  // A token's experts, into places until rows are sorted, and their share.
  void choose(int64_t token, std::byte* scratch) const {
    float* scores = scores_.as<float>() + token * scores_.stride;
    auto* by = reinterpret_cast<float*>(scratch);  // what they are chosen by
    auto* of_groups = by + experts_;
    auto* left = reinterpret_cast<uint8_t*>(of_groups + experts_);
    for (int64_t e = 0; bias_ != nullptr && e < experts_; ++e) scores[e] += bias_[e];
    for (int64_t e = experts_; e < blocks_ * 16; ++e) scores[e] = -std::numeric_limits<float>::infinity();
    softmax_ ? softmax(scores) : sigmoid(scores);
    for (int64_t e = 0; e < experts_; ++e) {
      by[e] = correction_ == nullptr ? scores[e] : scores[e] + correction_[e];
      left[e] = 1;
    }
    if (groups_ > 1) choose_groups(by, left, of_groups, left + experts_);
    int32_t* places = places_.as<int32_t>() + token * places_.stride;
    float* share = share_.as<float>() + token * share_.stride;
    float sum = 0.0f;
    for (int64_t j = 0; j < top_; ++j) {
      const int64_t best = largest(by, left, experts_);
      left[best] = 0;
      places[j] = static_cast<int32_t>(best);
      share[j] = scores[best];
      sum += share[j];
    }
    const float divisor = normalized_ ? (sum < 1e-20f ? 1e-20f : sum) : 1.0f;
    for (int64_t j = 0; j < top_; ++j) share[j] = share[j] / divisor * scale_;
  }

  // The first of the largest that are left. One is, and NaN is larger than nothing.
  static int64_t largest(const float* values, const uint8_t* left, int64_t count) {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (left[i] != 0 && (best < 0 || values[i] > values[best])) best = i;
    }
    return best;
  }

  // Nothing is left of groups that are not chosen. value: of groups, their best experts' scores together.
  void choose_groups(const float* by, uint8_t* left, float* value, uint8_t* open) const {
    const int64_t of_group = experts_ / groups_;
    for (int64_t group = 0; group < groups_; ++group) {
      const int64_t first = group * of_group;
      value[group] = 0.0f;
      for (int64_t i = 0; i < group_best_; ++i) {
        const int64_t best = largest(by + first, left + first, of_group);
        left[first + best] = 0;
        value[group] += by[first + best];
      }
      std::fill(left + first, left + first + of_group, uint8_t{0});
      open[group] = 1;
    }
    for (int64_t i = 0; i < chosen_groups_; ++i) {
      const int64_t best = largest(value, open, groups_);
      open[best] = 0;
      std::fill(left + best * of_group, left + (best + 1) * of_group, uint8_t{1});
    }
  }

  void softmax(float* scores) const {
    F maxima = S::load(scores);
    for (int64_t i = 1; i < blocks_; ++i) maxima = S::max(maxima, S::load(scores + i * 16));
    const F largest = S::set1(S::reduce_max(maxima));
    F sum = S::zero();
    for (int64_t i = 0; i < blocks_; ++i) {
      const F e = exp<S>(S::sub(S::load(scores + i * 16), largest));
      sum = S::add(sum, e);
      S::store(scores + i * 16, e);
    }
    const F total = S::set1(S::reduce_add(sum));
    for (int64_t i = 0; i < blocks_; ++i) S::store(scores + i * 16, S::div(S::load(scores + i * 16), total));
  }

  void sigmoid(float* scores) const {
    const F one = S::set1(1.0f);
    for (int64_t i = 0; i < blocks_; ++i) {
      const F e = exp<S>(S::sub(S::zero(), S::load(scores + i * 16)));
      S::store(scores + i * 16, S::div(one, S::add(one, e)));
    }
  }

  // Experts in places become places, in the tokens' order for each expert.
  void place(int64_t tokens, int32_t* next) const {
    int32_t* starts = starts_.as<int32_t>();
    std::fill(starts, starts + experts_ + 1, 0);
    for (int64_t token = 0; token < tokens; ++token) {
      const int32_t* places = places_.as<const int32_t>() + token * places_.stride;
      for (int64_t j = 0; j < top_; ++j) ++starts[places[j] + 1];
    }
    for (int64_t e = 0; e < experts_; ++e) {
      next[e] = starts[e];
      starts[e + 1] += starts[e];
    }
    for (int64_t token = 0; token < tokens; ++token) {
      int32_t* places = places_.as<int32_t>() + token * places_.stride;
      for (int64_t j = 0; j < top_; ++j) places[j] = next[places[j]]++;
    }
  }

  const Operand x_, weight_, places_, share_, starts_, scores_;
  const int64_t experts_, blocks_, top_, groups_, chosen_groups_, group_best_;
  const bool normalized_, softmax_;
  const float scale_;
  const float *bias_ = nullptr, *correction_ = nullptr;
};

template <class S>
class SortRows final : public Kernel {
 public:
  SortRows(const Operands& operands, const Attributes& attributes)
      : x_(buffer(operands, "x", DType::f32)),
        places_(buffer(operands, "places", DType::i32)),
        out_(operands, attributes, "out", as_out(operands), x_.columns) {
    require_known(operands, attributes, {"x", "places", "largest", "out", "scale"}, {"group"});
    require_same_rows(x_, places_);
    require_copies(out_.written(), x_, places_.columns);
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &places_, &out_.written()}, sizes);
    work.fp32_ops = (out_.written().dtype == DType::i8 ? 4 : 0) * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t token = mine.begin; token < mine.end; ++token) {
      const int32_t* places = places_.as<const int32_t>() + token * places_.stride;
      out_.put(places[0], 0, RowReader<S>(x_, token));
      for (int64_t j = 1; j < places_.columns; ++j) out_.copy(places[0], places[j]);
    }
  }

 private:
  // x, as many rows as the result has.
  static Operand as_out(const Operands& operands) {
    Operand rows = operand(operands, "x");
    rows.rows = operand(operands, "out").rows;
    return rows;
  }

  const Operand x_, places_;
  const RowsOut<S> out_;
};

template <class S>
class CombineExperts final : public Kernel {
 public:
  using F = typename S::F;
  CombineExperts(const Operands& operands, const Attributes& attributes)
      : y_(buffer(operands, "y", DType::f32)),
        places_(buffer(operands, "places", DType::i32)),
        share_(buffer(operands, "share", DType::f32)),
        out_(buffer(operands, "out", DType::f32)) {
    require_known(operands, attributes, {"y", "places", "share", "shared", "gate", "out"}, {});
    if (operands.count("shared") != 0) {
      shared_ = buffer(operands, "shared", DType::f32);
      require_same_rows(out_, shared_);
      require_columns(shared_, out_.columns);
    }
    if (operands.count("gate") != 0) {
      require(shared_.data != nullptr, "'gate' belongs to 'shared'");
      gate_ = buffer(operands, "gate", DType::f32);
      require_same_rows(out_, gate_);
      require_columns(gate_, 1);
    }
    for (const Operand* rows : {&places_, &share_}) require_same_rows(out_, *rows);
    require_columns(share_, places_.columns);
    require_columns(out_, y_.columns);
    require_copies(y_, out_, places_.columns);
  }

  Work work(const Sizes& sizes) const override {
    const Operand* shared = shared_.data == nullptr ? nullptr : &shared_;
    return elementwise_work({&y_, &places_, &share_, shared, &out_}, out_, 2 * places_.columns, sizes);
  }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F all(int64_t token, int64_t column) const {
    return sum(token, [&](const Operand& rows, int64_t row) {
      return S::load(rows.as<const float>() + row * rows.stride + column);
    });
  }
  ENGINEWRIGHT_INLINE F first(int64_t token, int64_t column, int64_t n) const {
    return sum(token, [&](const Operand& rows, int64_t row) {
      return S::load_first(rows.as<const float>() + row * rows.stride + column, n);
    });
  }

 private:
  template <class Load>
  ENGINEWRIGHT_INLINE F sum(int64_t token, const Load& load) const {
    const int32_t* places = places_.as<const int32_t>() + token * places_.stride;
    const float* share = share_.as<const float>() + token * share_.stride;
    F total = S::zero();
    for (int64_t j = 0; j < places_.columns; ++j) {
      total = S::fma(S::set1(share[j]), load(y_, places[j]), total);
    }
    if (shared_.data == nullptr) return total;
    if (gate_.data == nullptr) return S::add(total, load(shared_, token));
    const F gate = S::set1(gate_.as<const float>()[token * gate_.stride]), one = S::set1(1.0f);
    const F open = S::div(one, S::add(one, exp<S>(S::sub(S::zero(), gate))));
    return S::fma(open, load(shared_, token), total);
  }

  const Operand y_, places_, share_, out_;
  Operand shared_, gate_;  // without data: there is none
};

}  // namespace
}  // namespace enginewright
