// How KV lies in GPU memory, and how what attention reads of a head is written. A block of the pool holds
// `block_size` tokens of all layers of its group, `block_stride` bytes; a layer's keys, and its values, are
// pointers to their part of block 0. There each head has a tile: [block_size] [head_dim_pad] elements, and
// after them, where elements are codes, the f32 scale of each token, [block_size]. A slot is block *
// block_size + position in the block. Elements after head_dim are zeros.
//
// Numbers of 4 bits (u4) are bf16(scale * code + zero), with a bf16 scale and zero for each 32 columns
// (plugins/attention/kv_write.py has the rule). Of 8 codes, a word has those of even columns in its lower
// half, and those of odd ones in the upper half. After the tile's codes there is [block_size] [head_dim_pad /
// 32] [scale, zero]. Their keys, and queries for them, are rotated by Hadamard matrices (arXiv:2404.00456).
#pragma once

#include "rows.cuh"

namespace enginewright {

constexpr int U4_GROUP = 32;  // columns that share a scale and a zero

struct Kv {
  Type type;
  int block_size, heads, head_dim, head_dim_pad;
  int64_t block_stride;

  // Of a token in a head: its numbers, and what scales them.
  constexpr int number_bytes() const {
    return type == Type::u4 ? head_dim_pad / 2 : head_dim_pad * (type == Type::bf16 ? 2 : 1);
  }
  constexpr int scale_bytes() const {
    return type == Type::bf16 ? 0 : type == Type::u4 ? head_dim_pad / U4_GROUP * 4 : 4;
  }
  constexpr int code_bytes() const { return block_size * number_bytes(); }
  constexpr int tile_bytes() const { return block_size * (number_bytes() + scale_bytes()); }
};

// The tile of a block and a head, in `pool`: a layer's keys or values.
template <class Byte>
DEVICE Byte* kv_tile(const Kv& kv, Byte* pool, int block, int head) {
  return pool + int64_t{block} * kv.block_stride + int64_t{head} * kv.tile_bytes();
}

// warp: a head of a token. A lane has the columns 2 lane and 2 lane + 1 of every 64.
template <Kv KV>
struct KvHead {
  static constexpr int COLUMNS = KV.head_dim, PADDED = KV.head_dim_pad, PAIRS = ceil_div(PADDED, 2 * WARP);

  static DEVICE int column(int pair) { return 2 * (pair * WARP + lane()); }

  static DEVICE void read(float (&x)[PAIRS][2], const float* from) {
    for (int pair = 0; pair < PAIRS; ++pair)
      for (int i = 0; i < 2; ++i) {
        int c = column(pair) + i;
        x[pair][i] = c < COLUMNS ? from[c] : 0.0f;
      }
  }

  // These may change x.
  static DEVICE void write_query(bf16* to, float (&x)[PAIRS][2]) {
    if constexpr (KV.type == Type::u4) rotate(x);
    write_bf16(to, x, COLUMNS);
  }

  // At a position of a tile.
  static DEVICE void write_key(unsigned char* tile, int at, float (&x)[PAIRS][2]) {
    if constexpr (KV.type == Type::u4) rotate(x);
    write_value(tile, at, x);
  }
  static DEVICE void write_value(unsigned char* tile, int at, const float (&x)[PAIRS][2]) {
    unsigned char* row = tile + at * KV.number_bytes();
    float* scale = reinterpret_cast<float*>(tile + KV.code_bytes()) + at;
    if constexpr (KV.type == Type::bf16)
      write_bf16(reinterpret_cast<bf16*>(row), x, PADDED);
    else if constexpr (KV.type == Type::u4)
      write_u4(row, tile + KV.code_bytes() + at * KV.scale_bytes(), x);
    else
      write_codes(reinterpret_cast<stored_t<KV.type>*>(row), scale, x);
  }

 private:
  // Blocks of columns, as long as the largest power of 2 that divides head_dim, times the normalized Hadamard
  // matrix of that order: the fast Walsh-Hadamard transform, from the nearest pairs to the farthest.
  static DEVICE void rotate(float (&x)[PAIRS][2]) {
    constexpr int ORDER = COLUMNS & -COLUMNS;
    UNROLL
    for (int pair = 0; pair < PAIRS; ++pair) {
      float a = x[pair][0], b = x[pair][1];
      if constexpr (ORDER > 1) x[pair][0] = a + b, x[pair][1] = a - b;
      UNROLL
      for (int distance = 2; distance < (ORDER < 2 * WARP ? ORDER : 2 * WARP); distance *= 2)
        for (float& own : x[pair]) {
          float other = shuffle_xor(own, distance / 2);
          own = column(pair) & distance ? other - own : own + other;
        }
    }
    UNROLL
    for (int distance = 1; distance < ORDER / (2 * WARP); distance *= 2) {  // pairs
      UNROLL
      for (int pair = 0; pair < PAIRS; ++pair) {
        int other = pair + distance;
        if (other >= PAIRS || (pair & distance) != 0) continue;
        for (int i = 0; i < 2; ++i) {
          float a = x[pair][i], b = x[other][i];
          x[pair][i] = a + b, x[other][i] = a - b;
        }
      }
    }
    float factor = 1.0f;
    for (int order = ORDER; order > 1; order /= 4) factor *= order == 2 ? 0.70710678118654752f : 0.5f;
    for (float (&pair)[2] : x)
      for (float& value : pair) value *= factor;
  }

  // A group is sixteen lanes' columns.
  template <class Operation>
  static DEVICE float over_group(float x, Operation operation) {
    for (int mask = U4_GROUP / 4; mask > 0; mask /= 2) x = operation(x, shuffle_xor(x, mask));
    return x;
  }

  static DEVICE void write_u4(unsigned char* row, unsigned char* scales, const float (&x)[PAIRS][2]) {
    constexpr float TINY = 0x1p-100f;
    auto rounded = [](float number) { return to_float(from_float<bf16>(number)); };
    for (int pair = 0; pair < PAIRS; ++pair) {
      float a = x[pair][0], b = x[pair][1];
      float minimum = over_group(fminf(a, b), [](float y, float z) { return fminf(y, z); });
      float maximum = over_group(fmaxf(a, b), [](float y, float z) { return fmaxf(y, z); });
      float nan_or_zero = over_group(a * 0.0f + b * 0.0f, [](float y, float z) { return y + z; });
      float zero = rounded(minimum), scale = rounded(divide(maximum - minimum, 15.0f)), size = absolute(zero);
      bool no_scale = scale < fmaxf(size * 0x1p-14f, TINY), no_zero = size < fmaxf(scale * 0x1p-10f, TINY);
      if (no_scale) scale = 0.0f;
      if (no_zero) zero = 0.0f;
      float inverse = scale > 0.0f ? divide(1.0f, scale) : 0.0f;
      auto code = [&](float number) {
        float clipped = fminf(fmaxf((number - zero) * inverse, 0.0f), 15.0f);
        return static_cast<uint32_t>(round_half_even(clipped));
      };
      uint32_t codes = (code(a) | code(b) << 16) << lane() % 4 * 4;
      codes |= shuffle_xor(codes, 1);
      codes |= shuffle_xor(codes, 2);
      if (int c = column(pair); c < PADDED) {
        if (lane() % 4 == 0) *reinterpret_cast<uint32_t*>(row + c / 2) = codes;
        if (c % U4_GROUP == 0)
          *reinterpret_cast<uint32_t*>(scales + c / U4_GROUP * 4) = pack_bf16(scale + nan_or_zero, zero);
      }
    }
  }

  static DEVICE void write_bf16(bf16* to, const float (&x)[PAIRS][2], int columns) {
    for (int pair = 0; pair < PAIRS; ++pair)
      if (int c = column(pair); c < columns)
        *reinterpret_cast<uint32_t*>(to + c) = pack_bf16(x[pair][0], x[pair][1]);
  }

  // Codes of a row, and the scale after the tile's codes.
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
};

}  // namespace enginewright
