// Rows of a matrix that ranks exchange: what a rank has computed goes to a buffer of its own, rows one after
// another, and what others have computed from theirs to where it belongs (all_gather@1:
// enginewright/rank_plan.py).
#pragma once

#include "device.cuh"

namespace enginewright {

// All but `rows` in words of `word` bytes. Strides are from one row to the next. `padded`: what is written,
// zeros after `columns`.
struct CopyRows {
  int rows;    // of the matrix, in a step: the position of their dim
  int copies;  // rows for each of that
  int word, columns, padded, from_stride, to_stride;
};

template <int BYTES>
struct WordOf;
template <>
struct WordOf<1> {
  using type = uint8_t;
};
template <>
struct WordOf<2> {
  using type = uint16_t;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<8> {
  using type = Words2;
};
template <>
struct WordOf<16> {
  using type = Words4;
};

constexpr int COPY_ROWS_THREADS = 128;

// A block a row.
template <CopyRows S>
KERNEL(COPY_ROWS_THREADS)
copy_rows(const Sizes* sizes, const typename WordOf<S.word>::type* from, typename WordOf<S.word>::type* to) {
  int row = block_x();
  if (row >= (*sizes)[S.rows] * S.copies) return;
  from += int64_t{row} * S.from_stride;
  to += int64_t{row} * S.to_stride;
  for (int c = thread_index(); c < S.padded; c += COPY_ROWS_THREADS)
    to[c] = c < S.columns ? from[c] : typename WordOf<S.word>::type{};
}

}  // namespace enginewright
