// What is done to each element of a row: its sum with another one (add), another type (cast), cap · tanh(x /
// cap) (softcap), or nothing but to be taken from another row (gather).
#pragma once

#include "rows.cuh"

namespace enginewright {

enum class Operation { add, cast, softcap, gather };

// Strides are elements from one row to the next. `padded`: columns that are written, zeros behind `columns`.
struct Elementwise {
  Operation operation;
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, padded, x_stride, other_stride, out_stride;
  Type x_type, out_type;
  float cap;
};

constexpr int ELEMENTWISE_THREADS = 256;
constexpr int ELEMENTWISE_COLUMNS = 2048;  // of a block

// A block is a run of columns of a row. other: what is added; source: of each row, the row of x that it is.
template <Elementwise S>
KERNEL(ELEMENTWISE_THREADS)
elementwise(const Sizes* sizes, const stored_t<S.x_type>* x, const float* other, const int32_t* source,
            stored_t<S.out_type>* out) {
  int row = block_x(), begin = block_y() * ELEMENTWISE_COLUMNS;
  if (row >= (*sizes)[S.rows]) return;
  int end = begin + ELEMENTWISE_COLUMNS < S.padded ? begin + ELEMENTWISE_COLUMNS : S.padded;
  const auto* from = x + int64_t{S.operation == Operation::gather ? source[row] : row} * S.x_stride;
  auto* to = out + int64_t{row} * S.out_stride;
  for (int c = begin + thread_index(); c < end; c += ELEMENTWISE_THREADS) {
    float value = c < S.columns ? to_float(from[c]) : 0.0f;
    if constexpr (S.operation == Operation::add)
      value = c < S.columns ? value + other[int64_t{row} * S.other_stride + c] : 0.0f;
    if constexpr (S.operation == Operation::softcap) value = tanh_of(divide(value, S.cap)) * S.cap;
    to[c] = from_float<stored_t<S.out_type>>(value);
  }
}

}  // namespace enginewright
