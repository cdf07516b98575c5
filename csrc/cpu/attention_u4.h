// Attention of a tile over one split of keys and values of 4 bits: these become bf16 once for all queries of
// a tile, in scratch that stays in L2, and the split's own kernel does the rest.
#pragma once

#include "attention_split.h"
#include "kv.h"

namespace enginewright {
namespace {

// Inner: SplitAttention<S>, or another of bf16 keys and values.
template <class S, class Inner>
class U4Split : public Inner {
 public:
  using Query = typename Inner::Query;
  using Element = uint8_t;
  using Inner::Inner;

  int64_t scratch_bytes() const { return 2 * plane_bytes() + Inner::scratch_bytes(); }

  void run(const TileQueries<Query>& tile, const SplitKv<uint8_t>& kv, const TileScratch& scratch,
           Ahead<S>& ahead, float* partial) const {
    const auto scales = [](const float* pair) { return reinterpret_cast<const uint16_t*>(pair); };
    const int64_t width = this->width();
    auto* keys = reinterpret_cast<uint16_t*>(scratch.own);
    auto* values = reinterpret_cast<uint16_t*>(scratch.own + plane_bytes());
    SplitKv<uint16_t> wide{};
    wide.begin = kv.begin;
    wide.groups = kv.groups;
    for (int64_t g = 0; g < kv.groups; ++g, keys += kGroup * width, values += kGroup * width) {
      wide.keys[g] = keys;
      wide.values[g] = values;
      expand_u4_keys<S>(kv.keys[g], scales(kv.key_scales[g]), width, keys);
      expand_u4_values<S>(kv.values[g], scales(kv.value_scales[g]), width, values);
    }
    wide.set_next(wide);
    TileScratch rest = scratch;
    rest.own += 2 * plane_bytes();
    Inner::run(tile, wide, rest, ahead, partial);
  }

 private:
  int64_t plane_bytes() const { return kSplitPositions * this->width() * 2; }
};

}  // namespace
}  // namespace enginewright
