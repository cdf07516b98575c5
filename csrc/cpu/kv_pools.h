// K and V of the layers of one KV group (kernel.h: KvPool).
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace enginewright {

class KvPools {
 public:
  // std::invalid_argument for sizes that are no sizes; std::bad_alloc.
  KvPools(int64_t layers, int64_t num_blocks, int64_t block_size, int64_t kv_heads, int64_t head_dim,
          DType dtype);

  int64_t layers() const { return layers_; }
  int64_t bytes() const { return memory_.bytes(); }
  KvPool pool(int64_t layer) const;  // layer: index in the group
  // Zeroes blocks in all layers (std::invalid_argument for one that is not there).
  void scrub(const std::vector<int64_t>& blocks);
  // Copies blocks in all layers, pair by pair: from the first to the second.
  void copy(const std::vector<std::pair<int64_t, int64_t>>& blocks);

 private:
  void require_block(int64_t block) const;

  const int64_t layers_;
  const KvPool shape_;
  Memory memory_;  // [num_blocks][layers][K, V][kv_heads][tile_bytes], committed block by block
};

}  // namespace enginewright
