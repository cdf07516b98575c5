// Rotary embedding of queries and keys (plugins/attention/rope_kv_write.py), and the write of keys and values
// to their slots in the KV pools (kv.cuh): (x[i], x[i + half]) turns by angle i for i < half; columns from 2
// half on pass unchanged. The same for queries alone (plugins/attention/rope_queries.py); and rope alone.
#pragma once

#include "kv.cuh"
#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next. padded: columns of q_out, zeros after heads * head_dim.
struct RopeKvWrite {
  Kv kv;
  int heads, half, q_stride, table_stride, out_stride, padded, k_stride, v_stride;
};
struct RopeQueries {
  Kv kv;
  int heads, half, q_stride, table_stride, out_stride, padded;
};

constexpr int ROPE_KV_WRITE_THREADS = 128;

// The rotation of a head that KvHead holds.
template <auto S>
struct RopeHead : KvHead<S.kv> {
  using Base = KvHead<S.kv>;
  using Base::PAIRS, Base::column;

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

  // A warp: a head of a token's queries. cos, sin: of the token.
  static DEVICE void write_queries(int64_t token, int head, const float* q, const float* cos,
                                   const float* sin, bf16* q_out) {
    float x[PAIRS][2];
    const float* from = q + token * S.q_stride + head * S.kv.head_dim;
    bf16* to = q_out + token * S.out_stride;
    Base::read(x, from);
    turn(x, from, cos, sin);
    Base::write_query(to + head * S.kv.head_dim, x);
    if (head == S.heads - 1)
      for (int c = S.heads * S.kv.head_dim + lane(); c < S.padded; c += WARP) to[c] = bf16{0};
  }
};

// Rope alone, of f32 (plugins/attention/rope.py).
struct Rope {
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, head_dim, half, x_stride, table_stride, out_stride;
};

// A block a row.
template <Rope S>
KERNEL(ROPE_KV_WRITE_THREADS)
rope(const Sizes* sizes, const float* x, const float* cos, const float* sin, float* out) {
  int64_t row = block_x();
  if (row >= (*sizes)[S.rows]) return;
  for (int c = thread_index(); c < S.columns; c += ROPE_KV_WRITE_THREADS) {
    int i = c % S.head_dim;
    const float* head = x + row * S.x_stride + (c - i);
    float y = head[i];
    if (i < 2 * S.half) {
      int angle = i < S.half ? i : i - S.half;
      float along = y * cos[row * S.table_stride + angle], sine = sin[row * S.table_stride + angle];
      y = i < S.half ? along - head[i + S.half] * sine : along + head[angle] * sine;
    }
    out[row * S.out_stride + c] = y;
  }
}

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
  if (head < S.heads) {
    Head::write_queries(token, head, q, cos, sin, q_out);
    return;
  }
  float x[Head::PAIRS][2];
  bool is_key = head < S.heads + S.kv.heads;
  head -= S.heads + (is_key ? 0 : S.kv.heads);
  const float* from = (is_key ? k + token * S.k_stride : v + token * S.v_stride) + head * S.kv.head_dim;
  Head::read(x, from);
  int slot = slots[token], at = slot % S.kv.block_size;
  unsigned char* tile = kv_tile(S.kv, is_key ? keys : values, slot / S.kv.block_size, head);
  if (is_key) {
    Head::turn(x, from, cos, sin);
    Head::write_key(tile, at, x);
  } else {
    Head::write_value(tile, at, x);
  }
}

// A warp a head of a token.
template <RopeQueries S>
KERNEL(ROPE_KV_WRITE_THREADS)
rope_queries(const Sizes* sizes, const float* q, const float* cos, const float* sin, bf16* q_out) {
  int64_t token = block_x();
  int head = block_y() * (ROPE_KV_WRITE_THREADS / WARP) + warp();
  if (token >= sizes->tokens() || head >= S.heads) return;
  RopeHead<S>::write_queries(token, head, q, cos + token * S.table_stride, sin + token * S.table_stride,
                             q_out);
}

}  // namespace enginewright
