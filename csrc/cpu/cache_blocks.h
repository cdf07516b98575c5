// The blocks of a paged cache: all planes of all its layers (kernel.h: CachePlane).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernel.h"
#include "memory.h"

namespace enginewright {

// What a plane has of each token: PagedCache.planes in enginewright/plan.py.
struct PlaneSpec {
  std::string name;
  int64_t heads, dim;
  DType dtype;
};

class CacheBlocks {
 public:
  // std::invalid_argument for sizes that are no sizes; std::bad_alloc.
  CacheBlocks(int64_t layers, int64_t num_blocks, int64_t block_size, const std::vector<PlaneSpec>& planes);

  int64_t bytes() const { return memory_.bytes(); }
  int64_t num_blocks() const { return num_blocks_; }
  int64_t block_bytes() const { return layers_ * layer_bytes_; }
  std::byte* data() const { return memory_.data(); }
  // layer: index in the group. std::invalid_argument for a plane that is not there.
  CachePlane plane(int64_t layer, const std::string& name) const;
  // Zeroes blocks in all layers (std::invalid_argument for one that is not there).
  void scrub(const std::vector<int64_t>& blocks);
  // Copies blocks in all layers, pair by pair: from the first to the second.
  void copy(const std::vector<std::pair<int64_t, int64_t>>& blocks);

 private:
  struct Plane {
    std::string name;
    CachePlane shape;      // of no layer yet
    int64_t offset_bytes;  // in a layer's part of a block
  };
  void require_block(int64_t block) const;

  const int64_t layers_, num_blocks_;
  int64_t layer_bytes_ = 0;  // of a layer in a block
  std::vector<Plane> planes_;
  Memory memory_;  // [num_blocks][layers][planes][heads][tile_bytes], committed block by block
};

}  // namespace enginewright
