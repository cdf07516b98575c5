// How KV lies in GPU memory. A block of the pool holds `block_size` tokens of all layers of its group,
// `block_stride` bytes; a layer's keys, and its values, are pointers to their part of block 0. There each
// head has a tile: [block_size] [head_dim_pad] elements, and behind them, where elements are codes, the f32
// scale of each token, [block_size]. A slot is block * block_size + position in the block. Elements behind
// head_dim are zeros.
#pragma once

#include "rows.cuh"

namespace enginewright {

struct Kv {
  Type type;
  int block_size, heads, head_dim, head_dim_pad;
  int64_t block_stride;

  constexpr int element_bytes() const { return type == Type::bf16 ? 2 : 1; }
  constexpr int code_bytes() const { return block_size * head_dim_pad * element_bytes(); }
  constexpr int tile_bytes() const { return code_bytes() + (type == Type::bf16 ? 0 : block_size * 4); }
};

// The tile of a block and a head, in `pool`: a layer's keys or values.
template <class Byte>
DEVICE Byte* kv_tile(const Kv& kv, Byte* pool, int block, int head) {
  return pool + int64_t{block} * kv.block_stride + int64_t{head} * kv.tile_bytes();
}

}  // namespace enginewright
