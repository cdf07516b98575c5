// GEMM with int8 activations on AMX tiles, where runs of K have scales: what gemm_a8.h computes, bit for bit,
// since the sum of a run is exact, and what follows it is fp32 in the same order.
//
// A tile of sums is worth one run: those of a few runs wait in L1, to become fp32, to be scaled, and added in
// registers. That is what limits the whole: next to the tile unit one port is left for vectors of 512 bits,
// so that a run of 64 takes about 50 cycles a tile, of which its product takes 16.
//
// A panel of 32 tokens meets two blocks of weights at a time: 2 A tiles x 2 B tiles. Weights of 4 bits become
// bytes once a strip, which then stays in L2, less their zero: signed, as TDPBSSD wants them.
#pragma once

#include "amx.h"
#include "gemm_a8.h"
#include "gemm_amx.h"

namespace enginewright {
namespace {

template <class Codes>
class GemmA8Amx {
 public:
  static constexpr DType x_dtype = DType::i8, weight_dtype = Codes::dtype;
  static constexpr int64_t Work::* operations = &Work::int8_ops;
  explicit GemmA8Amx(const GemmOperands& g)
      : g_(g),
        few_(g),
        finish_(g),
        step_(g.group % kTileRowBytes == 0 ? kTileRowBytes : kTileRowBytes / 2),
        k_end_(g.groups * g.group < g.k_pad ? g.groups * g.group : g.k_pad) {}

  int64_t scratch_bytes() const {
    const int64_t expanded = kExpands ? strip_units() * g_.unit_blocks * 16 * g_.k_pad : 0;
    return larger(few_.scratch_bytes(), kSumsBytes + scales_bytes() + expanded);
  }

  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    if (tokens <= kFewTokens) return few_.run(tokens, mine, scratch);
    auto* sums = reinterpret_cast<float*>(scratch);
    auto* scales = reinterpret_cast<float*>(scratch + kSumsBytes);
    std::byte* const expanded = scratch + kSumsBytes + scales_bytes();
    const bool single = tokens <= kPanel;
    Panel panel = panel_at(0, tokens, scales, sums);
    const int64_t max_units = single ? 2 / g_.unit_blocks : strip_units();  // for one panel, L1 will do
    for (int64_t unit = mine.begin; unit < mine.end; unit += max_units) {
      const int64_t units = mine.end - unit < max_units ? mine.end - unit : max_units;
      const int64_t first = unit * g_.unit_blocks, blocks = units * g_.unit_blocks;
      if constexpr (kExpands) {
        for (int64_t n = 0; n < blocks; ++n) expand(first + n, expanded + n * 16 * g_.k_pad);
        Amx::written();
      }
      const std::byte* weights = kExpands ? expanded : g_.block(first);
      for (int64_t row = 0; row < tokens; row += kPanel) {
        if (!single) panel = panel_at(row, tokens, scales, sums);
        panel.first = first;
        panel.weights = weights;
        pass(panel, blocks, single);
      }
    }
    Amx::release();
  }

 private:
  using F = Avx512::F;
  static constexpr bool kExpands = Codes::dtype != DType::i8;
  static constexpr int64_t kSumsBytes = 2 * kPanel * kTileRowBytes;
  static constexpr int64_t kRuns = 3;                       // that wait at once, in 12 KB
  static constexpr int kFoldTokens = 8;                     // in registers, of two blocks
  static constexpr int64_t kFewTokens = kExpands ? 31 : 8;  // up to which weights pass without tiles

  // Up to kPanel tokens and a strip, whose first block is `first`.
  struct Panel {
    int64_t row, tokens;
    const std::byte* x;
    const float* scales;                 // of x: (groups, kPanel)
    float* sums;                         // of two blocks: (2, kPanel, 16)
    int64_t first = 0;                   // of the blocks
    const std::byte* weights = nullptr;  // signed bytes, a block every 16 * k_pad
  };
  // Of N blocks and half a panel in one run.
  template <int N>
  using Waiting = int32_t[N][kHalf][16];

  int64_t strip_units() const {
    const int64_t blocks = kAmxStripBytes / (16 * g_.k_pad);
    return blocks < 4 ? 4 / g_.unit_blocks : blocks / g_.unit_blocks;
  }
  int64_t scales_bytes() const { return g_.groups * kPanel * 4; }

  // The panel whose first row is `row`.
  Panel panel_at(int64_t row, int64_t tokens, float* scales, float* sums) const {
    const int64_t rows = tokens - row < kPanel ? tokens - row : kPanel;
    for (int64_t m = 0; m < rows; ++m) {
      const float* of_row = g_.x_scale + (row + m) * g_.x_scale_stride;
      for (int64_t g = 0; g < g_.groups; ++g) scales[g * kPanel + m] = of_row[g];
    }
    return {row, rows, g_.x.data + row * g_.x.stride, scales, sums};
  }

  // Of run g.
  int64_t depth(int64_t g) const {
    const int64_t left = k_end_ - g * g_.group;
    return left < g_.group ? left : g_.group;
  }

  // A block of u4 or e2m1 as signed bytes.
  void expand(int64_t block, std::byte* to) const {
    const std::byte* from = g_.block(block);
    for (int64_t g = 0; g < g_.groups; ++g) {
      __m512i zero = _mm512_set1_epi8(Codes::zero);
      if (g_.group_zero != nullptr) {  // of 16 rows: each four times
        const __m512i rows = Avx512::widen_i8(g_.group_zero + (block * g_.groups + g) * 16);
        const __m512i low = _mm512_and_si512(rows, _mm512_set1_epi32(255));
        zero = _mm512_mullo_epi32(low, _mm512_set1_epi32(0x01010101));
      }
      for (int64_t k = 0, end = depth(g); k < end; k += 8, from += 64, to += 128) {
        typename Codes::Line lines[2];
        Avx512::prefetch(from + kPrefetchBytes);
        Codes::load(from, lines);
        Avx512::store_line(to, _mm512_sub_epi8(lines[0], zero));
        Avx512::store_line(to + 64, _mm512_sub_epi8(lines[1], zero));
      }
    }
  }

  // Tiles: C 0 1 of the panel's first half, 2 3 of its second; A 4 / 5; B 6 7.
  TileConfig config(int64_t tokens) const {
    TileConfig config = tile_config(tokens < kHalf ? tokens : kHalf, tokens < kHalf ? 0 : tokens - kHalf);
    for (const int a : {4, 5}) config.row_bytes[a] = static_cast<uint16_t>(step_);
    for (const int b : {6, 7}) config.rows[b] = static_cast<uint8_t>(step_ / 4);
    return config;
  }

  // A panel past its strip. single: there is no other, so that weights come from memory.
  void pass(const Panel& panel, int64_t blocks, bool single) const {
    Amx::configure(config(panel.tokens));
    int64_t block = 0;
    for (; block + 2 <= blocks; block += 2) {
      single && !kExpands ? meet<2, true>(panel, block) : meet<2, false>(panel, block);
    }
    if (block < blocks) meet<1, false>(panel, block);
  }

  template <int N, bool from_memory>
  void meet(const Panel& panel, int64_t block) const {
    if (panel.tokens > kHalf) {
      add_runs<N, 2, from_memory>(panel, block);
    } else {
      add_runs<N, 1, from_memory>(panel, block);
    }
    finish_.blocks(panel.row, panel.tokens, panel.first + block, N, panel.sums, kPanel * 16);
  }

  template <int N, int halves, bool from_memory>
  void add_runs(const Panel& panel, int64_t block) const {
    alignas(64) Waiting<N> waiting[kRuns][halves];
    for (int64_t g = 0; g < g_.groups; g += kRuns) {
      const int64_t runs = g_.groups - g < kRuns ? g_.groups - g : kRuns;
      for (int64_t i = 0; i < runs; ++i) {
        multiply<N, halves, from_memory>(panel, block, g + i, waiting[i],
                                         i > 0 ? &waiting[i - 1][halves - 1] : nullptr);
      }
      if (halves > 1) store<N, 2>(waiting[runs - 1][halves - 1]);
      fold<N, halves>(panel, block, g, runs, waiting);
    }
  }

  // A store waits for the products before it, so a half is stored while the other one is multiplied: the
  // second half, to `before`, in the run after its own.
  template <int N, int halves, bool from_memory>
  ENGINEWRIGHT_INLINE void multiply(const Panel& panel, int64_t block, int64_t g, Waiting<N> (&now)[halves],
                                    Waiting<N>* before) const {
    const int64_t begin = g * g_.group, end = begin + depth(g);
    const int64_t block_bytes = 16 * g_.k_pad;
    const std::byte* weights = panel.weights + block * block_bytes;
    for (int64_t k = begin; k < end; k += step_) {
      const std::byte* x = panel.x + k;
      if (from_memory) prefetch_ahead(weights, k * 16, block_bytes);
      Amx::load<4>(x, g_.x.stride);
      Amx::load_once<6>(weights + k * 16, kTileRowBytes);
      if (N > 1) Amx::load_once<7>(weights + block_bytes + k * 16, kTileRowBytes);
      if (k == begin) zero<N, 0>();
      I8Product::dot<0, 4, 6>();
      if (N > 1) I8Product::dot<1, 4, 7>();
      if (halves == 1) continue;
      Amx::load<5>(x + kHalf * g_.x.stride, g_.x.stride);
      if (k == begin) {
        if (before != nullptr) store<N, 2>(*before);
        zero<N, 2>();
      }
      I8Product::dot<2, 5, 6>();
      if (N > 1) I8Product::dot<3, 5, 7>();
    }
    store<N, 0>(now[0]);
  }

  template <int N, int C>
  static ENGINEWRIGHT_INLINE void zero() {
    Amx::zero<C>();
    if (N > 1) Amx::zero<C + 1>();
  }
  template <int N, int C>
  static ENGINEWRIGHT_INLINE void store(Waiting<N>& to) {
    Amx::store<C>(to[0], kTileRowBytes);
    if (N > 1) Amx::store<C + 1>(to[N - 1], kTileRowBytes);
  }

  // sums += the runs from g on, scaled, in their order. Rows after the panel's tokens get anything.
  template <int N, int halves>
  ENGINEWRIGHT_INLINE void fold(const Panel& panel, int64_t block, int64_t g, int64_t runs,
                                const Waiting<N> (*waiting)[halves]) const {
    for (int64_t m = 0; m < panel.tokens; m += kFoldTokens) {
      float* const sums = panel.sums + m * 16;
      F acc[N][kFoldTokens];
      each<N>([&](int n, int t) { acc[n][t] = Avx512::load(sums + (n * kPanel + t) * 16); });
      if (g == 0) each<N>([&](int n, int t) { acc[n][t] = Avx512::zero(); });
      for (int64_t i = 0; i < runs; ++i) {
        const float* scales = panel.scales + (g + i) * kPanel + m;
        const int32_t* from = waiting[i][m / kHalf][0][m % kHalf];
        each<N>([&](int n, int t) {
          F sum = Avx512::to_float(Avx512::load_i(from + (n * kHalf + t) * 16));
          if (Codes::scaled) sum = Avx512::mul(sum, weight_scale(panel.first + block + n, g + i));
          acc[n][t] = Avx512::fma(sum, Avx512::set1(scales[t]), acc[n][t]);
        });
      }
      each<N>([&](int n, int t) { Avx512::store(sums + (n * kPanel + t) * 16, acc[n][t]); });
    }
  }

  ENGINEWRIGHT_INLINE F weight_scale(int64_t block, int64_t g) const {
    return Avx512::load_bf16(g_.group_scale + (block * g_.groups + g) * 16);
  }

  template <int N, class Function>
  static ENGINEWRIGHT_INLINE void each(const Function& f) {
    ENGINEWRIGHT_UNROLL
    for (int t = 0; t < kFoldTokens; ++t) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) f(n, t);
    }
  }

  const GemmOperands& g_;
  const GemmA8<Avx512, Codes> few_;
  const Finish<Avx512> finish_;
  const int64_t step_;   // of K, a tile
  const int64_t k_end_;  // of the last run, with zeros that it may need to be whole steps
};

// Where all of K is one run, its sums stay in tiles.
inline std::unique_ptr<Kernel> make_w8a8_amx(const Operands& operands, const Attributes& attributes) {
  if (GemmOperands(operands, attributes, DType::i8, DType::i8).groups == 1) {
    return make_gemm<GemmW8A8Amx>(operands, attributes);
  }
  return make_gemm<GemmA8Amx<I8Codes<Avx512>>>(operands, attributes);
}

}  // namespace
}  // namespace enginewright
