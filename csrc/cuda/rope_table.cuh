// Cosine and sine of every position times every inverse frequency, both times `scale`
// (plugins/attention/rope_table.py).
#pragma once

#include "rows.cuh"

namespace enginewright {

struct RopeTable {
  int columns, stride;  // of cos and sin
  float scale;
};

constexpr int ROPE_TABLE_THREADS = 64;

// A block a token.
template <RopeTable S>
KERNEL(ROPE_TABLE_THREADS)
rope_table(const Sizes* sizes, const int32_t* positions, const float* inverse_frequencies, float* cos,
           float* sin) {
  int row = block_x();
  if (row >= sizes->tokens()) return;
  float position = static_cast<float>(positions[row]);
  for (int c = thread_index(); c < S.columns; c += ROPE_TABLE_THREADS) {
    float angle = position * inverse_frequencies[c];
    cos[int64_t{row} * S.stride + c] = cos_of(angle) * S.scale;
    sin[int64_t{row} * S.stride + c] = sin_of(angle) * S.scale;
  }
}

}  // namespace enginewright
