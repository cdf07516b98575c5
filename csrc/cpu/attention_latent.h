// Attention of a tile over one split of latent vectors, whose first columns are the values
// (arXiv:2405.04434).
//
// The plane lies as keys do. What multiplies values wants them in pairs of positions, so a split's are laid
// out again in scratch that stays in L2, once for all the queries of a tile, and the split's own kernel does
// the rest.
#pragma once

#include "attention_split.h"

namespace enginewright {
namespace {

// Inner: SplitAttention<S>, or another of bf16 keys and values.
template <class S, class Inner>
class LatentSplit : public Inner {
 public:
  using Query = typename Inner::Query;
  using Element = typename Inner::Element;
  using Inner::Inner;
  static constexpr bool latent = true;

  int64_t scratch_bytes() const { return values_bytes() + Inner::scratch_bytes(); }

  void run(const TileQueries<Query>& tile, const SplitKv<Element>& kv, const TileScratch& scratch,
           Ahead<S>& ahead, float* partial) const {
    auto* values = reinterpret_cast<Element*>(scratch.own);
    SplitKv<Element> laid_out = kv;
    for (int64_t g = 0; g < kv.groups; ++g) {
      laid_out.values[g] = values + g * kGroup * this->width();
      lay_out(kv.keys[g], values + g * kGroup * this->width());
    }
    TileScratch rest = scratch;
    rest.own += values_bytes();
    Inner::run(tile, laid_out, rest, ahead, partial);
  }

 private:
  int64_t values_bytes() const {
    return kSplitPositions * this->width() * static_cast<int64_t>(sizeof(Element));
  }

  // A group of 16 positions: [width / 2][16][2 columns] to [8][width][2 positions].
  void lay_out(const Element* keys, Element* values) const {
    for (int64_t column = 0; column < this->width(); column += 2, keys += 2 * kGroup) {
      for (int64_t pair = 0; pair < kGroup / 2; ++pair) {
        uint64_t word;  // two positions' two columns; those in the middle change places
        std::memcpy(&word, keys + 4 * pair, 8);
        word = (word & 0xffff00000000ffffu) | (word & 0xffff0000u) << 16 | (word >> 16 & 0xffff0000u);
        std::memcpy(values + 2 * (pair * this->width() + column), &word, 8);
      }
    }
  }
};

}  // namespace
}  // namespace enginewright
