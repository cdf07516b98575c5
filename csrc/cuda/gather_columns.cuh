// Columns of x in another order, or those of them that are wanted, stored as `type`
// (plugins/elementwise/gather_columns.py): out[row, j] = x[row, columns[j]], or LACKING where columns[j] is
// -1.
#pragma once

#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next; the rest is RowOut's.
struct GatherColumns {
  int rows;  // of the matrix, in a step: the position of their dim
  Type type;
  int columns, padded, x_stride, out_stride, group, scale_stride;
};

constexpr int GATHER_COLUMNS_THREADS = 256;
constexpr float LACKING = -1e30f;  // csrc/cpu/gather_columns.h

// A block a row. Shared memory: two floats for each warp.
template <GatherColumns S>
KERNEL(GATHER_COLUMNS_THREADS)
gather_columns(const Sizes* sizes, const float* x, const int32_t* columns, stored_t<S.type>* out,
               float* scale) {
  int row = block_x();
  if (row >= (*sizes)[S.rows]) return;
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.out_stride, S.group, S.scale_stride};
  auto value = [&](int c) {
    int from = columns[c];
    return from < 0 ? LACKING : x[int64_t{row} * S.x_stride + from];
  };
  write_row<OUT, GATHER_COLUMNS_THREADS>(row, value, out, scale, shared_memory<float>());
}

}  // namespace enginewright
