// Rows as codes with a scale for each run of columns (plugins/gemm/quantize_rows.py).
#pragma once

#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next; the rest is RowOut's, of q.
struct QuantizeRows {
  int rows;  // of the matrix, in a step: the position of their dim
  Type x_type, type;
  int columns, padded, x_stride, q_stride, group, scale_stride;
  int copies = 1;  // rows of the matrix for each of the dim
};

constexpr int QUANTIZE_ROWS_THREADS = 256;

// A block a row. Shared memory: two floats for each warp.
template <QuantizeRows S>
KERNEL(QUANTIZE_ROWS_THREADS)
quantize_rows(const Sizes* sizes, const stored_t<S.x_type>* x, stored_t<S.type>* q, float* scale) {
  int row = block_x();
  if (row >= (*sizes)[S.rows] * S.copies) return;
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.q_stride, S.group, S.scale_stride};
  auto value = [&](int c) { return to_float(x[int64_t{row} * S.x_stride + c]); };
  write_row<OUT, QUANTIZE_ROWS_THREADS>(row, value, q, scale, shared_memory<float>());
}

}  // namespace enginewright
