// GEMM on AMX tiles (Intel SDM vol. 1, ch. 18): the same kernels as gemm.h and gemm_a8.h, for machines with
// TDPBF16PS and TDPBSSD.
//
// A block of r16 weights is a row of AMX B tiles as it lies in memory: 16 lines are 64 bytes of K x 16 rows.
// A tiles are 16 tokens x 64 bytes of K, C tiles 16 tokens x 16 rows. Every output is the chain C += A · B
// over K in such steps, ascending, and what TDPBF16PS adds to an element depends on nothing else in the tile:
// the same bits however many tokens there are, and however the loops below are cut.
//
// A panel of 32 tokens meets two blocks of weights at a time: 2 A tiles x 2 B tiles. Several panels pass a
// strip of weights that stays in L2, one after the other, a piece of K at a time for which the panel stays in
// L1 while its sums wait. One panel in all passes all of K of two blocks after the other, as they come from
// memory. 1 or 2 tokens in all: gemv_amx.h.
//
// Weights of 8 bits become bf16 in scratch: pieces of K that stay in L1 for one panel, a strip that stays in
// L2 for several.
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

constexpr int64_t kPanel = 32, kHalf = 16;   // tokens
constexpr int64_t kPieceBytes = 1280;        // of a row of x, at most
constexpr int64_t kAmxStripBytes = 1 << 19;  // of weights as tiles; these machines have 2 MB of L2

// Two blocks of weights come from memory, tile by tile, now that `at` bytes after the start of each:
// prefetches what is wanted soon of them, and then of the next two.
ENGINEWRIGHT_INLINE void prefetch_ahead(const std::byte* blocks, int64_t at, int64_t block_bytes) {
  constexpr int64_t kAheadBytes = 8 * kTileBytes;
  const int64_t ahead = at + kAheadBytes;
  const std::byte* tile = blocks + (ahead < block_bytes ? ahead : ahead + block_bytes);
  for (int64_t line = 0; line < kTileBytes; line += 64) {
    Avx512::prefetch_l2(tile + line);
    Avx512::prefetch_l2(tile + block_bytes + line);
  }
}

// How a product is cut: k_pad columns of x, of `bytes` each.
struct AmxCut {
  AmxCut(const GemmOperands& g, int64_t bytes) : row_bytes(g.k_pad * bytes), unit_blocks(g.unit_blocks) {
    const int64_t tiles = row_bytes / kTileRowBytes, pieces = (row_bytes + kPieceBytes - 1) / kPieceBytes;
    piece = (tiles + pieces - 1) / pieces * kTileRowBytes / bytes;
    const int64_t blocks = kAmxStripBytes / (16 * row_bytes);
    strip_units = (blocks < 4 ? 4 : blocks) / unit_blocks;
  }

  int64_t strip_blocks() const { return strip_units * unit_blocks; }
  int64_t strip_bytes() const { return strip_blocks() * 16 * row_bytes; }
  // Scratch: the sums of a strip that wait.
  int64_t sums_bytes() const { return (strip_blocks() + 1) * 2 * kTileBytes; }

  const int64_t row_bytes, unit_blocks;
  int64_t piece;        // columns
  int64_t strip_units;  // of a strip at most
};

// Weights that are tiles as they lie in memory or in scratch, a block every `block_bytes`. from_memory:
// rather than from L2.
template <class P, bool from_memory>
struct PlainTiles {
  using Product = P;
  static constexpr int64_t kPieceK = int64_t{1} << 40;  // all of it
  static constexpr bool kFromMemory = from_memory;
  const std::byte* weight;  // of the strip's first block
  int64_t block_bytes;

  template <int N>
  const std::byte* piece(int64_t block, int64_t k, int64_t, int64_t* stride) const {
    *stride = block_bytes;
    return weight + block * block_bytes + k * 16 * Product::kBytes;
  }
};

// Weights of 8 bits that become tiles in scratch, a piece of K of two blocks at a time.
template <class Lines>
struct ExpandedTiles {
  using Product = Bf16Product;
  static constexpr int64_t kPieceK = 64;
  static constexpr int64_t kScratchBytes = 2 * kPieceK * 32;
  static constexpr bool kFromMemory = false;
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

// A panel of x past the blocks of a strip.
template <class Tiles>
class AmxStrip {
 public:
  AmxStrip(const GemmOperands& g, const Finish<Avx512>& finish, const Tiles& tiles, int64_t first_block,
           int64_t blocks)
      : g_(g), finish_(finish), tiles_(tiles), first_block_(first_block), blocks_(blocks) {}

  struct Panel {
    int64_t row, rows;
    std::byte* sums;  // of the strip's blocks, where they wait
  };

  // A piece of so many columns at a time.
  void pass(const Panel& panel, int64_t piece) const {
    Amx::configure(panel.rows > kHalf ? tile_config(kHalf, panel.rows - kHalf) : tile_config(panel.rows, 0));
    for (int64_t k = 0; k < g_.k_pad; k += piece) {
      const Range now{k, g_.k_pad - k < piece ? g_.k_pad : k + piece};
      int64_t block = 0;
      for (; block + 2 <= blocks_; block += 2) meet<2>(panel, block, now);
      if (block < blocks_) meet<1>(panel, block, now);
    }
  }

 private:
  using Product = typename Tiles::Product;
  using Sum = typename Product::Sum;
  static constexpr int64_t kBytes = Product::kBytes;

  int64_t x_row_bytes() const { return g_.x.stride * kBytes; }

  template <int N>
  void meet(const Panel& panel, int64_t block, Range depth) const {
    if (panel.rows > kHalf) {
      tiles<N, 2>(panel, block, depth);
    } else {
      tiles<N, 1>(panel, block, depth);
    }
  }

  // H x N tiles. Tiles: C 0 1 / 2 3, A 4 / 5, B 6 7.
  template <int N, int H>
  void tiles(const Panel& panel, int64_t block, Range depth) const {
    std::byte* const waiting = panel.sums + block * 2 * kTileBytes;
    const std::byte* const x = g_.x.data + panel.row * x_row_bytes();
    if (depth.begin == 0) {
      zero<N, H>();
    } else {
      load<N, H>(waiting);
    }
    for (int64_t k = depth.begin; k < depth.end;) {
      const int64_t left = depth.end - k, columns = left < Tiles::kPieceK ? left : Tiles::kPieceK;
      int64_t stride = 0;
      const std::byte* b = tiles_.template piece<N>(block, k, columns, &stride);
      add<N, H>(x + k * kBytes, b, stride, columns);
      k += columns;
    }
    if (depth.end < g_.k_pad) return store<N, H>(waiting, 2 * kTileBytes, kTileBytes, kTileRowBytes);
    if (finish_.is_copy(first_block_ + block + N - 1)) {
      const int64_t row_bytes = g_.out.stride * 4;
      std::byte* out = g_.out.data + panel.row * row_bytes + (first_block_ + block) * kTileRowBytes;
      return store<N, H>(out, kTileRowBytes, kHalf * row_bytes, row_bytes);
    }
    alignas(64) Sum c[2][2][256];  // blocks, halves
    store<N, H>(reinterpret_cast<std::byte*>(c), 2 * kTileBytes, kTileBytes, kTileRowBytes);
    finish_.blocks(panel.row, panel.rows, first_block_ + block, N, c[0][0], 512);
  }

  // C += A · B
  template <int N, int H>
  ENGINEWRIGHT_INLINE void add(const std::byte* a, const std::byte* b, int64_t stride,
                               int64_t columns) const {
    const std::byte *const begin = b, *const end = b + columns * 16 * kBytes;
    for (; b != end; a += kTileRowBytes, b += kTileBytes) {
      if (Tiles::kFromMemory && N > 1) prefetch_ahead(begin, b - begin, stride);
      Amx::load_once<6>(b, kTileRowBytes);
      Amx::load<4>(a, x_row_bytes());
      Product::template dot<0, 4, 6>();
      if (N > 1) {
        Amx::load_once<7>(b + stride, kTileRowBytes);
        Product::template dot<1, 4, 7>();
      }
      if (H > 1) {
        Amx::load<5>(a + kHalf * x_row_bytes(), x_row_bytes());
        Product::template dot<2, 5, 6>();
        if (N > 1) Product::template dot<3, 5, 7>();
      }
    }
  }

  template <int N, int H>
  static ENGINEWRIGHT_INLINE void zero() {
    Amx::zero<0>();
    if (N > 1) Amx::zero<1>();
    if (H > 1) Amx::zero<2>();
    if (N > 1 && H > 1) Amx::zero<3>();
  }
  template <int N, int H>
  static ENGINEWRIGHT_INLINE void load(const std::byte* from) {
    Amx::load<0>(from, kTileRowBytes);
    if (N > 1) Amx::load<1>(from + 2 * kTileBytes, kTileRowBytes);
    if (H > 1) Amx::load<2>(from + kTileBytes, kTileRowBytes);
    if (N > 1 && H > 1) Amx::load<3>(from + 3 * kTileBytes, kTileRowBytes);
  }
  template <int N, int H>
  static ENGINEWRIGHT_INLINE void store(std::byte* to, int64_t block_bytes, int64_t half_bytes,
                                        int64_t row_bytes) {
    Amx::store<0>(to, row_bytes);
    if (N > 1) Amx::store<1>(to + block_bytes, row_bytes);
    if (H > 1) Amx::store<2>(to + half_bytes, row_bytes);
    if (N > 1 && H > 1) Amx::store<3>(to + block_bytes + half_bytes, row_bytes);
  }

  const GemmOperands& g_;
  const Finish<Avx512>& finish_;
  const Tiles tiles_;
  const int64_t first_block_, blocks_;
};

// All tokens past all strips. one(block): the tiles from this block on for a single panel; many(block,
// blocks): those of a strip.
template <class Product, class One, class Many>
void amx_strips(const GemmOperands& g, int64_t tokens, Range mine, std::byte* scratch, const One& one,
                const Many& many) {
  const AmxCut cut(g, Product::kBytes);
  const Finish<Avx512> finish(g);
  const bool single = tokens <= kPanel;
  const int64_t max_units = single ? 2 / g.unit_blocks : cut.strip_units;
  for (int64_t unit = mine.begin; unit < mine.end; unit += max_units) {
    const int64_t left = mine.end - unit, block = unit * g.unit_blocks,
                  blocks = (left < max_units ? left : max_units) * g.unit_blocks;
    if (single) {
      AmxStrip<decltype(one(block))>(g, finish, one(block), block, blocks)
          .pass({0, tokens, nullptr}, g.k_pad);
      continue;
    }
    const AmxStrip<decltype(many(block, blocks))> strip(g, finish, many(block, blocks), block, blocks);
    for (int64_t row = 0; row < tokens; row += kPanel) {
      const int64_t rows = tokens - row < kPanel ? tokens - row : kPanel;
      strip.pass({row, rows, scratch}, cut.piece);
    }
  }
  Amx::release();
}

// Weights that are tiles as they lie in memory.
template <class Product>
void amx_stored(const GemmOperands& g, int64_t tokens, Range mine, std::byte* scratch) {
  const auto one = [&](int64_t block) { return PlainTiles<Product, true>{g.block(block), g.block_bytes}; };
  const auto many = [&](int64_t block, int64_t) {
    return PlainTiles<Product, false>{g.block(block), g.block_bytes};
  };
  amx_strips<Product>(g, tokens, mine, scratch, one, many);
}

template <class Floats>
void few_tokens(const GemmOperands& g, int64_t tokens, Range mine, std::byte* scratch) {
  const FewTokens<Floats> few(g, tokens, reinterpret_cast<float*>(scratch));
  few.run(mine.begin * g.unit_blocks, mine.end * g.unit_blocks);
}

inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline int64_t few_tokens_bytes(const GemmOperands& g) {
  return FewTokens<Bf16Floats>::kMaxTokens * g.k_pad * 4;
}

class GemmBf16Amx {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = DType::bf16;
  static constexpr int64_t Work::* operations = &Work::bf16_ops;
  explicit GemmBf16Amx(const GemmOperands& g) : g_(g) {}

  int64_t scratch_bytes() const {
    return larger(few_tokens_bytes(g_), AmxCut(g_, Bf16Product::kBytes).sums_bytes());
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const FlushDenormals flush;
    if (tokens <= FewTokens<Bf16Floats>::kMaxTokens) return few_tokens<Bf16Floats>(g_, tokens, mine, scratch);
    amx_stored<Bf16Product>(g_, tokens, mine, scratch);
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

  int64_t scratch_bytes() const {
    const AmxCut cut(g_, Bf16Product::kBytes);
    return larger(few_tokens_bytes(g_),
                  cut.sums_bytes() + larger(cut.strip_bytes(), Expanded::kScratchBytes));
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const FlushDenormals flush;
    if (tokens <= FewTokens<Floats>::kMaxTokens) return few_tokens<Floats>(g_, tokens, mine, scratch);
    std::byte* const expanded = scratch + AmxCut(g_, Bf16Product::kBytes).sums_bytes();
    const auto one = [&](int64_t block) { return Expanded{g_.block(block), g_.block_bytes, expanded}; };
    const auto many = [&](int64_t block, int64_t blocks) {
      expand_to_bf16<Lines>(g_.block(block), blocks * g_.block_bytes, expanded);
      Amx::written();
      return PlainTiles<Bf16Product, false>{expanded, 2 * g_.block_bytes};
    };
    amx_strips<Bf16Product>(g_, tokens, mine, scratch, one, many);
  }

 private:
  using Expanded = ExpandedTiles<Lines>;
  const GemmOperands& g_;
};

// For one run of K: integers are exact in any order, and a few tokens pass as they do without tiles.
class GemmW8A8Amx {
 public:
  static constexpr DType x_dtype = DType::i8, weight_dtype = DType::i8;
  static constexpr int64_t Work::* operations = &Work::int8_ops;
  explicit GemmW8A8Amx(const GemmOperands& g) : g_(g), few_(g) {}

  int64_t scratch_bytes() const {
    return larger(few_.scratch_bytes(), AmxCut(g_, I8Product::kBytes).sums_bytes());
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    if (tokens <= kFewTokens) return few_.run(tokens, mine, scratch);
    amx_stored<I8Product>(g_, tokens, mine, scratch);
  }

 private:
  static constexpr int64_t kFewTokens = Avx512::tile_tokens;
  const GemmOperands& g_;
  const GemmW8A8<Avx512> few_;
};

using GemmW8A16Amx = Gemm8A16Amx<I8Lines<Avx512>, I8Floats>;
using GemmFp8A16Amx = Gemm8A16Amx<Fp8Lines<Avx512, E4m3>, E4m3Floats>;

// Runs of FP8 that have scales of their own take the way without tiles.
inline std::unique_ptr<Kernel> make_fp8a16_amx(const Operands& operands, const Attributes& attributes) {
  if (GemmOperands(operands, attributes, DType::bf16, DType::e4m3).run_scale != nullptr) {
    return make_gemm<GemmFp8A16<Avx512>>(operands, attributes);
  }
  return make_gemm<GemmFp8A16Amx>(operands, attributes);
}

}  // namespace
}  // namespace enginewright
