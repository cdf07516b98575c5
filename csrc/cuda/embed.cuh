// Rows of an embedding table, times `scale`: of bf16, or of int8 with a scale a row. The table lies as the
// file has it, in blocks of 16 rows (r16: csrc/cpu/kernel.h): a row's words of 4 bytes are 64 bytes apart.
#pragma once

#include "rows.cuh"
#include "sampled_row.cuh"

namespace enginewright {

struct Embed {
  int columns, out_stride;
  int block_bytes;  // of 16 rows of the table
  bool int8;
  float scale;
};

constexpr int EMBED_THREADS = 128;

// A block a token. sampled: what the step before has sampled; known: this step's tokens, from wherever.
template <Embed S>
KERNEL(EMBED_THREADS)
embed(const Sizes* sizes, const int32_t* tokens, const SampledRow* sampled, const uint8_t* table,
      const float* row_scale, float* out, int32_t* known) {
  int row = block_x();
  if (row >= sizes->tokens()) return;
  constexpr int IN_WORD = S.int8 ? 4 : 2;
  int token = known_token(tokens[row], sampled);
  if (thread_index() == 0) known[row] = token;
  const uint8_t* words = table + int64_t{token / 16} * S.block_bytes + token % 16 * 4;
  float* to = out + int64_t{row} * S.out_stride;
  for (int i = thread_index(); i * IN_WORD < S.columns; i += EMBED_THREADS) {
    uint32_t word = *reinterpret_cast<const uint32_t*>(words + int64_t{i} * 64);
    for (int e = 0; e < IN_WORD; ++e) {
      int c = i * IN_WORD + e;
      if (c >= S.columns) break;
      if constexpr (S.int8)
        to[c] = static_cast<float>(static_cast<int8_t>(word >> (8 * e))) * row_scale[token] * S.scale;
      else
        to[c] = to_float(bf16{static_cast<uint16_t>(word >> (16 * e))}) * S.scale;
    }
  }
}

}  // namespace enginewright
