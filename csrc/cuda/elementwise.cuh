// What is done to each element of a row: its sum with another one (add), another type (cast), its product
// with a number (scale), cap · tanh(x / cap) (softcap), or nothing but to be taken from another row (gather).
#pragma once

#include "rows.cuh"

namespace enginewright {

enum class Operation { add, cast, scale, softcap, gather };

// Strides are elements from one row to the next. `padded`: columns that are written, zeros after `columns`.
struct Elementwise {
  Operation operation;
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, padded, x_stride, other_stride, out_stride;
  Type x_type, out_type;
  float cap;
};

constexpr int ELEMENTWISE_THREADS = 256;
constexpr int ELEMENTWISE_COLUMNS = 2048;  // of a block

// A block is a run of columns of a row. other: what is added, or the one factor; source: of each row, the row
// of x that it is.
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
    if constexpr (S.operation == Operation::gather) {
      to[c] = c < S.columns ? from[c] : stored_t<S.out_type>{};
    } else {
      float value = c < S.columns ? to_float(from[c]) : 0.0f;
      if constexpr (S.operation == Operation::add)
        value = c < S.columns ? value + other[int64_t{row} * S.other_stride + c] : 0.0f;
      if constexpr (S.operation == Operation::scale) value *= *other;
      if constexpr (S.operation == Operation::softcap) value = tanh_of(divide(value, S.cap)) * S.cap;
      to[c] = from_float<stored_t<S.out_type>>(value);
    }
  }
}

enum class Function { sigmoid, silu, gelu, gelu_tanh, relu2 };

template <Function FUNCTION>
DEVICE float activated(float x) {
  if constexpr (FUNCTION == Function::sigmoid) return divide(1.0f, 1.0f + exp2_fast(-x * LOG2E));
  if constexpr (FUNCTION == Function::silu) return divide(x, 1.0f + exp2_fast(-x * LOG2E));
  if constexpr (FUNCTION == Function::gelu) return 0.5f * x * erfc_of(-x * 0.70710678118654752f);
  if constexpr (FUNCTION == Function::gelu_tanh) {
    float u = -1.5957691216057308f * fma(0.044715f, x * x * x, x);
    return divide(x, 1.0f + exp2_fast(u * LOG2E));
  }
  return x > 0.0f ? x * x : x * 0.0f;  // relu2; NaN stays NaN
}

// Activations (plugins/elementwise/activation.py): act(x), or x · act(gate), where each column of the gate is
// for `each` columns of x (0: there is no gate).
struct Activation {
  Function applied;
  int rows;    // of the matrix, in a step: the position of their dim
  int copies;  // rows for each of that
  int columns, padded, x_stride, gate_stride, each, out_stride, group, scale_stride;
  Type type;
};

// A block a row. Shared memory: two floats for each warp.
template <Activation S>
KERNEL(ELEMENTWISE_THREADS)
activation(const Sizes* sizes, const float* x, const float* gate, stored_t<S.type>* out, float* scale) {
  int row = block_x();
  if (row >= (*sizes)[S.rows] * S.copies) return;
  x += int64_t{row} * S.x_stride;
  gate += int64_t{row} * S.gate_stride;
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.out_stride, S.group, S.scale_stride};
  auto value = [&](int c) {
    if constexpr (S.each > 0)
      return x[c] * activated<S.applied>(gate[c / S.each]);
    else
      return activated<S.applied>(x[c]);
  };
  write_row<OUT, ELEMENTWISE_THREADS>(row, value, out, scale, shared_memory<float>());
}

// Rows times 1 + beta log(1 + floor(position / original)) (plugins/elementwise/position_scale.py).
struct PositionScale {
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, x_stride, out_stride;
  float beta;
  int original;
};

// A block a row.
template <PositionScale S>
KERNEL(ELEMENTWISE_THREADS)
position_scale(const Sizes* sizes, const float* x, const int32_t* positions, float* out) {
  int row = block_x();
  if (row >= (*sizes)[S.rows]) return;
  float factor = 1.0f + S.beta * log_of(static_cast<float>(1 + positions[row] / S.original));
  for (int c = thread_index(); c < S.columns; c += ELEMENTWISE_THREADS)
    out[int64_t{row} * S.out_stride + c] = x[int64_t{row} * S.x_stride + c] * factor;
}

}  // namespace enginewright
