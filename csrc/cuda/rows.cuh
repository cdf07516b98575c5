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

// The codes and the scale of a run of numbers (plugins/quantize_rows.py): of the largest |x|, and the sum of
// 0 · x.
constexpr float LARGEST_CODE = 127.0f;
constexpr float TINY = 0x1p-120f;
DEVICE float factor_of(float largest) { return largest < TINY ? 0.0f : divide(LARGEST_CODE, largest); }
DEVICE float scale_of(float largest, float nan_or_zero) {
  return (largest < TINY ? 0.0f : divide(largest, LARGEST_CODE)) + nan_or_zero;
}
DEVICE int8_t code_of(float x, float factor) {
  float code = round_half_even(x * factor);
  return static_cast<int8_t>(static_cast<int32_t>(smaller(larger(code, -LARGEST_CODE), LARGEST_CODE)));
}

}  // namespace enginewright
