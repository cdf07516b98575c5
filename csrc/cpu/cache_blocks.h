// The blocks of a paged cache: all planes of all its layers (kernel.h: CachePlane).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel.h"
#include "places.h"

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

  Places& places() { return places_; }
  // layer: index in the group. std::invalid_argument for a plane that is not there.
  CachePlane plane(int64_t layer, const std::string& name) const;

 private:
  struct Plane {
    std::string name;
    CachePlane shape;      // of no layer yet
    int64_t offset_bytes;  // in a layer's part of a block
  };

  const int64_t layers_;
  int64_t layer_bytes_ = 0;  // of a layer in a block
  std::vector<Plane> planes_;
  Places places_;  // [num_blocks][layers][planes][heads][tile_bytes]
};

}  // namespace enginewright
