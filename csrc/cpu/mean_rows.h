// The mean of the rows of each sequence's tokens.
//
//   mean_rows@1  out[s] = sum over the tokens t of s of x[t] / number of these tokens
//
// x: f32 [tokens, W]; query_start: i32 [sequences + 1]; out: f32 or bf16 [sequences, W]. Rows are added in
// ascending order, so that a sequence's mean does not depend on the others. Threads share pieces of columns.
#pragma once

#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class MeanRows final : public Kernel {
 public:
  MeanRows(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        query_start_(step_input(operands, "query_start")),
        out_(float_matrix(operands, "out")) {
    require_known(operands, attributes, {"x", "query_start", "out"}, {});
    require(x_.rows == Linear{0, {1}}, "'x' must have a row for each token");
    require(out_.rows == Linear{0, {0, 1}}, "'out' must have a row for each sequence");
    require_columns(out_, x_.columns);
  }

  void add_checks(StepChecks& checks) const override { checks.query_starts.push_back(query_start_); }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &out_}, sizes);
    work.fp32_ops = x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t pieces = (x_.columns + kPieceColumns - 1) / kPieceColumns;
    const Range mine = share(pieces * sizes[kSequences], worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t s = item / pieces, begin = item % pieces * kPieceColumns;
      const int64_t end = begin + kPieceColumns < x_.columns ? begin + kPieceColumns : x_.columns;
      run_piece(s, begin, end);
    }
  }

 private:
  using F = typename S::F;
  static constexpr int64_t kPieceColumns = 64;  // a cache line and more of each row

  void run_piece(int64_t s, int64_t begin, int64_t end) const {
    const int32_t* start = query_start_.as<const int32_t>() + s * query_start_.stride;
    const int64_t first = start[0], last = start[query_start_.stride];
    const F share_of_one = S::set1(1.0f / static_cast<float>(last - first));
    const RowWriter<S> out(out_, s);
    for (int64_t column = begin; column < end; column += 16) {
      const int64_t n = end - column < 16 ? end - column : 16;
      F sum = S::zero();
      for (int64_t token = first; token < last; ++token) {
        const float* x = x_.as<const float>() + token * x_.stride + column;
        sum = S::add(n < 16 ? S::load_first(x, n) : S::load(x), sum);
      }
      const F mean = S::mul(sum, share_of_one);
      n < 16 ? out.put_first(column, mean, n) : out.put(column, mean);
    }
    if (end == x_.columns) out.zero_pad(out_);
  }

  const Operand x_, query_start_, out_;
};

}  // namespace
}  // namespace enginewright
