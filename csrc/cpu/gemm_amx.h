// GEMM on AMX tiles (Intel SDM vol. 1, ch. 18): the same kernels as gemm.h and gemm_a8.h, for machines with
// TDPBF16PS and TDPBSSD.
//
// A block of r16 weights is a row of AMX B tiles as it lies in memory: 16 lines are 32 of K x 16 rows. A
// tiles are 16 tokens x 32 of K, straight from x; C tiles are 16 tokens x 16 rows in fp32. Every output is
// the chain C += A · B over K in steps of 32, ascending, and what TDPBF16PS adds to an element depends on
// nothing else in the tile: the same bits in each of the shapes below.
//
//   panel of 17 … 32 tokens   2 A tiles x 2 blocks
//   panel of 1 … 16 tokens    1 A tile x 4 blocks
//   1 or 2 tokens in all: gemv_amx.h
//
// Few weights of 8 bits at a time become bf16 in scratch: pieces of K that stay in L1 for few tokens, a strip
// that stays in L2 for many.
#pragma once

#include "amx.h"
#include "gemm.h"
#include "gemm_a8.h"
#include "gemm_kernel.h"
#include "gemv_amx.h"

namespace enginewright {
namespace {

// Tiles 0 … 3 are C, 4 … 7 A and B. `first`, `second`: tokens in the two A tiles, `second` 0 if there is but
// one.
inline TileConfig tile_config(int64_t first, int64_t second) {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.row_bytes[tile] = kTileRowBytes;
    config.rows[tile] = 16;
  }
  const bool two = second > 0;
  for (const int tile : {0, 1, 4}) config.rows[tile] = static_cast<uint8_t>(first);
  for (const int tile : {2, 3}) config.rows[tile] = static_cast<uint8_t>(two ? second : first);
  if (two) config.rows[5] = static_cast<uint8_t>(second);
  return config;
}

constexpr int64_t kPrefetchBytes = 2048;

template <class Lines>
void expand_to_bf16(const std::byte* from, int64_t bytes, std::byte* to) {
  for (int64_t at = 0; at < bytes; at += 64) {
    Avx512::Line lines[2];
    Avx512::prefetch(from + at + kPrefetchBytes);
    Lines::load(from + at, lines);
    Avx512::store_line(to + 2 * at, lines[0]);
    Avx512::store_line(to + 2 * at + 64, lines[1]);
  }
}

// Weights of N blocks as tiles, a piece of K at a time.
template <class P>
struct PlainTiles {
  using Product = P;
  static constexpr int64_t kPieceK = int64_t{1} << 40;  // all of it
  const std::byte* weight;
  int64_t block_bytes;
  template <int N>
  const std::byte* piece(int64_t block, int64_t k, int64_t, int64_t* stride) const {
    *stride = block_bytes;
    return weight + block * block_bytes + k * 16 * Product::kBytes;
  }
};
using Bf16Tiles = PlainTiles<Bf16Product>;

template <class Lines>
struct ExpandedTiles {
  using Product = Bf16Product;
  static constexpr int64_t kPieceK = 64;
  static constexpr int64_t kScratchBytes = 4 * kPieceK * 32;
  const std::byte* weight;
  int64_t block_bytes;
  std::byte* scratch;
  template <int N>
  const std::byte* piece(int64_t block, int64_t k, int64_t depth, int64_t* stride) const {
    *stride = kPieceK * 32;
    for (int n = 0; n < N; ++n) {
      expand_to_bf16<Lines>(weight + (block + n) * block_bytes + k * 16, depth * 16, scratch + n * *stride);
    }
    Amx::written();
    return scratch;
  }
};

// Where a panel of A stays in L1: its rows are cut into pieces of about this, C waiting in scratch.
constexpr int64_t kWideBytes = 1280;
constexpr int64_t kAmxStripBytes = 1 << 19;  // of weights as tiles; these machines have 2 MB of L2

inline int64_t x_row_bytes(const GemmOperands& g) { return g.k_pad * bytes_of(g.x.dtype); }

// Units of a strip.
inline int64_t amx_strip_units(const GemmOperands& g) {
  const int64_t blocks = kAmxStripBytes / (16 * x_row_bytes(g));
  return blocks < 4 ? 4 / g.unit_blocks : blocks / g.unit_blocks;
}

// Of C, for one panel and a strip.
inline int64_t amx_partial_bytes(const GemmOperands& g) {
  return x_row_bytes(g) <= kWideBytes ? 0 : (amx_strip_units(g) * g.unit_blocks + 1) * 2 * kTileBytes;
}

template <class Tiles>
class AmxStrip {
 public:
  // partial: amx_partial_bytes().
  AmxStrip(const GemmOperands& g, const Tiles& tiles, int64_t first_block, int64_t blocks, std::byte* partial)
      : g_(g), finish_(g), tiles_(tiles), first_block_(first_block), blocks_(blocks), partial_(partial) {}

  void run(int64_t tokens) const {
    int64_t row = 0;
    if (tokens >= 32) {
      Amx::configure(tile_config(16, 16));
      for (; row + 32 <= tokens; row += 32) wide(row, 16);
    }
    const int64_t rest = tokens - row;
    if (rest > 16) {
      Amx::configure(tile_config(16, rest - 16));
      wide(row, rest - 16);
    } else if (rest > 0) {
      Amx::configure(tile_config(rest, 0));
      narrow<4>(row, rest, 0);
    }
  }

 private:
  using Product = typename Tiles::Product;
  using Sum = typename Product::Sum;
  static constexpr int64_t kBytes = Product::kBytes, kTileK = kTileRowBytes / kBytes;

  const std::byte* x(int64_t row) const { return g_.x.data + row * g_.x.stride * kBytes; }

  // A panel of 16 + `second` tokens past all blocks.
  void wide(int64_t row, int64_t second) const {
    const int64_t pieces = (x_row_bytes(g_) + kWideBytes - 1) / kWideBytes;
    const int64_t depth = (g_.k_pad / kTileK + pieces - 1) / pieces * kTileK;
    for (int64_t begin = 0; begin < g_.k_pad; begin += depth) {
      const int64_t end = g_.k_pad - begin < depth ? g_.k_pad : begin + depth;
      int64_t block = 0;
      for (; block + 2 <= blocks_; block += 2) wide_tile<2>(row, second, block, begin, end);
      if (block < blocks_) wide_tile<1>(row, second, block, begin, end);
    }
  }

  // 2 x N tiles over [begin, end) of K. Tiles: C 0 1 / 2 3, A 4 / 5, B 6 7.
  template <int N>
  void wide_tile(int64_t row, int64_t second, int64_t block, int64_t begin, int64_t end) const {
    std::byte* const partial = partial_ + block * 2 * kTileBytes;
    if (begin == 0) {
      zero_tiles<N>();
    } else {
      Amx::load<0>(partial, 64);
      Amx::load<2>(partial + kTileBytes, 64);
      if (N == 2) Amx::load<1>(partial + 2 * kTileBytes, 64);
      if (N == 2) Amx::load<3>(partial + 3 * kTileBytes, 64);
    }
    const int64_t x_stride = g_.x.stride * kBytes;
    const std::byte *upper = x(row), *lower = x(row + 16);
    int64_t stride = 0;
    const std::byte* b = tiles_.template piece<N>(block, begin, end - begin, &stride);
    for (int64_t k = begin; k < end; k += kTileK, b += kTileBytes) {
      Amx::load<4>(upper + k * kBytes, x_stride);
      Amx::load_once<6>(b, kTileRowBytes);
      Product::template dot<0, 4, 6>();
      Amx::load<5>(lower + k * kBytes, x_stride);
      Product::template dot<2, 5, 6>();
      if (N == 2) {
        Amx::load_once<7>(b + stride, kTileRowBytes);
        Product::template dot<1, 4, 7>();
        Product::template dot<3, 5, 7>();
      }
    }
    if (end < g_.k_pad) {
      Amx::store<0>(partial, 64);
      Amx::store<2>(partial + kTileBytes, 64);
      if (N == 2) Amx::store<1>(partial + 2 * kTileBytes, 64);
      if (N == 2) Amx::store<3>(partial + 3 * kTileBytes, 64);
      return;
    }
    if (finish_.is_copy(first_block_ + block + N - 1)) {
      const int64_t row_bytes = g_.out.stride * 4;
      std::byte* out = g_.out.data + row * row_bytes + (first_block_ + block) * kTileRowBytes;
      Amx::store<0>(out, row_bytes);
      Amx::store<2>(out + 16 * row_bytes, row_bytes);
      if (N == 2) Amx::store<1>(out + kTileRowBytes, row_bytes);
      if (N == 2) Amx::store<3>(out + 16 * row_bytes + kTileRowBytes, row_bytes);
      return;
    }
    alignas(64) Sum c[4][256];
    Amx::store<0>(c[0], 64);
    Amx::store<2>(c[2], 64);
    if (N == 2) Amx::store<1>(c[1], 64);
    if (N == 2) Amx::store<3>(c[3], 64);
    finish_tiles<N>(c, row, 16, block);
    finish_tiles<N>(c + 2, row + 16, second, block);
  }

  template <int N>
  static ENGINEWRIGHT_INLINE void zero_tiles() {
    Amx::zero<0>();
    Amx::zero<2>();
    if (N > 1) Amx::zero<1>();
    if (N > 1) Amx::zero<3>();
  }

  // A panel of at most 16 tokens past the blocks from `block`; N as in gemm.h's pass_blocks.
  template <int N>
  void narrow(int64_t row, int64_t tokens, int64_t block) const {
    for (; block + N <= blocks_; block += N) narrow_tile<N>(row, tokens, block);
    if constexpr (N > 1) {
      if (block < blocks_) narrow<N / 2>(row, tokens, block);
    }
  }

  // 1 x N tiles. Tiles: C 0 … 3, A 4, B 5 … 7.
  template <int N>
  void narrow_tile(int64_t row, int64_t tokens, int64_t block) const {
    const int64_t x_stride = g_.x.stride * kBytes;
    const std::byte* a = x(row);
    zero_tiles<N>();
    for (int64_t begin = 0; begin < g_.k_pad; begin += Tiles::kPieceK) {
      const int64_t end = g_.k_pad - begin < Tiles::kPieceK ? g_.k_pad : begin + Tiles::kPieceK;
      int64_t stride = 0;
      const std::byte* b = tiles_.template piece<N>(block, begin, end - begin, &stride);
      for (int64_t k = begin; k < end; k += kTileK, b += kTileBytes) {
        Amx::load<4>(a + k * kBytes, x_stride);
        Amx::load_once<5>(b, kTileRowBytes);
        Product::template dot<0, 4, 5>();
        if (N > 1) {
          Amx::load_once<6>(b + stride, kTileRowBytes);
          Product::template dot<1, 4, 6>();
        }
        if (N > 2) {
          Amx::load_once<7>(b + 2 * stride, kTileRowBytes);
          Product::template dot<2, 4, 7>();
          Amx::load_once<5>(b + 3 * stride, kTileRowBytes);
          Product::template dot<3, 4, 5>();
        }
      }
    }
    alignas(64) Sum c[4][256];
    Amx::store<0>(c[0], 64);
    if (N > 1) Amx::store<1>(c[1], 64);
    if (N > 2) Amx::store<2>(c[2], 64);
    if (N > 2) Amx::store<3>(c[3], 64);
    finish_tiles<N>(c, row, tokens, block);
  }

  // c: (N blocks from `block`, 16 tokens, 16)
  template <int N>
  ENGINEWRIGHT_INLINE void finish_tiles(const Sum (*c)[256], int64_t row, int64_t tokens,
                                        int64_t block) const {
    finish_.blocks(row, tokens, first_block_ + block, N, c[0], 256);
  }

  const GemmOperands& g_;
  const Finish<Avx512> finish_;
  const Tiles tiles_;
  const int64_t first_block_, blocks_;
  std::byte* const partial_;
};

// All strips of weights that are tiles as they lie in memory.
template <class Tiles>
void amx_strips(const GemmOperands& g, int64_t tokens, Range mine, std::byte* scratch) {
  const int64_t most = amx_strip_units(g);
  for (int64_t unit = mine.begin; unit < mine.end; unit += most) {
    const int64_t units = mine.end - unit < most ? mine.end - unit : most;
    const int64_t block = unit * g.unit_blocks, blocks = units * g.unit_blocks;
    AmxStrip<Tiles>(g, {g.block(block), g.block_bytes}, block, blocks, scratch).run(tokens);
  }
  Amx::release();
}

template <class Floats>
void few_tokens(const GemmOperands& g, int64_t tokens, Range mine, std::byte* scratch) {
  const FewTokens<Floats> few(g, tokens, reinterpret_cast<float*>(scratch));
  few.run(mine.begin * g.unit_blocks, mine.end * g.unit_blocks);
}

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t few_tokens_bytes(const GemmOperands& g) { return FewTokens<Bf16Floats>::kMost * g.k_pad * 4; }

class GemmBf16Amx {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = DType::bf16;
  static constexpr int64_t Work::* operations = &Work::bf16_ops;
  explicit GemmBf16Amx(const GemmOperands& g) : g_(g) {}

  int64_t scratch_bytes() const { return larger(few_tokens_bytes(g_), amx_partial_bytes(g_)); }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const FlushDenormals flush;
    if (tokens <= FewTokens<Bf16Floats>::kMost) return few_tokens<Bf16Floats>(g_, tokens, mine, scratch);
    amx_strips<Bf16Tiles>(g_, tokens, mine, scratch);
  }

 private:
  const GemmOperands& g_;
};

// Lines, Floats: how 8 bits become bf16, and fp32.
template <class Lines, class Floats>
class Gemm8A16Amx {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = Lines::kDType;
  static constexpr int64_t Work::* operations = &Work::bf16_ops;
  explicit Gemm8A16Amx(const GemmOperands& g) : g_(g) {}

  // Partial results, then a strip as bf16.
  int64_t scratch_bytes() const {
    const int64_t strip = amx_strip_units(g_) * g_.unit_blocks * 2 * g_.block_bytes;
    return larger(few_tokens_bytes(g_),
                  amx_partial_bytes(g_) + larger(strip, ExpandedTiles<Lines>::kScratchBytes));
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const FlushDenormals flush;
    const int64_t most = amx_strip_units(g_);
    if (tokens <= FewTokens<Floats>::kMost) return few_tokens<Floats>(g_, tokens, mine, scratch);
    std::byte* const expanded = scratch + amx_partial_bytes(g_);
    for (int64_t unit = mine.begin; unit < mine.end; unit += most) {
      const int64_t units = mine.end - unit < most ? mine.end - unit : most;
      const int64_t block = unit * g_.unit_blocks, blocks = units * g_.unit_blocks;
      if (tokens <= 16) {
        const ExpandedTiles<Lines> tiles{g_.block(block), g_.block_bytes, expanded};
        AmxStrip<ExpandedTiles<Lines>>(g_, tiles, block, blocks, scratch).run(tokens);
        continue;
      }
      expand_to_bf16<Lines>(g_.block(block), blocks * g_.block_bytes, expanded);
      Amx::written();
      AmxStrip<Bf16Tiles>(g_, {expanded, 2 * g_.block_bytes}, block, blocks, scratch).run(tokens);
    }
    Amx::release();
  }

 private:
  const GemmOperands& g_;
};

// For one run of K: integers are exact in any order, and a few tokens pass as they do without tiles.
class GemmW8A8Amx {
 public:
  static constexpr DType x_dtype = DType::i8, weight_dtype = DType::i8;
  static constexpr int64_t Work::* operations = &Work::int8_ops;
  explicit GemmW8A8Amx(const GemmOperands& g) : g_(g), few_(g) {}

  int64_t scratch_bytes() const { return larger(few_.scratch_bytes(), amx_partial_bytes(g_)); }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    if (tokens <= kFewTokens) return few_.run(tokens, mine, scratch);
    amx_strips<PlainTiles<I8Product>>(g_, tokens, mine, scratch);
  }

 private:
  static constexpr int64_t kFewTokens = Avx512::tile_tokens;
  const GemmOperands& g_;
  const GemmW8A8<Avx512> few_;
};

using GemmW8A16Amx = Gemm8A16Amx<I8Lines<Avx512>, I8Floats>;
using GemmFp8A16Amx = Gemm8A16Amx<E4m3Lines<Avx512>, E4m3Floats>;

// Runs of FP8 that have scales of their own take the way without tiles.
inline std::unique_ptr<Kernel> make_fp8a16_amx(const Operands& operands, const Attributes& attributes) {
  if (GemmOperands(operands, attributes, DType::bf16, DType::e4m3).run_scale != nullptr) {
    return make_gemm<GemmFp8A16<Avx512>>(operands, attributes);
  }
  return make_gemm<GemmFp8A16Amx>(operands, attributes);
}

}  // namespace
}  // namespace enginewright
