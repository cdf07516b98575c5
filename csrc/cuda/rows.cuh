// Rows of matrices in the arena: how many a step has, and how a row's elements are stored.
#pragma once

#include "device.cuh"

namespace enginewright {

// Which size of the step a matrix has as its number of rows.
enum class Rows { tokens, sequences, logit_rows };

DEVICE int count_of(Rows rows, const Sizes& sizes) {
  return rows == Rows::tokens ? sizes.tokens : rows == Rows::sequences ? sizes.sequences : sizes.logit_rows;
}

// What a number becomes where it is stored.
enum class Type { f32, bf16, i8 };

template <Type TYPE>
struct Stored;
template <>
struct Stored<Type::f32> {
  using type = float;
};
template <>
struct Stored<Type::bf16> {
  using type = bf16;
};
template <>
struct Stored<Type::i8> {
  using type = int8_t;
};
template <Type TYPE>
using stored_t = typename Stored<TYPE>::type;

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

// The codes (int8_t or e4m3) and the scale of a run of numbers (plugins/quantize_rows.py): of the largest
// |x|, and the sum of 0 · x.
template <class Code>
struct Codes {  // numbers below TINY count as zero
  static constexpr float LARGEST = 127.0f, TINY = 0x1p-120f;
};
template <>
struct Codes<e4m3> {
  static constexpr float LARGEST = 448.0f, TINY = 0x1p-118f;
};

template <class Code = int8_t>
DEVICE float factor_of(float largest) {
  return largest < Codes<Code>::TINY ? 0.0f : divide(Codes<Code>::LARGEST, largest);
}
template <class Code = int8_t>
DEVICE float scale_of(float largest, float nan_or_zero) {
  return (largest < Codes<Code>::TINY ? 0.0f : divide(largest, Codes<Code>::LARGEST)) + nan_or_zero;
}
template <class Code = int8_t>
DEVICE Code code_of(float x, float factor) {
  constexpr float LARGEST = Codes<Code>::LARGEST;
  return from_float<Code>(smaller(larger(x * factor, -LARGEST), LARGEST));
}

}  // namespace enginewright
