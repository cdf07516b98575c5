// Kernels that work on each element by itself, and gather_rows.
//
//   add@1          out = a + b                     f32 [rows, columns]
//   softcap@1      out = cap * tanh(x / cap)       f32
//   cast@1         out = x                         f32 or bf16, to f32 or bf16
//   gather_rows@1  out[i] = x[rows[i]]             f32 or bf16; rows: i32 step input [n]
//
// Threads share pieces of kPiece columns of a row, so that one wide row (logits) is divided, too.
#pragma once

#include "operands.h"
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
      : x_(float_matrix(operands, "x")),
        rows_(step_input(operands, "rows")),
        out_(float_matrix(operands, "out")) {
    require_known(operands, attributes, {"x", "rows", "out"}, {});
    require(x_.dtype == out_.dtype, "'x' and 'out' differ in their dtype");
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
      std::memcpy(out_.data + i * out_.stride * bytes, from, static_cast<size_t>(out_.columns * bytes));
      RowWriter<S>(out_, i).zero_pad(out_);
    }
  }

 private:
  const Operand x_, rows_, out_;
};

}  // namespace
}  // namespace enginewright
