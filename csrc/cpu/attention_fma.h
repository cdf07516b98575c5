// The products of attention by fp32 FMAs (attention_split.h says what they are for), over KV of bf16 and of
// FP8.
//
// Queries and probabilities become fp32 first. A few rows, as in decoding, then pass keys and values in
// registers; with more, a group of 16 keys, or 16 dims of a split's values, become fp32 once in L1, and the
// rows pass them (fma.h). Either way it is one FMA a product, in ascending order.
#pragma once

#include "attention_i8.h"
#include "attention_split.h"
#include "fma.h"

namespace enginewright {
namespace {

// Floats: Bf16Floats<S> with Element uint16_t, or Fp8Floats with uint8_t.
template <class S, class Floats, class Element>
class SplitAttentionFma : public SplitSoftmax<S, Element> {
 public:
  static constexpr int64_t tile_rows = 24;  // whole register tiles

  SplitAttentionFma(int64_t head_dim, int64_t head_dim_pad, float scale, float softcap)
      : SplitSoftmax<S, Element>(head_dim_pad, scale, softcap), head_dim_(round_up(head_dim, kDepth)) {}

  // Around run()s with `rows` queries, and after all of a thread.
  static void begin(int64_t) {}
  static void end() {}

  // partial: (rows, partial_floats)
  void run(const TileQueries<uint16_t>& tile, const SplitKv<Element>& kv, const TileScratch& scratch,
           Ahead<S>& ahead, float* partial) const {
    float x[tile_rows * kStride];
    for (int64_t dim = 0; dim < head_dim_; dim += kSplitPositions) {
      const int64_t left = head_dim_ - dim, count = left < kSplitPositions ? left : kSplitPositions;
      expand_rows<S>(tile.q + dim, width_, tile.rows, (count + 15) / 16 * 16, 1.0f, x, kStride);
      if (tile.rows <= kFew) {
        call_few<kFew>(tile.rows, [&](auto few) {
          score_few<decltype(few)::rows>(x, kv, 0, dim, count, scratch.scores);
        });
      } else {
        score(x, tile.rows, kv, dim, count, scratch.scores);
      }
    }
    this->softmax(tile, kv, scratch, ahead, partial);
    expand_rows<S>(scratch.p, kSplitPositions, tile.rows, kv.groups * kGroup, 1.0f, x, kStride);
    if (tile.rows <= kFew) {
      call_few<kFew>(tile.rows, [&](auto few) { weigh_few<decltype(few)::rows>(x, kv, 0, partial); });
    } else {
      weigh(x, tile.rows, kv, partial);
    }
  }

 private:
  using SplitSoftmax<S, Element>::width_;
  static constexpr int kFew = few_rows<S, Floats>;
  static constexpr int64_t kDepth = Floats::k_count;        // of a line: along dims, or positions
  static constexpr int64_t kStride = kSplitPositions + 16;  // rows do not share the sets of L1
  static const std::byte* bytes(const Element* p) { return reinterpret_cast<const std::byte*>(p); }
  static void fetch(const std::byte* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64) S::prefetch_l2(p + i);
  }

  // scores (rows, kSplitPositions) += q · k over the dims [dim, dim + count); x: those of q
  static void score(const float* x, int64_t rows, const SplitKv<Element>& kv, int64_t dim, int64_t count,
                    float* scores) {
    float keys[kSplitPositions * 16];
    for (int64_t g = 0; g < kv.groups; ++g) {
      expand_lines<S, Floats>(bytes(kv.keys[g] + dim * kGroup), 64, count, keys);
      fma_rows<S, 1, kStride>(x, rows, {keys, count, 0}, dim == 0, {scores + g * kGroup, kSplitPositions, 0});
    }
  }
  template <int M, int N = few_blocks<S, M>>
  static void score_few(const float* x, const SplitKv<Element>& kv, int64_t g, int64_t dim, int64_t count,
                        float* scores) {
    for (; g + N <= kv.groups; g += N) {
      Lines<N> lines{{}, 64, 0};
      for (int n = 0; n < N; ++n) {
        lines.first[n] = bytes(kv.keys[g + n] + dim * kGroup);
        fetch(bytes(kv.values[g + n] + dim * kGroup), count * kGroup * sizeof(Element));
      }
      few_tile<S, Floats, M, N>(x, kStride, lines, count, dim == 0,
                                {scores + g * kGroup, kSplitPositions, kGroup});
    }
    if constexpr (N > 1) {
      if (g < kv.groups) score_few<M, N / 2>(x, kv, g, dim, count, scores);
    }
  }

  // out (rows, partial_floats) = p · v; x: p
  void weigh(const float* x, int64_t rows, const SplitKv<Element>& kv, float* out) const {
    float values[kSplitPositions * 16];
    for (int64_t dim = 0; dim < width_; dim += 16) {
      for (int64_t g = 0; g < kv.groups; ++g) {
        expand_lines<S, Floats>(bytes(kv.values[g] + dim * kDepth), width_ * 4, kGroup,
                                values + g * kGroup * 16);
      }
      fma_rows<S, 1, kStride>(x, rows, {values, kv.groups * kGroup, 0}, true,
                              {out + dim, partial_floats(width_), 0});
    }
  }
  template <int M, int N = few_blocks<S, M>>
  void weigh_few(const float* x, const SplitKv<Element>& kv, int64_t dim, float* out) const {
    for (; dim + N * 16 <= width_; dim += N * 16) {
      for (int64_t g = 0; g < kv.groups; ++g) {
        Lines<N> lines{{}, width_ * 4, 0};
        for (int n = 0; n < N; ++n) lines.first[n] = bytes(kv.values[g] + (dim + n * 16) * kDepth);
        fetch(bytes(kv.next_keys[g] + dim * kGroup), N * 16 * kGroup * sizeof(Element));
        few_tile<S, Floats, M, N>(x + g * kGroup, kStride, lines, kGroup, g == 0,
                                  {out + dim, partial_floats(width_), 16});
      }
    }
    if constexpr (N > 1) {
      if (dim < width_) weigh_few<M, N / 2>(x, kv, dim, out);
    }
  }

  const int64_t head_dim_;  // with what fills the last line
};

// The Split for each dtype of planes, as DotSplits (attention.h) has them.
template <class S>
struct FmaSplits {
  using Bf16 = SplitAttentionFma<S, Bf16Floats<S>, uint16_t>;
  using I8 = SplitAttentionI8<S>;
  template <class Code>
  using Fp8 = SplitAttentionFma<S, Fp8Floats<S, Code>, uint8_t>;
};

}  // namespace
}  // namespace enginewright
