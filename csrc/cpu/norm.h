// RMS norm, Zhang & Sennrich 2019 (arXiv:1910.07467), and layer norm, Ba et al. 2016 (arXiv:1607.06450), in
// fp32.
//
//   rms_norm@1      out = x / sqrt(mean(x^2) + epsilon) * weight, over each run of W = len(weight) columns
//                   (W is the whole row, or a head's dims). out may be x.
//   gated_rms_norm@1  out = rms_norm(x) * silu(z), or rms_norm(x * silu(z)), over each `run` of columns;
//                   z: f32 [rows, columns]; weight: f32 [run], or of all columns
//   add_rms_norm@1  sum = x + delta; normed = rms_norm(sum), over whole rows. sum may be x or delta.
//   layer_norm@1    out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight (+ bias), over whole rows.
//
// x, delta, sum: f32 [rows, columns]; weight, bias?: f32 [W]; out, normed: f32 or bf16, or i8 as quantize.h
// has it, with scale: f32 [rows, runs] (and largest) and W the whole row. Squares are summed in
// four accumulators of 16 lanes by column, then in one tree: the same bits for every row, wherever it stands.
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"
#include "simd_math.h"

namespace enginewright {
namespace {

// What mean_of sums of 16 floats, n of which are there, zeros after.
template <class S>
struct Values {
  using F = typename S::F;
  ENGINEWRIGHT_INLINE F operator()(F sum, F x, int64_t) const { return S::add(sum, x); }
};
template <class S>
struct Squares {
  using F = typename S::F;
  ENGINEWRIGHT_INLINE F operator()(F sum, F x, int64_t) const { return S::fma(x, x, sum); }
};
template <class S>
struct SquaresAround {
  using F = typename S::F;
  const F center;
  ENGINEWRIGHT_INLINE F operator()(F sum, F x, int64_t n) const {
    const F off = S::first(n, S::sub(x, center), S::zero());
    return S::fma(off, off, sum);
  }
};

// The mean of what `add` takes of `width` floats, in four accumulators.
template <class S, class Add>
ENGINEWRIGHT_INLINE float mean_of(const float* x, int64_t width, const Add& add) {
  typename S::F sum[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  int64_t i = 0;
  for (; i + 64 <= width; i += 64) {
    for (int j = 0; j < 4; ++j) sum[j] = add(sum[j], S::load(x + i + 16 * j), 16);
  }
  for (; i < width; i += 16) {
    const int64_t n = width - i < 16 ? width - i : 16;
    const auto v = n < 16 ? S::load_first(x + i, n) : S::load(x + i);
    sum[i / 16 % 4] = add(sum[i / 16 % 4], v, n);
  }
  return S::reduce_add(S::add(S::add(sum[0], sum[1]), S::add(sum[2], sum[3]))) / static_cast<float>(width);
}

template <class S>
ENGINEWRIGHT_INLINE typename S::F inverse_root(float mean, float epsilon) {
  return S::div(S::set1(1.0f), S::sqrt(S::set1(mean + epsilon)));
}

// 1 / sqrt(mean of squares + epsilon) of `width` floats.
template <class S>
ENGINEWRIGHT_INLINE typename S::F inverse_rms(const float* x, int64_t width, float epsilon) {
  return inverse_root<S>(mean_of<S>(x, width, Squares<S>{}), epsilon);
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

// (x[i] - mean) * factor * weight[i] (+ bias[i]), in the same way.
template <class S>
struct CenteredRow {
  using F = typename S::F;
  const float *x, *weight, *bias;  // bias: null is none
  F mean, factor;
  ENGINEWRIGHT_INLINE F at(int64_t i) const {
    const F y = S::mul(S::mul(S::sub(S::load(x + i), mean), factor), S::load(weight + i));
    return bias == nullptr ? y : S::add(y, S::load(bias + i));
  }
  ENGINEWRIGHT_INLINE F first(int64_t i, int64_t n) const {
    const F y = S::mul(S::mul(S::sub(S::load_first(x + i, n), mean), factor), S::load_first(weight + i, n));
    return bias == nullptr ? y : S::add(y, S::load_first(bias + i, n));
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
class LayerNorm final : public Kernel {
 public:
  LayerNorm(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        weight_(vector_weight(operands, "weight", x_.columns)),
        bias_(operands.count("bias") == 0 ? Operand{} : vector_weight(operands, "bias", x_.columns)),
        out_(operands, attributes, "out", x_, weight_.columns),
        epsilon_(checked_epsilon(attributes)) {
    require_known(operands, attributes, {"x", "weight", "bias", "largest", "out", "scale"},
                  {"epsilon", "group"});
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &weight_, &bias_, &out_.written()}, sizes);
    work.fp32_ops = 8 * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    using F = typename S::F;
    const int64_t columns = x_.columns;
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      const float* x = x_.as<const float>() + row * x_.stride;
      const F mean = S::set1(mean_of<S>(x, columns, Values<S>{}));
      const float variance = mean_of<S>(x, columns, SquaresAround<S>{mean});
      out_.put(row, 0,
               CenteredRow<S>{x, weight_.as<const float>(), bias_.as<const float>(), mean,
                              inverse_root<S>(variance, epsilon_)});
    }
  }

 private:
  const Operand x_, weight_, bias_;
  const RowsOut<S> out_;
  const float epsilon_;
};

template <class S>
class GatedRmsNorm final : public Kernel {
 public:
  GatedRmsNorm(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        z_(matrix(operands, "z", DType::f32)),
        weight_(vector_weight(operands, "weight", operand(operands, "weight").columns)),
        out_(operands, attributes, "out", x_, x_.columns),
        run_(integer(attributes, "run", 1, x_.columns)),
        gates_first_(text(attributes, "gate") == "before"),
        epsilon_(checked_epsilon(attributes)) {
    require_known(operands, attributes, {"x", "z", "weight", "largest", "out", "scale"},
                  {"epsilon", "group", "run", "gate"});
    require(x_.columns % run_ == 0, "'run' does not divide the columns of 'x'");
    require(weight_.columns == run_ || weight_.columns == x_.columns,
            "'weight' must be as wide as a run, or as 'x'");
    require(gates_first_ || text(attributes, "gate") == "after", "the gate must be before or after the norm");
    require_same_rows(x_, z_);
    require_columns(z_, x_.columns);
  }

  int64_t scratch_bytes() const override { return round_up(x_.columns, 16) * 4; }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &z_, &weight_, &out_.written()}, sizes);
    work.fp32_ops = 8 * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    auto* gated = reinterpret_cast<float*>(worker.scratch);  // a row: it may be quantized as a whole
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) {
      const float* x = x_.as<const float>() + row * x_.stride;
      const float* z = z_.as<const float>() + row * z_.stride;
      for (int64_t column = 0; column < x_.columns; column += run_) {
        const float* weight = weight_.as<const float>() + column % weight_.columns;
        float* to = gated + column;
        if (gates_first_) {
          gate(x + column, z + column, to);
          norm(to, weight, to);
        } else {
          norm(x + column, weight, to);
          gate(to, z + column, to);
        }
      }
      out_.put(row, 0, RowReader<S>(gated));
    }
  }

 private:
  // x * silu(z), of a run; out may be x.
  void gate(const float* x, const float* z, float* out) const {
    int64_t i = 0;
    for (; i + 16 <= run_; i += 16) S::store(out + i, S::mul(S::load(x + i), silu<S>(S::load(z + i))));
    if (const int64_t n = run_ - i; n > 0) {
      S::store_first(out + i, S::mul(S::load_first(x + i, n), silu<S>(S::load_first(z + i, n))), n);
    }
  }
  void norm(const float* x, const float* weight, float* out) const {
    const NormedRow<S> normed{x, weight, inverse_rms<S>(x, run_, epsilon_)};
    int64_t i = 0;
    for (; i + 16 <= run_; i += 16) S::store(out + i, normed.at(i));
    if (const int64_t n = run_ - i; n > 0) S::store_first(out + i, normed.first(i, n), n);
  }

  const Operand x_, z_, weight_;
  const RowsOut<S> out_;
  const int64_t run_;
  const bool gates_first_;
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
