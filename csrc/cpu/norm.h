// RMS norm, Zhang & Sennrich 2019 (arXiv:1910.07467), in fp32.
//
//   rms_norm@1      out = x / sqrt(mean(x^2) + epsilon) * weight, over each run of W = len(weight) columns
//                   (W is the whole row, or a head's dims). out may be x.
//   add_rms_norm@1  sum = x + delta; normed = rms_norm(sum), over whole rows. sum may be x or delta.
//
// x, delta, sum: f32 [rows, columns]; weight: f32 [W]; out, normed: f32 or bf16, or i8 as quantize.h has it,
// with scale: f32 [rows, runs] beside it (and largest) and W the whole row. Squares are summed in four
// accumulators of 16 lanes by column, then in one tree: the same bits for every row, wherever it stands.
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"

namespace enginewright {
namespace {

// 1 / sqrt(mean of squares + epsilon) of `width` floats.
template <class S>
ENGINEWRIGHT_INLINE typename S::F inverse_rms(const float* x, int64_t width, float epsilon) {
  typename S::F sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) {
    for (int j = 0; j < 4; ++j) {
      const auto v = S::load(x + i + 16 * j);
      sum[j] = S::fma(v, v, sum[j]);
    }
  }
  for (; i < width; i += 16) {
    const auto v = width - i < 16 ? S::load_first(x + i, width - i) : S::load(x + i);
    sum[i / 16 % 4] = S::fma(v, v, sum[i / 16 % 4]);
  }
  const float total = S::reduce_add(S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3])));
  const auto mean = S::set1(total / static_cast<float>(width) + epsilon);
  return S::div(S::set1(1.0f), S::sqrt(mean));
}

// x[i] * factor * weight[i], as quantize.h reads a row.
template <class S>
struct NormedRow {
  using F = typename S::F;
  const float *x, *weight;
  F factor;
  ENGINEWRIGHT_INLINE F at(int64_t i) const {
    return S::mul(S::mul(S::load(x + i), factor), S::load(weight + i));
  }
  ENGINEWRIGHT_INLINE F first(int64_t i, int64_t n) const {
    return S::mul(S::mul(S::load_first(x + i, n), factor), S::load_first(weight + i, n));
  }
};

inline float checked_epsilon(const Attributes& attributes) {
  const double epsilon = number(attributes, "epsilon");
  require(epsilon >= 0, "the attribute 'epsilon' must not be negative");
  return static_cast<float>(epsilon);
}

template <class S>
class RmsNorm final : public Kernel {
 public:
  RmsNorm(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        weight_(vector_weight(operands, "weight", operand(operands, "weight").columns)),
        out_(operands, attributes, "out", x_, weight_.columns),
        epsilon_(checked_epsilon(attributes)) {
    require_known(operands, attributes, {"x", "weight", "largest", "out", "scale"}, {"epsilon", "group"});
    require(x_.columns % weight_.columns == 0, "the width of 'weight' does not divide the columns of 'x'");
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &weight_, &out_.written()}, sizes);
    work.fp32_ops = 4 * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t width = weight_.columns, runs = x_.columns / width;
    const float* weight = weight_.as<const float>();
    const Range mine = share(x_.rows.at(sizes) * runs, worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t row = item / runs, column = item % runs * width;
      const float* x = x_.as<const float>() + row * x_.stride + column;
      out_.put(row, column, NormedRow<S>{x, weight, inverse_rms<S>(x, width, epsilon_)});
    }
  }

 private:
  const Operand x_, weight_;
  const RowsOut<S> out_;
  const float epsilon_;
};

template <class S>
class AddRmsNorm final : public Kernel {
 public:
  AddRmsNorm(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        delta_(matrix(operands, "delta", DType::f32)),
        weight_(vector_weight(operands, "weight", x_.columns)),
        sum_(matrix(operands, "sum", DType::f32)),
        normed_(operands, attributes, "normed", x_, weight_.columns),
        epsilon_(checked_epsilon(attributes)) {
    require_known(operands, attributes, {"x", "delta", "weight", "largest", "sum", "normed", "scale"},
                  {"epsilon", "group"});
    for (const Operand* other : {&delta_, &sum_}) {
      require_same_rows(x_, *other);
      require_columns(*other, x_.columns);
    }
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &delta_, &weight_, &sum_, &normed_.written()}, sizes);
    work.fp32_ops = 5 * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t columns = x_.columns;
    const float* weight = weight_.as<const float>();
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      const float* x = x_.as<const float>() + row * x_.stride;
      const float* delta = delta_.as<const float>() + row * delta_.stride;
      float* sum = sum_.as<float>() + row * sum_.stride;
      int64_t i = 0;
      for (; i + 16 <= columns; i += 16) S::store(sum + i, S::add(S::load(x + i), S::load(delta + i)));
      if (const int64_t n = columns - i; n > 0) {
        S::store_first(sum + i, S::add(S::load_first(x + i, n), S::load_first(delta + i, n)), n);
      }
      normed_.put(row, 0, NormedRow<S>{sum, weight, inverse_rms<S>(sum, columns, epsilon_)});
    }
  }

 private:
  const Operand x_, delta_, weight_, sum_;
  const RowsOut<S> normed_;
  const float epsilon_;
};

}  // namespace
}  // namespace enginewright
