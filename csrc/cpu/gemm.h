// GEMM for any instruction set: out = x · weightᵀ, weights bf16, i8 or e4m3 (gemm_operands.h has the shapes).
//
// A tile of M tokens x N blocks of 16 rows keeps its accumulators in registers while K passes once, from 0
// up, by one dot() for every pair of k: each output is one chain of roundings, the same whatever M and N are,
// so that a token's result depends neither on the other tokens nor on the number of threads.
//
// Where runs of K have scales of their own, a run is such a chain, and an output the chain of its runs.
//
// Threads own ranges of blocks. A strip of them, small enough for L2, stays while all tokens pass. Weights of
// 8 bits become bf16 exactly, in registers, or, for many tokens, once a strip into scratch.
#pragma once

#include "bf16_lines.h"
#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "memory.h"
#include "operands.h"

namespace enginewright {
namespace {

// How weights come: from L2, from memory in N streams, or in one.
enum class Source { l2, streams, stream };
constexpr int64_t kPrefetchStreams = 2048, kPrefetchStream = 4096;  // bytes ahead in each

// acc[m][n] = x[m] · `bytes` of block n. x: (M, k_pad) bf16, rows x_stride apart; weight: N blocks,
// block_bytes apart.
template <class S, class Lines, int M, int N, Source source>
ENGINEWRIGHT_INLINE void gemm_tile(const uint16_t* x, int64_t x_stride, const std::byte* weight,
                                   int64_t block_bytes, int64_t bytes, typename S::F (&acc)[M][N]) {
  ENGINEWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    ENGINEWRIGHT_UNROLL
    for (int n = 0; n < N; ++n) acc[m][n] = S::zero();
  }
  for (int64_t at = 0; at < bytes; at += 64, x += 2 * Lines::kPairs) {
    typename S::Line lines[N][Lines::kPairs];
    ENGINEWRIGHT_UNROLL
    for (int n = 0; n < N; ++n) {
      const std::byte* line = weight + n * block_bytes + at;
      if (source == Source::streams) S::prefetch_l2(line + kPrefetchStreams);
      if (source == Source::stream) S::prefetch(line + kPrefetchStream);
      Lines::load(line, lines[n]);
    }
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int p = 0; p < Lines::kPairs; ++p) {
        const typename S::Pair pair = S::load_pair(x + m * x_stride + 2 * p);
        ENGINEWRIGHT_UNROLL
        for (int n = 0; n < N; ++n) acc[m][n] = S::dot(acc[m][n], pair, lines[n][p]);
      }
    }
  }
}

// One strip: `blocks` blocks of weights, of which the first is block `first_block` of the matrix.
template <class S, class Lines>
class Strip {
 public:
  using F = typename S::F;
  Strip(const GemmOperands& g, const std::byte* weight, int64_t block_bytes, int64_t first_block,
        int64_t blocks)
      : g_(g),
        finish_(g),
        weight_(weight),
        block_bytes_(block_bytes),
        first_block_(first_block),
        blocks_(blocks) {}

  void run(int64_t tokens) const {
    if (reads_one_stream() && tokens <= S::tile_tokens) return pass_stream<S::tile_tokens>(tokens);
    if (tokens == 1) return pass_blocks<1, S::gemv_blocks, Source::streams>(0, 0);
    int64_t row = 0;
    for (; row + S::tile_tokens <= tokens; row += S::tile_tokens) {
      pass_blocks<S::tile_tokens, S::tile_blocks, Source::l2>(row, 0);
    }
    pass_rest<S::tile_tokens - 1>(row, tokens - row);
  }

 private:
  template <int M>
  void pass_rest(int64_t row, int64_t tokens) const {
    if constexpr (M > 0) {
      if (tokens == M) return pass_blocks<M, S::tile_blocks, Source::l2>(row, 0);
      pass_rest<M - 1>(row, tokens);
    }
  }

  // Few tokens, M at most, past all blocks, two of which are finished together.
  template <int M>
  void pass_stream(int64_t tokens) const {
    if constexpr (M > 1) {
      if (tokens < M) return pass_stream<M - 1>(tokens);
    }
    pass_blocks<M, 2, Source::stream>(0, 0);
  }

  // M tokens past all blocks from `block`, N at once while there are N, then half as many. N is a power of 2
  // and at least 2, so that the pairs of a gated epilogue, an even number of blocks, are never divided.
  template <int M, int N, Source source>
  void pass_blocks(int64_t row, int64_t block) const {
    // A block of one token is one chain of dots, which two chains hide where a line is two of them.
    constexpr int kAtOnce = source != Source::stream ? N : N > 1 && M == 1 ? Lines::kPairs : 1;
    for (; block + N <= blocks_; block += N) {
      float sums[N][M][16];
      for (int n = 0; n < N; n += kAtOnce) tile<M, kAtOnce, source>(row, block + n, sums + n);
      finish_.blocks(row, M, first_block_ + block, N, sums[0][0], M * 16);
    }
    if constexpr (N > 1) {
      if (block < blocks_) pass_blocks<M, N / 2, source>(row, block);
    }
  }

  template <int M, int N, Source source>
  ENGINEWRIGHT_INLINE void tile(int64_t row, int64_t block, float (*sums)[M][16]) const {
    const uint16_t* x = g_.x.as<const uint16_t>() + row * g_.x.stride;
    const std::byte* weight = weight_ + block * block_bytes_;
    if (g_.run_scale != nullptr) return sum_runs<M, N, source>(x, weight, block, sums);
    F acc[M][N];
    gemm_tile<S, Lines, M, N, source>(x, g_.x.stride, weight, block_bytes_, block_bytes_, acc);
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store(sums[n][m], acc[m][n]);
    }
  }

  template <int M, int N, Source source>
  void sum_runs(const uint16_t* x, const std::byte* weight, int64_t block, float (*sums)[M][16]) const {
    const int64_t run_bytes = g_.group / (2 * Lines::kPairs) * 64;
    const float* scales = g_.run_scale + (first_block_ + block) * g_.groups * 16;
    for (int64_t run = 0; run < g_.groups; ++run, scales += 16) {
      const int64_t at = run * run_bytes, left = block_bytes_ - at;
      F acc[M][N];
      gemm_tile<S, Lines, M, N, source>(x + run * g_.group, g_.x.stride, weight + at, block_bytes_,
                                        left < run_bytes ? left : run_bytes, acc);
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        const F scale = S::load(scales + n * g_.groups * 16);
        ENGINEWRIGHT_UNROLL
        for (int m = 0; m < M; ++m) {
          const F before = run == 0 ? S::zero() : S::load(sums[n][m]);
          S::store(sums[n][m], S::fma(acc[m][n], scale, before));
        }
      }
    }
  }

  const GemmOperands& g_;
  const Finish<S> finish_;
  const std::byte* const weight_;
  const int64_t block_bytes_, first_block_, blocks_;
};

constexpr int64_t kStripBytes = 512 << 10;  // of bf16 weights, a part of L2
constexpr int64_t kExpandTokens = 16;       // from here on weights of 8 bits are expanded a strip at a time

// Units of a strip whose weights take block_bytes a block: as many as fit, at least two blocks.
inline int64_t strip_units(const GemmOperands& g, int64_t block_bytes) {
  const int64_t blocks = kStripBytes / block_bytes;
  return blocks < 4 ? 4 / g.unit_blocks : blocks / g.unit_blocks;
}

template <class S>
class GemmBf16 {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = DType::bf16;
  static constexpr int64_t Work::* operations = &Work::bf16_ops;
  explicit GemmBf16(const GemmOperands& g) : g_(g) {}

  int64_t scratch_bytes() const { return 0; }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte*) const {
    const int64_t max_units = strip_units(g_, g_.block_bytes);
    for (int64_t unit = mine.begin; unit < mine.end; unit += max_units) {
      const int64_t units = mine.end - unit < max_units ? mine.end - unit : max_units;
      const int64_t block = unit * g_.unit_blocks;
      Strip<S, Bf16Lines<S>>(g_, g_.block(block), g_.block_bytes, block, units * g_.unit_blocks).run(tokens);
    }
  }

 private:
  const GemmOperands& g_;
};

// Lines: how 8 bits become bf16.
template <class S, class Lines>
class Gemm8A16 {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = Lines::kDType;
  static constexpr int64_t Work::* operations = &Work::bf16_ops;
  explicit Gemm8A16(const GemmOperands& g) : g_(g) {}

  int64_t scratch_bytes() const {
    return strip_units(g_, 2 * g_.block_bytes) * g_.unit_blocks * 2 * g_.block_bytes;
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* scratch) const {
    const int64_t max_units = strip_units(g_, 2 * g_.block_bytes);
    for (int64_t unit = mine.begin; unit < mine.end; unit += max_units) {
      const int64_t units = mine.end - unit < max_units ? mine.end - unit : max_units;
      const int64_t block = unit * g_.unit_blocks, blocks = units * g_.unit_blocks;
      if (tokens < kExpandTokens) {
        Strip<S, Lines>(g_, g_.block(block), g_.block_bytes, block, blocks).run(tokens);
        continue;
      }
      expand(g_.block(block), blocks * g_.block_bytes, scratch);
      Strip<S, Bf16Lines<S>>(g_, scratch, 2 * g_.block_bytes, block, blocks).run(tokens);
    }
  }

 private:
  static void expand(const std::byte* from, int64_t bytes, std::byte* to) {
    for (int64_t at = 0; at < bytes; at += 64) {
      typename S::Line lines[2];
      Lines::load(from + at, lines);
      S::store_line(to + 2 * at, lines[0]);
      S::store_line(to + 2 * at + 64, lines[1]);
    }
  }

  const GemmOperands& g_;
};

template <class S>
using GemmW8A16 = Gemm8A16<S, I8Lines<S>>;
template <class S>
using GemmFp8A16 = Gemm8A16<S, Fp8Lines<S, E4m3>>;

}  // namespace
}  // namespace enginewright
