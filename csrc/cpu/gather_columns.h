// The columns of x in another order.
//
//   gather_columns@1  out[i, j] = x[i, columns[j]]
//
// x: f32 [rows, K]; columns: i32 weight [K], each in [0, K); out: f32 or bf16 [rows, K], or i8 as quantize.h
// has it, with scale: f32 [rows, runs] beside it.
#pragma once

#include "operands.h"
#include "quantize.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class GatherColumns final : public Kernel {
 public:
  GatherColumns(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        columns_(matrix(operands, "columns", DType::i32)),
        out_(operands, attributes, "out", x_, x_.columns) {
    require_known(operands, attributes, {"x", "columns", "largest", "out", "scale"}, {"group"});
    require(columns_.kind == Operand::Kind::weight && columns_.max_rows == 1,
            "'columns' must be a weight of one row");
    require_columns(columns_, x_.columns);
    const int32_t* columns = columns_.as<const int32_t>();
    for (int64_t i = 0; i < columns_.columns; ++i) {
      require(0 <= columns[i] && columns[i] < x_.columns, "'columns' names columns that 'x' does not have");
    }
  }

  int64_t scratch_bytes() const override { return 4 * x_.columns; }

  Work work(const Sizes& sizes) const override { return touched({&x_, &columns_, &out_.written()}, sizes); }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int32_t* columns = columns_.as<const int32_t>();
    float* row = reinterpret_cast<float*>(worker.scratch);
    const Range mine = share(x_.rows.at(sizes), worker);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const float* x = x_.as<const float>() + i * x_.stride;
      for (int64_t j = 0; j < x_.columns; ++j) row[j] = x[columns[j]];
      out_.put(i, 0, RowReader<S>(row));
    }
  }

 private:
  const Operand x_, columns_;
  const RowsOut<S> out_;
};

}  // namespace
}  // namespace enginewright
