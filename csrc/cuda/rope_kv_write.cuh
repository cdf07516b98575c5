// Rotary embedding of queries and keys (plugins/rope_kv_write.py), and the write of keys and values to their
// slots in the KV pools (kv.cuh): (x[i], x[i + half]) turns by angle i for i < half; columns from 2 half on
// pass unchanged. Queries become bf16; keys and values what the pool holds.
#pragma once

#include "kv.cuh"
#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next. padded: columns of q_out, zeros behind heads * head_dim.
struct RopeKvWrite {
  Kv kv;
  int heads, half, q_stride, k_stride, v_stride, table_stride, out_stride, padded;
};

constexpr int ROPE_KV_WRITE_THREADS = 128;

// A head of a token: a lane has the columns 2 lane and 2 lane + 1 of every 64.
template <RopeKvWrite S>
struct RopeHead {
  static constexpr int COLUMNS = S.kv.head_dim, PADDED = S.kv.head_dim_pad,
                       PAIRS = ceil_div(PADDED, 2 * WARP);

  static DEVICE int column(int pair) { return 2 * (pair * WARP + lane()); }

  static DEVICE void read(float (&x)[PAIRS][2], const float* from) {
    for (int pair = 0; pair < PAIRS; ++pair)
      for (int i = 0; i < 2; ++i) {
        int c = column(pair) + i;
        x[pair][i] = c < COLUMNS ? from[c] : 0.0f;
      }
  }

  static DEVICE void turn(float (&x)[PAIRS][2], const float* from, const float* cos, const float* sin) {
    for (int pair = 0; pair < PAIRS; ++pair)
      for (int i = 0; i < 2; ++i) {
        int c = column(pair) + i;
        if (c >= 2 * S.half) continue;
        bool first = c < S.half;
        int angle = first ? c : c - S.half;
        float across = from[first ? c + S.half : angle] * sin[angle], along = x[pair][i] * cos[angle];
        x[pair][i] = first ? along - across : along + across;
      }
  }

  static DEVICE void write_bf16(bf16* to, const float (&x)[PAIRS][2], int columns) {
    for (int pair = 0; pair < PAIRS; ++pair)
      if (int c = column(pair); c < columns)
        *reinterpret_cast<uint32_t*>(to + c) = pack_bf16(x[pair][0], x[pair][1]);
  }

  // Codes of a row, and the scale behind the tile's codes.
  template <class Code>
  static DEVICE void write_codes(Code* to, float* scale, const float (&x)[PAIRS][2]) {
    float largest = 0.0f, nan_or_zero = 0.0f;
    for (const float (&pair)[2] : x)
      for (float value : pair) {
        largest = fmaxf(largest, absolute(value));
        nan_or_zero += value * 0.0f;
      }
    largest = warp_max(largest);
    nan_or_zero = warp_sum(nan_or_zero);
    float factor = factor_of<Code>(largest);
    for (int pair = 0; pair < PAIRS; ++pair)
      for (int i = 0; i < 2; ++i)
        if (int c = column(pair) + i; c < PADDED) to[c] = code_of<Code>(x[pair][i], factor);
    if (lane() == 0) *scale = scale_of<Code>(largest, nan_or_zero);
  }

  // Position `at` of a tile.
  static DEVICE void write(unsigned char* tile, int at, const float (&x)[PAIRS][2]) {
    unsigned char* row = tile + at * PADDED * S.kv.element_bytes();
    float* scale = reinterpret_cast<float*>(tile + S.kv.code_bytes()) + at;
    if constexpr (S.kv.type == Type::bf16)
      write_bf16(reinterpret_cast<bf16*>(row), x, PADDED);
    else if constexpr (S.kv.type == Type::i8)
      write_codes(reinterpret_cast<int8_t*>(row), scale, x);
    else
      write_codes(reinterpret_cast<e4m3*>(row), scale, x);
  }
};

// A warp a head of a token: queries, then keys, then values.
template <RopeKvWrite S>
KERNEL(ROPE_KV_WRITE_THREADS)
rope_kv_write(const Sizes* sizes, const float* q, const float* k, const float* v, const float* cos,
              const float* sin, const int32_t* slots, unsigned char* keys, unsigned char* values,
              bf16* q_out) {
  using Head = RopeHead<S>;
  int64_t token = block_x();
  int head = block_y() * (ROPE_KV_WRITE_THREADS / WARP) + warp();
  if (token >= sizes->tokens() || head >= S.heads + 2 * S.kv.heads) return;
  cos += token * S.table_stride;
  sin += token * S.table_stride;
  float x[Head::PAIRS][2];
  if (head < S.heads) {
    const float* from = q + token * S.q_stride + head * S.kv.head_dim;
    bf16* to = q_out + token * S.out_stride + head * S.kv.head_dim;
    Head::read(x, from);
    Head::turn(x, from, cos, sin);
    Head::write_bf16(to, x, S.kv.head_dim);
    if (head == S.heads - 1)
      for (int c = S.heads * S.kv.head_dim + lane(); c < S.padded; c += WARP)
        q_out[token * S.out_stride + c] = bf16{0};
    return;
  }
  bool is_key = head < S.heads + S.kv.heads;
  head -= S.heads + (is_key ? 0 : S.kv.heads);
  const float* from = (is_key ? k + token * S.k_stride : v + token * S.v_stride) + head * S.kv.head_dim;
  Head::read(x, from);
  if (is_key) Head::turn(x, from, cos, sin);
  int slot = slots[token];
  Head::write(kv_tile(S.kv, is_key ? keys : values, slot / S.kv.block_size, head), slot % S.kv.block_size, x);
}

}  // namespace enginewright
