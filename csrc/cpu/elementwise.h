// Kernels that work on each element by itself, and gather_rows.
//
//   add@1          out = a + b                     f32 [rows, columns]
//   scale@1        out = x * factor                f32; factor: f32 [1]
//   softcap@1      out = cap * tanh(x / cap)       f32
//   activation@1   out = act(x), or x * act(gate)  f32, to f32, bf16, or i8 with 'scale' (quantize.h)
//   position_scale@1  out = x * (1 + beta * log(1 + floor(position / original)))   f32; positions: i32 [rows]
//   cast@1         out = x                         f32 or bf16, to f32 or bf16
//   gather_rows@1  out[i] = x[rows[i]]             f32, bf16 or i8; rows: i32 step input [n]
//
// Threads share pieces of kPiece columns of a row, so that one wide row (logits) is divided, too.
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"
#include "simd_math.h"

namespace enginewright {
namespace {

constexpr int64_t kPiece = 1024;

// out[row, …] = f(row, column) in pieces; F gives 16 columns, or the first n of them.
template <class S, class Function>
void for_pieces(const Operand& out, const Function& f, const Sizes& sizes, const Worker& worker) {
  const int64_t pieces = (out.columns + kPiece - 1) / kPiece;
  const Range mine = share(out.rows.at(sizes) * pieces, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t row = item / pieces, begin = item % pieces * kPiece;
    const int64_t end = begin + kPiece < out.columns ? begin + kPiece : out.columns;
    const RowWriter<S> writer(out, row);
    int64_t column = begin;
    for (; column + 16 <= end; column += 16) writer.put(column, f.all(row, column));
    if (column < end) writer.put_first(column, f.first(row, column, end - column), end - column);
    if (end == out.columns) writer.zero_pad(out);
  }
}

// Of a kernel with so many operations an element of `out`.
inline Work elementwise_work(std::initializer_list<const Operand*> operands, const Operand& out,
                             int64_t operations, const Sizes& sizes) {
  Work work = touched(operands, sizes);
  work.fp32_ops = operations * out.rows.at(sizes) * out.columns;
  return work;
}

template <class S>
class Add final : public Kernel {
 public:
  using F = typename S::F;
  Add(const Operands& operands, const Attributes& attributes)
      : a_(matrix(operands, "a", DType::f32)),
        b_(matrix(operands, "b", DType::f32)),
        out_(matrix(operands, "out", DType::f32)) {
    require_known(operands, attributes, {"a", "b", "out"}, {});
    require_same_rows(a_, out_);
    require_same_rows(b_, out_);
    require_columns(a_, out_.columns);
    require_columns(b_, out_.columns);
  }
  Work work(const Sizes& sizes) const override { return elementwise_work({&a_, &b_, &out_}, out_, 1, sizes); }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const {
    return S::add(RowReader<S>(a_, row).at(column), RowReader<S>(b_, row).at(column));
  }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    return S::add(RowReader<S>(a_, row).first(column, n), RowReader<S>(b_, row).first(column, n));
  }

 private:
  const Operand a_, b_, out_;
};

template <class S>
class Scale final : public Kernel {
 public:
  using F = typename S::F;
  Scale(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        factor_(vector_weight(operands, "factor", 1)),
        out_(matrix(operands, "out", DType::f32)) {
    require_known(operands, attributes, {"x", "factor", "out"}, {});
    require_same_rows(x_, out_);
    require_columns(x_, out_.columns);
  }
  Work work(const Sizes& sizes) const override { return elementwise_work({&x_, &out_}, out_, 1, sizes); }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const {
    return S::mul(RowReader<S>(x_, row).at(column), S::set1(*factor_.as<const float>()));
  }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    return S::mul(RowReader<S>(x_, row).first(column, n), S::set1(*factor_.as<const float>()));
  }

 private:
  const Operand x_, factor_, out_;
};

template <class S>
class Softcap final : public Kernel {
 public:
  using F = typename S::F;
  Softcap(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        out_(matrix(operands, "out", DType::f32)),
        cap_(static_cast<float>(number(attributes, "cap"))) {
    require_known(operands, attributes, {"x", "out"}, {"cap"});
    require(cap_ > 0, "the attribute 'cap' must be positive");
    require_same_rows(x_, out_);
    require_columns(x_, out_.columns);
  }
  Work work(const Sizes& sizes) const override { return elementwise_work({&x_, &out_}, out_, 3, sizes); }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F cap(F x) const { return S::mul(S::set1(cap_), tanh<S>(S::div(x, S::set1(cap_)))); }
  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const {
    return cap(RowReader<S>(x_, row).at(column));
  }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    return cap(RowReader<S>(x_, row).first(column, n));
  }

 private:
  const Operand x_, out_;
  const float cap_;
};

// Functions of activation@1, by their names in graphs.
enum class Function { sigmoid, silu, gelu, gelu_tanh, relu2 };

inline Function function_of(const std::string& name) {
  if (name == "sigmoid") return Function::sigmoid;
  if (name == "silu") return Function::silu;
  if (name == "gelu") return Function::gelu;
  if (name == "gelu_tanh") return Function::gelu_tanh;
  require(name == "relu2", "unknown activation '" + name + "'");
  return Function::relu2;
}

template <class S>
ENGINEWRIGHT_INLINE typename S::F activated(Function function, typename S::F x) {
  switch (function) {
    case Function::sigmoid:
      return sigmoid<S>(x);
    case Function::silu:
      return silu<S>(x);
    case Function::gelu:
      return gelu<S>(x);
    case Function::gelu_tanh:
      return gelu_tanh<S>(x);
    default:
      return relu2<S>(x);
  }
}

// gate?: f32 [rows, G], where G divides the columns of x: each of its numbers is for columns / G of them.
template <class S>
class Activation final : public Kernel {
 public:
  using F = typename S::F;
  Activation(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        gated_(operands.count("gate") != 0),
        gate_(gated_ ? matrix(operands, "gate", DType::f32) : Operand{}),
        out_(operands, attributes, "out", x_, x_.columns),
        each_(gated_ ? x_.columns / gate_.columns : 1),
        function_(function_of(text(attributes, "activation"))) {
    require_known(operands, attributes, {"x", "gate", "largest", "out", "scale"}, {"activation", "group"});
    if (gated_) {
      require_same_rows(x_, gate_);
      require(x_.columns % gate_.columns == 0, "the columns of 'gate' do not divide those of 'x'");
    }
  }
  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &gate_, &out_.written()}, sizes);
    work.fp32_ops = 4 * x_.rows.at(sizes) * x_.columns;
    return work;
  }
  void run(const Sizes& sizes, Worker& worker) const override {
    if (out_.written().dtype != DType::i8) return for_pieces<S>(out_.written(), *this, sizes, worker);
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t row = mine.begin; row < mine.end; ++row) out_.put(row, 0, Row{*this, row});
  }

  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const {
    const F x = RowReader<S>(x_, row).at(column);
    return gated_ ? S::mul(x, activated<S>(function_, gates(row, column, 16))) : activated<S>(function_, x);
  }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    const F x = RowReader<S>(x_, row).first(column, n);
    return gated_ ? S::mul(x, activated<S>(function_, gates(row, column, n))) : activated<S>(function_, x);
  }

 private:
  struct Row {
    const Activation& of;
    int64_t row;
    ENGINEWRIGHT_INLINE F at(int64_t column) const { return of.all(row, column); }
    ENGINEWRIGHT_INLINE F first(int64_t column, int64_t n) const { return of.first(row, column, n); }
  };

  // Of n columns.
  ENGINEWRIGHT_INLINE F gates(int64_t row, int64_t column, int64_t n) const {
    const float* gate = gate_.as<const float>() + row * gate_.stride;
    if (each_ == 1) return n < 16 ? S::load_first(gate + column, n) : S::load(gate + column);
    float lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = gate[(column + i) / each_];
    return S::load(lanes);
  }

  const Operand x_;
  const bool gated_;
  const Operand gate_;
  const RowsOut<S> out_;
  const int64_t each_;  // columns that have a gate's number
  const Function function_;
};

template <class S>
class PositionScale final : public Kernel {
 public:
  using F = typename S::F;
  PositionScale(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        positions_(step_input(operands, "positions")),
        out_(matrix(operands, "out", DType::f32)),
        beta_(static_cast<float>(number(attributes, "beta"))),
        original_(integer(attributes, "original", 1, int64_t{1} << 31)) {
    require_known(operands, attributes, {"x", "positions", "out"}, {"beta", "original"});
    require_same_rows(x_, out_);
    require_same_rows(positions_, out_);
    require_columns(positions_, 1);
    require_columns(x_, out_.columns);
  }
  Work work(const Sizes& sizes) const override { return elementwise_work({&x_, &out_}, out_, 1, sizes); }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F factor(int64_t row) const {
    const int64_t lengths = positions_.as<const int32_t>()[row * positions_.stride] / original_;
    return S::set1(1.0f + beta_ * static_cast<float>(std::log(static_cast<double>(1 + lengths))));
  }
  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const {
    return S::mul(RowReader<S>(x_, row).at(column), factor(row));
  }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    return S::mul(RowReader<S>(x_, row).first(column, n), factor(row));
  }

 private:
  const Operand x_, positions_, out_;
  const float beta_;
  const int64_t original_;
};

template <class S>
class Cast final : public Kernel {
 public:
  using F = typename S::F;
  Cast(const Operands& operands, const Attributes& attributes)
      : x_(float_matrix(operands, "x")), out_(float_matrix(operands, "out")) {
    require_known(operands, attributes, {"x", "out"}, {});
    require_same_rows(x_, out_);
    require_columns(x_, out_.columns);
  }
  Work work(const Sizes& sizes) const override { return elementwise_work({&x_, &out_}, out_, 0, sizes); }
  void run(const Sizes& sizes, Worker& worker) const override { for_pieces<S>(out_, *this, sizes, worker); }

  ENGINEWRIGHT_INLINE F all(int64_t row, int64_t column) const { return RowReader<S>(x_, row).at(column); }
  ENGINEWRIGHT_INLINE F first(int64_t row, int64_t column, int64_t n) const {
    return RowReader<S>(x_, row).first(column, n);
  }

 private:
  const Operand x_, out_;
};

template <class S>
class GatherRows final : public Kernel {
 public:
  GatherRows(const Operands& operands, const Attributes& attributes)
      : x_(operand(operands, "x").dtype == DType::i8 ? matrix(operands, "x", DType::i8)
                                                     : float_matrix(operands, "x")),
        rows_(step_input(operands, "rows")),
        out_(matrix(operands, "out", x_.dtype)) {
    require_known(operands, attributes, {"x", "rows", "out"}, {});
    require_same_rows(rows_, out_);
    require_columns(x_, out_.columns);
  }
  void add_checks(StepChecks& checks) const override { checks.indices.push_back({rows_, x_.rows}); }
  Work work(const Sizes& sizes) const override {
    return touched({&out_, &out_}, sizes);  // and as much of x
  }
  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t bytes = bytes_of(x_.dtype);
    const Range mine = share(out_.rows.at(sizes), worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const std::byte* from = x_.data + rows_.as<const int32_t>()[i] * x_.stride * bytes;
      std::byte* to = out_.data + i * out_.stride * bytes;
      std::memcpy(to, from, static_cast<size_t>(out_.columns * bytes));
      if (x_.dtype != DType::f32)  // the zeros that GEMMs read
        std::memset(to + out_.columns * bytes, 0, static_cast<size_t>(out_.pad * bytes));
    }
  }

 private:
  const Operand x_, rows_, out_;
};

}  // namespace
}  // namespace enginewright
