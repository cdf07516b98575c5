#include "kv_pools.h"

#include <cstring>

#include "operands.h"

namespace enginewright {

namespace {

int64_t block_elements(const KvPool& shape) {
  return checked_mul(checked_mul(shape.kv_heads, shape.block_size), shape.head_dim_pad);
}

KvPool shape_of(int64_t layers, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim) {
  require(layers > 0 && num_blocks > 0 && kv_heads > 0 && head_dim > 0, "a KV pool has no size");
  require(block_size > 0 && block_size % 16 == 0, "a KV block must hold a multiple of 16 tokens");
  require(head_dim < (int64_t{1} << 31), "a KV head is too large");
  KvPool shape{nullptr, nullptr, num_blocks, block_size, kv_heads, head_dim, round_up(head_dim, 32), 0};
  shape.block_stride = checked_mul(checked_mul(block_elements(shape), layers), 2);
  return shape;
}

}  // namespace

KvPools::KvPools(int64_t layers, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim)
    : layers_(layers),
      shape_(shape_of(layers, num_blocks, block_size, kv_heads, head_dim)),
      block_elements_(block_elements(shape_)),
      memory_(checked_mul(checked_mul(shape_.block_stride, num_blocks), 2)) {}

KvPool KvPools::pool(int64_t layer) const {
  require(0 <= layer && layer < layers_, "the KV group has no layer " + std::to_string(layer));
  KvPool pool = shape_;
  pool.keys = reinterpret_cast<uint16_t*>(memory_.data()) + layer * 2 * block_elements_;
  pool.values = pool.keys + block_elements_;
  return pool;
}

void KvPools::require_block(int64_t block) const {
  require(0 <= block && block < shape_.num_blocks, "the KV pool has no block " + std::to_string(block));
}

void KvPools::scrub(const std::vector<int64_t>& blocks) {
  for (const int64_t block : blocks) require_block(block);
  const auto bytes = static_cast<size_t>(shape_.block_stride * 2);
  for (const int64_t block : blocks)
    std::memset(memory_.data() + static_cast<size_t>(block) * bytes, 0, bytes);
}

void KvPools::copy(const std::vector<std::pair<int64_t, int64_t>>& blocks) {
  for (const auto& [from, to] : blocks) {
    require_block(from);
    require_block(to);
    require(from != to, "a KV block is copied onto itself");
  }
  const auto bytes = static_cast<size_t>(shape_.block_stride * 2);
  for (const auto& [from, to] : blocks) {
    std::memcpy(memory_.data() + static_cast<size_t>(to) * bytes,
                memory_.data() + static_cast<size_t>(from) * bytes, bytes);
  }
}

}  // namespace enginewright
