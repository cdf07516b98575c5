// RMS normalization of rows, with what a part of the layer adds to the residual before it
// (https://arxiv.org/abs/ 1910.07467): sum = x + delta, y = sum / sqrt(mean(sum²) + epsilon) · weight, stored
// as f32, bf16, or int8 with a scale for each run of `group` columns (plugins/quantize_rows.py; a group of 0
// is the row).
#pragma once

#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next. `padded`: columns of y that are written, zeros behind
// `columns`.
struct RmsNorm {
  Rows rows;
  int columns, x_stride, delta_stride, sum_stride, y_stride, padded, group, scale_stride;
  Type type;
  bool add;
  float epsilon;
};

constexpr int RMS_NORM_THREADS = 256;

// A block a row. Shared memory: the row, and a float for each warp.
template <RmsNorm S>
KERNEL(RMS_NORM_THREADS)
rms_norm(const Sizes* sizes, const float* x, const float* delta, const float* weight, float* sum,
         stored_t<S.type>* y, float* scale) {
  constexpr int THREADS = RMS_NORM_THREADS;
  int row = block_x();
  if (row >= count_of(S.rows, *sizes)) return;
  float* values = shared_memory<float>();  // [columns]
  float* partial = values + S.columns;     // [warps]
  float squares = 0.0f;
  for (int c = thread_index(); c < S.columns; c += THREADS) {
    float value = x[int64_t{row} * S.x_stride + c];
    if constexpr (S.add) {
      value += delta[int64_t{row} * S.delta_stride + c];
      sum[int64_t{row} * S.sum_stride + c] = value;
    }
    values[c] = value;
    squares = fma(value, value, squares);
  }
  float mean = divide(block_sum<THREADS>(squares, partial), static_cast<float>(S.columns));
  float inverse = divide(1.0f, square_root(mean + S.epsilon));
  stored_t<S.type>* to = y + int64_t{row} * S.y_stride;
  if constexpr (S.type == Type::i8) {
    // A warp a run, whose columns other warps have read.
    constexpr int GROUP = S.group ? S.group : S.columns;
    for (int g = warp(); g * GROUP < S.padded; g += THREADS / WARP) {
      int begin = g * GROUP, end = begin + GROUP;
      float largest = 0.0f, nan_or_zero = 0.0f;
      for (int c = begin + lane(); c < end && c < S.columns; c += WARP) {
        values[c] = values[c] * inverse * weight[c];
        largest = larger(largest, absolute(values[c]));
        nan_or_zero += values[c] * 0.0f;
      }
      largest = warp_max(largest);
      nan_or_zero = warp_sum(nan_or_zero);
      float factor = factor_of(largest);
      for (int c = begin + lane(); c < (S.group ? end : S.padded) && c < S.padded; c += WARP)
        to[c] = c < S.columns ? code_of(values[c], factor) : int8_t{0};
      if (lane() == 0 && begin < S.columns)
        scale[int64_t{row} * S.scale_stride + g] = scale_of(largest, nan_or_zero);
    }
  } else {
    for (int c = thread_index(); c < S.padded; c += THREADS)
      to[c] = from_float<stored_t<S.type>>(c < S.columns ? values[c] * inverse * weight[c] : 0.0f);
  }
}

}  // namespace enginewright
