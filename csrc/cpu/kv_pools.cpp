#include "kv_pools.h"

#include <cstring>

#include "operands.h"

namespace enginewright {

namespace {

KvPool shape_of(int64_t layers, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
                DType dtype) {
  require(dtype == DType::bf16 || dtype == DType::i8 || dtype == DType::e4m3,
          std::string("a KV pool holds bf16, i8 or e4m3, not ") + name_of(dtype));
  require(layers > 0 && num_blocks > 0 && kv_heads > 0 && head_dim > 0, "a KV pool has no size");
  require(block_size > 0 && block_size % 16 == 0, "a KV block must hold a multiple of 16 tokens");
  require(head_dim < (int64_t{1} << 31), "a KV head is too large");
  const int64_t head_dim_pad = round_up(head_dim, 32);
  KvPool shape{nullptr, nullptr, dtype, num_blocks, block_size, kv_heads, head_dim, head_dim_pad, 0, 0};
  const int64_t row_bytes = head_dim_pad * bytes_of(dtype) + (shape.scaled() ? 4 : 0);
  shape.tile_bytes = checked_mul(block_size, row_bytes);
  shape.block_stride = checked_mul(checked_mul(checked_mul(shape.tile_bytes, kv_heads), layers), 2);
  return shape;
}

}  // namespace

KvPools::KvPools(int64_t layers, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
                 DType dtype)
    : layers_(layers),
      shape_(shape_of(layers, num_blocks, block_size, kv_heads, head_dim, dtype)),
      memory_(checked_mul(shape_.block_stride, num_blocks)) {}

KvPool KvPools::pool(int64_t layer) const {
  require(0 <= layer && layer < layers_, "the KV group has no layer " + std::to_string(layer));
  KvPool pool = shape_;
  const int64_t bytes = pool.kv_heads * pool.tile_bytes;  // of K, or of V, in a block
  pool.keys = memory_.data() + layer * 2 * bytes;
  pool.values = pool.keys + bytes;
  return pool;
}

void KvPools::require_block(int64_t block) const {
  require(0 <= block && block < shape_.num_blocks, "the KV pool has no block " + std::to_string(block));
}

void KvPools::scrub(const std::vector<int64_t>& blocks) {
  for (const int64_t block : blocks) require_block(block);
  const auto bytes = static_cast<size_t>(shape_.block_stride);
  for (const int64_t block : blocks)
    std::memset(memory_.data() + static_cast<size_t>(block) * bytes, 0, bytes);
}

void KvPools::copy(const std::vector<std::pair<int64_t, int64_t>>& blocks) {
  for (const auto& [from, to] : blocks) {
    require_block(from);
    require_block(to);
    require(from != to, "a KV block is copied onto itself");
  }
  const auto bytes = static_cast<size_t>(shape_.block_stride);
  for (const auto& [from, to] : blocks) {
    std::memcpy(memory_.data() + static_cast<size_t>(to) * bytes,
                memory_.data() + static_cast<size_t>(from) * bytes, bytes);
  }
}

}  // namespace enginewright
