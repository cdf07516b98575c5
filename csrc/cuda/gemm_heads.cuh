// GEMM of heads that have a weight each (plugins/gemm/head_linear.py): head h of out = head h of x
// weight[h]ᵀ.
//
// A block of threads is a tile of gemm_large in one head, with the head's columns of x and of out and its
// part of the weight. Sums go through K in ascending order, so that a token has the same bits in tiles of
// all sizes. Blocks that follow one another have the same weights.
#pragma once

#include "gemm_large.cuh"

namespace enginewright {

// Grid: tiles of tokens in x, of a head's features in y, heads in z.
template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, 1)
gemm_heads(const Sizes* sizes, const uint8_t* x, const uint8_t* weight, stored_t<S.type>* out) {
  using Of = Shape<S>;
  static_assert(S.columns % CHUNK == 0, "a chunk would go on into the next head");
  int tokens = (*sizes)[S.rows], first_token = block_x() * Of::TOKENS, head = block_z();
  if (first_token >= tokens) return;
  multiply_tile<S>(x + int64_t{head} * S.columns * 2, weight + head * S.blocks() * Of::BLOCK_BYTES, nullptr,
                   nullptr, nullptr, nullptr, out + int64_t{head} * S.outputs(), first_token, tokens,
                   block_y() * Of::FEATURES);
  if constexpr (S.zeros_behind > 0)
    if (head == grid_z() - 1 && block_y() == 0)
      for (int i = thread_index(); i < Of::TOKENS * S.zeros_behind; i += Of::THREADS)
        if (int token = first_token + i / S.zeros_behind; token < tokens)
          out[int64_t{token} * S.out_stride + grid_z() * S.outputs() + i % S.zeros_behind] =
              from_float<stored_t<S.type>>(0.0f);
}

}  // namespace enginewright
