#include "cache_blocks.h"

#include <cstring>

#include "operands.h"

namespace enginewright {

namespace {

CachePlane shape_of(int64_t num_blocks, int64_t block_size, const PlaneSpec& spec) {
  const std::string the = "the plane '" + spec.name + "' ";
  require(spec.dtype == DType::bf16 || spec.dtype == DType::i8 || spec.dtype == DType::e4m3,
          the + "holds bf16, i8 or e4m3, not " + name_of(spec.dtype));
  require(spec.heads > 0 && spec.dim > 0, the + "has no size");
  require(spec.dim < (int64_t{1} << 31), "a head of " + the + "is too large");
  CachePlane plane{};
  plane.dtype = spec.dtype;
  plane.num_blocks = num_blocks;
  plane.block_size = block_size;
  plane.heads = spec.heads;
  plane.dim = spec.dim;
  plane.dim_pad = round_up(spec.dim, 32);
  const int64_t row_bytes = plane.dim_pad * bytes_of(spec.dtype) + (plane.scaled() ? 4 : 0);
  plane.tile_bytes = checked_mul(block_size, row_bytes);
  return plane;
}

}  // namespace

CacheBlocks::CacheBlocks(int64_t layers, int64_t num_blocks, int64_t block_size,
                         const std::vector<PlaneSpec>& planes)
    : layers_(layers), num_blocks_(num_blocks), memory_([&] {
        require(layers > 0 && num_blocks > 0 && !planes.empty(), "a paged cache has no size");
        require(block_size > 0 && block_size % 16 == 0, "a block must hold a multiple of 16 tokens");
        for (const PlaneSpec& spec : planes) {
          planes_.push_back({spec.name, shape_of(num_blocks, block_size, spec), layer_bytes_});
          const CachePlane& plane = planes_.back().shape;
          layer_bytes_ = checked_add(layer_bytes_, checked_mul(plane.tile_bytes, plane.heads));
        }
        return checked_mul(checked_mul(layer_bytes_, layers), num_blocks);
      }()) {}

CachePlane CacheBlocks::plane(int64_t layer, const std::string& name) const {
  require(0 <= layer && layer < layers_, "the paged cache has no layer " + std::to_string(layer));
  for (const Plane& plane : planes_) {
    if (plane.name != name) continue;
    CachePlane found = plane.shape;
    found.data = memory_.data() + layer * layer_bytes_ + plane.offset_bytes;
    found.block_stride = block_bytes();
    return found;
  }
  throw std::invalid_argument("the paged cache has no plane '" + name + "'");
}

void CacheBlocks::require_block(int64_t block) const {
  require(0 <= block && block < num_blocks_, "the paged cache has no block " + std::to_string(block));
}

void CacheBlocks::scrub(const std::vector<int64_t>& blocks) {
  for (const int64_t block : blocks) require_block(block);
  const auto bytes = static_cast<size_t>(block_bytes());
  for (const int64_t block : blocks)
    std::memset(memory_.data() + static_cast<size_t>(block) * bytes, 0, bytes);
}

void CacheBlocks::copy(const std::vector<std::pair<int64_t, int64_t>>& blocks) {
  for (const auto& [from, to] : blocks) {
    require_block(from);
    require_block(to);
    require(from != to, "a block is copied onto itself");
  }
  const auto bytes = static_cast<size_t>(block_bytes());
  for (const auto& [from, to] : blocks) {
    std::memcpy(memory_.data() + static_cast<size_t>(to) * bytes,
                memory_.data() + static_cast<size_t>(from) * bytes, bytes);
  }
}

}  // namespace enginewright
