// The columns of x in another order, or those of them that are wanted, each as often as it is.
//
//   gather_columns@1  out[i, j] = x[i, columns[j]], or kLacking where columns[j] is -1
//
// x: f32 [rows, K]; columns: i32 weight [N], each in [-1, K); out: f32 or bf16 [rows, N], or i8 as quantize.h
// has it, with scale: f32 [rows, runs].
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"

namespace enginewright {
namespace {

// The logit of a token that the head has none for: as good as none, and finite under every penalty.
constexpr float kLacking = -1e30f;

template <class S>
class GatherColumns final : public Kernel {
 public:
  GatherColumns(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        columns_(matrix(operands, "columns", DType::i32)),
        out_(operands, attributes, "out", with_columns(x_, columns_.columns), columns_.columns) {
    require_known(operands, attributes, {"x", "columns", "largest", "out", "scale"}, {"group"});
    require(columns_.kind == Operand::Kind::weight && columns_.max_rows == 1,
            "'columns' must be a weight of one row");
    const int32_t* columns = columns_.as<const int32_t>();
    for (int64_t i = 0; i < columns_.columns; ++i) {
      require(-1 <= columns[i] && columns[i] < x_.columns, "'columns' names columns that 'x' does not have");
    }
  }

  int64_t scratch_bytes() const override { return 4 * columns_.columns; }

  Work work(const Sizes& sizes) const override { return touched({&x_, &columns_, &out_.written()}, sizes); }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int32_t* columns = columns_.as<const int32_t>();
    float* row = reinterpret_cast<float*>(worker.scratch);
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const float* x = x_.as<const float>() + i * x_.stride;
      for (int64_t j = 0; j < columns_.columns; ++j) row[j] = columns[j] < 0 ? kLacking : x[columns[j]];
      out_.put(i, 0, RowReader<S>(row));
    }
  }

 private:
  static Operand with_columns(Operand x, int64_t columns) {
    x.columns = columns;
    return x;
  }

  const Operand x_, columns_;
  const RowsOut<S> out_;
};

}  // namespace
}  // namespace enginewright
