// Rows of matrices in the arena: sums over a row, and how it is written.
#pragma once

#include "dtype.cuh"

namespace enginewright {

// Of all the block's threads: `shared` has a float for each warp. Every thread has the sum, whose order is
// fixed.
template <int THREADS>
DEVICE float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if constexpr (THREADS == WARP) return x;
  if (lane() == 0) shared[warp()] = x;
  sync_threads();
  float sum = 0.0f;
  for (int i = 0; i < THREADS / WARP; ++i) sum += shared[i];
  return sum;
}

// The factor and the scale of a run of numbers, by its largest |x| and its sum of 0 · x, and the code of a
// number (plugins/gemm/quantize_rows.py).
template <class Code>
DEVICE float factor_of(float largest) {
  return largest < Codes<Code>::TINY ? 0.0f : divide(Codes<Code>::LARGEST, largest);
}
template <class Code>
DEVICE float scale_of(float largest, float nan_or_zero) {
  return (largest < Codes<Code>::TINY ? 0.0f : divide(largest, Codes<Code>::LARGEST)) + nan_or_zero;
}
template <class Code>
DEVICE Code code_of(float x, float factor) {
  constexpr float LARGEST = Codes<Code>::LARGEST;
  return from_float<Code>(fminf(fmaxf(x * factor, -LARGEST), LARGEST));
}

// Where a row goes: `padded` columns are written, zeros after `columns`. Codes have a scale for each run of
// `group` columns; a group of 0 is the row.
struct RowOut {
  Type type;
  int columns, padded, stride, group, scale_stride;

  constexpr bool codes() const { return type == Type::i8 || type == Type::e4m3; }
};

// By all threads of the block. value: column → number, the same each time. shared: two floats for each warp.
template <RowOut OUT, int THREADS, class Value>
DEVICE void write_row(int row, Value value, stored_t<OUT.type>* out, [[maybe_unused]] float* scale,
                      [[maybe_unused]] float* shared) {
  constexpr int WARPS = THREADS / WARP;
  using Number = stored_t<OUT.type>;
  Number* to = out + int64_t{row} * OUT.stride;
  if constexpr (!OUT.codes()) {
    for (int c = thread_index(); c < OUT.padded; c += THREADS)
      to[c] = from_float<Number>(c < OUT.columns ? value(c) : 0.0f);
  } else {
    // A warp a run, or all warps together the row.
    constexpr int RUN = OUT.group ? OUT.group : OUT.padded, RUNS = ceil_div(OUT.padded, RUN);
    constexpr int TOGETHER = OUT.group ? WARP : THREADS;
    int index = thread_index() % TOGETHER;
    for (int run = thread_index() / TOGETHER; run < RUNS; run += THREADS / TOGETHER) {
      int begin = run * RUN, padded = begin + RUN < OUT.padded ? begin + RUN : OUT.padded;
      int end = padded < OUT.columns ? padded : OUT.columns;
      float largest = 0.0f, nan_or_zero = 0.0f;
      for (int c = begin + index; c < end; c += TOGETHER) {
        float x = value(c);
        largest = fmaxf(largest, absolute(x));
        nan_or_zero += x * 0.0f;
      }
      largest = warp_max(largest);
      nan_or_zero = warp_sum(nan_or_zero);
      if constexpr (OUT.group == 0) {
        if (lane() == 0) shared[warp()] = largest, shared[WARPS + warp()] = nan_or_zero;
        sync_threads();
        for (int i = 0; i < WARPS; ++i) {
          largest = fmaxf(largest, shared[i]);
          nan_or_zero += shared[WARPS + i];
        }
      }
      float factor = factor_of<Number>(largest);
      for (int c = begin + index; c < padded; c += TOGETHER)
        to[c] = c < OUT.columns ? code_of<Number>(value(c), factor) : Number{};
      if (index == 0 && begin < OUT.columns)
        scale[int64_t{row} * OUT.scale_stride + run] = scale_of<Number>(largest, nan_or_zero);
    }
  }
}

}  // namespace enginewright
