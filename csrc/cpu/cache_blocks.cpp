#include "cache_blocks.h"

#include "kv.h"
#include "operands.h"

namespace enginewright {

namespace {

CachePlane shape_of(int64_t num_blocks, int64_t block_size, const PlaneSpec& spec) {
  const std::string the = "the plane '" + spec.name + "' ";
  require(spec.heads > 0 && spec.dim > 0, the + "has no size");
  require(spec.dim < (int64_t{1} << 31), "a head of " + the + "is too large");
  CachePlane plane{};
  plane.dtype = spec.dtype;
  plane.num_blocks = num_blocks;
  plane.block_size = block_size;
  plane.heads = spec.heads;
  plane.dim = spec.dim;
  plane.dim_pad = round_up(spec.dim, 32);
  plane.number_bytes = bytes_of(spec.dtype, plane.dim_pad);
  plane.scale_bytes = kv_scale_bytes(spec.dtype, plane.dim_pad);
  require(plane.scale_bytes >= 0, the + "cannot hold " + name_of(spec.dtype));
  plane.tile_bytes = checked_mul(block_size, plane.number_bytes + plane.scale_bytes);
  return plane;
}

}  // namespace

CacheBlocks::CacheBlocks(int64_t layers, int64_t num_blocks, int64_t block_size,
                         const std::vector<PlaneSpec>& planes)
    : layers_(layers), places_("paged cache", "block", num_blocks, [&] {
        require(layers > 0 && num_blocks > 0 && !planes.empty(), "a paged cache has no size");
        require(block_size > 0 && block_size % 16 == 0, "a block must hold a multiple of 16 tokens");
        for (const PlaneSpec& spec : planes) {
          planes_.push_back({spec.name, shape_of(num_blocks, block_size, spec), layer_bytes_});
          const CachePlane& plane = planes_.back().shape;
          layer_bytes_ = checked_add(layer_bytes_, checked_mul(plane.tile_bytes, plane.heads));
        }
        return checked_mul(layer_bytes_, layers);
      }()) {}

CachePlane CacheBlocks::plane(int64_t layer, const std::string& name) const {
  require(0 <= layer && layer < layers_, "the paged cache has no layer " + std::to_string(layer));
  for (const Plane& plane : planes_) {
    if (plane.name != name) continue;
    CachePlane found = plane.shape;
    found.data = places_.data() + layer * layer_bytes_ + plane.offset_bytes;
    found.block_stride = places_.place_bytes();
    return found;
  }
  throw std::invalid_argument("the paged cache has no plane '" + name + "'");
}

}  // namespace enginewright
