// What latent attention reads of new tokens (plugins/attention/latent_write.py; arXiv:2405.04434): each
// head's query in the latent space, and then its part that has a position, rotated; and to the token's slot
// of the plane (kv.cuh, of one head), the latent vector and then the key that all heads share, rotated.
// (x[i], x[i + half]) turns by angle i.
#pragma once

#include "kv.cuh"

namespace enginewright {

// Strides are elements from one row to the next. kv: the plane; a row of it, and a head of q_out, has
// `latent` columns and then 2 half. padded: columns of q_out, zeros after the last head.
struct LatentWrite {
  Kv kv;
  int heads, latent, half, q_stride, q_rope_stride, c_stride, k_rope_stride, table_stride, out_stride, padded;
};

constexpr int LATENT_WRITE_THREADS = 128;

// A warp a head of a token, and one more for the vector that goes into the plane.
template <LatentWrite S>
KERNEL(LATENT_WRITE_THREADS)
latent_write(const Sizes* sizes, const float* q, const float* q_rope, const float* c, const float* k_rope,
             const float* cos, const float* sin, const int32_t* slots, unsigned char* plane, bf16* q_out) {
  using Head = KvHead<S.kv>;
  int64_t token = block_x();
  int head = block_y() * (LATENT_WRITE_THREADS / WARP) + warp();
  if (token >= sizes->tokens() || head > S.heads) return;
  cos += token * S.table_stride;
  sin += token * S.table_stride;
  bool is_query = head < S.heads;
  const float* whole = is_query ? q + token * S.q_stride + head * S.latent : c + token * S.c_stride;
  const float* turned =
      is_query ? q_rope + token * S.q_rope_stride + head * 2 * S.half : k_rope + token * S.k_rope_stride;
  float x[Head::PAIRS][2];
  for (int pair = 0; pair < Head::PAIRS; ++pair)
    for (int i = 0; i < 2; ++i) {
      int column = Head::column(pair) + i, angle = column - S.latent;
      float& to = x[pair][i];
      if (angle < 0)
        to = whole[column];
      else if (angle < S.half)
        to = turned[angle] * cos[angle] - turned[angle + S.half] * sin[angle];
      else if ((angle -= S.half) < S.half)
        to = turned[angle + S.half] * cos[angle] + turned[angle] * sin[angle];
      else
        to = 0.0f;
    }
  if (is_query) {
    Head::write_query(q_out + token * S.out_stride + head * S.kv.head_dim, x);
    if (head == S.heads - 1)
      for (int i = S.heads * S.kv.head_dim + lane(); i < S.padded; i += WARP)
        q_out[token * S.out_stride + i] = bf16{0};
  } else {
    int slot = slots[token];
    Head::write_key(kv_tile(S.kv, plane, slot / S.kv.block_size, 0), slot % S.kv.block_size, x);
  }
}

}  // namespace enginewright
