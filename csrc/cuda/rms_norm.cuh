// RMS normalization of rows, with what a part of the layer adds to the residual before it
// (https://arxiv.org/abs/ 1910.07467): sum = x + delta, y = sum / sqrt(mean(sum²) + epsilon) · weight, stored
// as f32, bf16, or codes with a scale for each run of `group` columns (plugins/gemm/quantize_rows.py; a group
// of 0 is the row).
#pragma once

#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next. `padded`: columns of y that are written, zeros after
// `columns`.
struct RmsNorm {
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, x_stride, delta_stride, sum_stride, y_stride, padded, group, scale_stride;
  Type type;
  bool add;
  float epsilon;
};

constexpr int RMS_NORM_THREADS = 256;

// A block a row. Shared memory: the row, and three floats for each warp.
template <RmsNorm S>
KERNEL(RMS_NORM_THREADS)
rms_norm(const Sizes* sizes, const float* x, const float* delta, const float* weight, float* sum,
         stored_t<S.type>* y, float* scale) {
  constexpr int THREADS = RMS_NORM_THREADS;
  int row = block_x();
  if (row >= (*sizes)[S.rows]) return;
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
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.y_stride, S.group, S.scale_stride};
  auto normed = [&](int c) { return values[c] * inverse * weight[c]; };
  write_row<OUT, THREADS>(row, normed, y, scale, partial + THREADS / WARP);
}

// Runs of `width` columns, each normalized by itself with the same weight: heads. y is f32 or bf16.
struct RmsNormRuns {
  int rows;  // of the matrix, in a step: the position of their dim
  int width, runs, x_stride, y_stride, padded;
  Type type;
  float epsilon;
};

// A warp a run. Grid: rows, and groups of a block's warps of runs.
template <RmsNormRuns S>
KERNEL(RMS_NORM_THREADS)
rms_norm_runs(const Sizes* sizes, const float* x, const float* weight, stored_t<S.type>* y) {
  constexpr int PER_LANE = ceil_div(S.width, WARP);
  int row = block_x(), run = block_y() * (RMS_NORM_THREADS / WARP) + warp();
  if (row >= (*sizes)[S.rows] || run >= S.runs) return;
  const float* from = x + int64_t{row} * S.x_stride + run * S.width;
  stored_t<S.type>* to = y + int64_t{row} * S.y_stride + run * S.width;
  float values[PER_LANE], squares = 0.0f;
  UNROLL
  for (int i = 0; i < PER_LANE; ++i) {
    int c = i * WARP + lane();
    values[i] = c < S.width ? from[c] : 0.0f;
    squares = fma(values[i], values[i], squares);
  }
  float mean = divide(warp_sum(squares), static_cast<float>(S.width));
  float inverse = divide(1.0f, square_root(mean + S.epsilon));
  UNROLL
  for (int i = 0; i < PER_LANE; ++i)
    if (int c = i * WARP + lane(); c < S.width)
      to[c] = from_float<stored_t<S.type>>(values[i] * inverse * weight[c]);
  if (run == S.runs - 1)
    for (int c = S.runs * S.width + lane(); c < S.padded; c += WARP)
      y[int64_t{row} * S.y_stride + c] = from_float<stored_t<S.type>>(0.0f);
}

// Layer normalization of rows (https://arxiv.org/abs/1607.06450): y = (x - mean) / sqrt(variance + epsilon) ·
// weight (+ bias).
struct LayerNorm {
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, x_stride, y_stride, padded, group, scale_stride;
  Type type;
  bool bias;
  float epsilon;
};

// A block a row. Shared memory: the row, and four floats for each warp.
template <LayerNorm S>
KERNEL(RMS_NORM_THREADS)
layer_norm(const Sizes* sizes, const float* x, const float* weight, const float* bias, stored_t<S.type>* y,
           float* scale) {
  constexpr int THREADS = RMS_NORM_THREADS, WARPS = THREADS / WARP;
  int row = block_x();
  if (row >= (*sizes)[S.rows]) return;
  float* values = shared_memory<float>();  // [columns]
  float* partial = values + S.columns;     // [2][warps]
  float total = 0.0f, squares = 0.0f;
  for (int c = thread_index(); c < S.columns; c += THREADS)
    total += values[c] = x[int64_t{row} * S.x_stride + c];
  float mean = divide(block_sum<THREADS>(total, partial), static_cast<float>(S.columns));
  for (int c = thread_index(); c < S.columns; c += THREADS) {
    float off = values[c] - mean;
    squares = fma(off, off, squares);
  }
  float variance = divide(block_sum<THREADS>(squares, partial + WARPS), static_cast<float>(S.columns));
  float inverse = divide(1.0f, square_root(variance + S.epsilon));
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.y_stride, S.group, S.scale_stride};
  auto normed = [&](int c) {
    float value = (values[c] - mean) * inverse * weight[c];
    if constexpr (S.bias) value += bias[c];
    return value;
  };
  write_row<OUT, THREADS>(row, normed, y, scale, partial + 2 * WARPS);
}

}  // namespace enginewright
