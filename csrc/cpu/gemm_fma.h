// GEMM by fp32 FMAs: out = x · weightᵀ, weights bf16, i8 or e4m3 (gemm_operands.h has the shapes).
//
// Why not gemm.h: without a dot product of bf16 each line of weights would be expanded again for every few
// tokens, in the registers that the accumulators need.
//
// Up to few_rows tokens, weights pass from memory through registers, a line at a time. With more, weights
// of S::fma_blocks blocks are expanded into L1, a chunk of K at a time, and tiles of tokens pass them
// (fma.h). Between chunks accumulators rest in memory, which rounds nothing: the order of rounding is the
// same everywhere. Runs of K that have scales of their own are chunks.
#pragma once

#include "fma.h"
#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "operands.h"

namespace enginewright {
namespace {

constexpr int64_t kGroupTokens = 128;  // a chunk of x for them, 128 to 160 KB, stays in L2
constexpr int64_t kStripBlocks = 16;   // that pass before x is expanded again

template <class S, class Weights>
class GemmFma {
 public:
  static constexpr DType x_dtype = DType::bf16, weight_dtype = Weights::dtype;
  static constexpr int64_t Work::* operations = &Work::fp32_ops;
  explicit GemmFma(const GemmOperands& g)
      : g_(g),
        finish_(g_),
        k_end_(g_.groups * g_.group < g_.k_pad ? g_.groups * g_.group : g_.k_pad),
        chunk_(chunk_of(g_)) {}

  int64_t scratch_bytes() const {
    const int64_t few = kFew * g_.k_pad;
    const int64_t strip = (kGroupTokens + 16 * kBlocks) * kChunk + kGroupTokens * kStripBlocks * 16;
    return (few > strip ? few : strip) * 4;
  }
  static int64_t passes(int64_t) { return 1; }  // of strips

  void run(int64_t tokens, Range mine, std::byte* own) const {
    const int64_t begin = mine.begin * g_.unit_blocks, end = mine.end * g_.unit_blocks;
    auto* scratch = reinterpret_cast<float*>(own);
    if (tokens <= kFew) {
      expand_rows<S>(x_row(0), g_.x.stride, tokens, g_.k_pad, Weights::x_factor, scratch, g_.k_pad);
      call_few<kFew>(tokens, [&](auto few) { pass_blocks<decltype(few)::rows>(scratch, begin, end); });
      return;
    }
    for (int64_t block = begin; block < end; block += kStripBlocks) {
      const int64_t blocks = end - block < kStripBlocks ? end - block : kStripBlocks;
      int64_t groups = (tokens + kGroupTokens - 1) / kGroupTokens;  // of nearly the same size
      for (int64_t row = 0, rows; row < tokens; row += rows, --groups) {
        rows = (tokens - row + groups - 1) / groups;
        run_strip(row, rows, block, blocks, scratch);
      }
    }
  }

 private:
  using F = typename S::F;
  static constexpr int kBlocks = S::fma_blocks, kFew = few_rows<S, Weights>;
  static constexpr int64_t kChunk =  // of K, at most
      S::fma_chunk > GemmOperands::kLongestBf16Group ? S::fma_chunk : GemmOperands::kLongestBf16Group;

  static int64_t chunk_of(const GemmOperands& g) {
    if (g.run_scale != nullptr) return g.group;
    const int64_t chunks = (g.k_pad + S::fma_chunk - 1) / S::fma_chunk;
    return round_up((g.k_pad + chunks - 1) / chunks, 16);
  }
  const uint16_t* x_row(int64_t row) const { return g_.x.as<const uint16_t>() + row * g_.x.stride; }
  const std::byte* line(int64_t block, int64_t k) const {
    return g_.block(block) + k / Weights::k_count * 64;
  }

  // M tokens past the blocks [block, end), N at once while there are N, then half as many. x: (M, k_pad)
  template <int M, int N = few_blocks<S, M>>
  void pass_blocks(const float* x, int64_t block, int64_t end) const {
    constexpr int64_t kGroup = N < 2 ? 2 : N;  // an even number: pairs of a gated epilogue stay together
    float sums[kGroup * M * 16];
    for (; block + kGroup <= end; block += kGroup) {
      for (int64_t n = 0; n < kGroup; n += N) pass_tile<M, N>(x, block + n, sums + n * M * 16);
      finish_.blocks(0, M, block, kGroup, sums, M * 16);
    }
    if constexpr (N > 1) {
      if (block < end) pass_blocks<M, N / 2>(x, block, end);
    } else if (block < end) {
      pass_tile<M, 1>(x, block, sums);
      finish_.blocks(0, M, block, 1, sums, M * 16);
    }
  }
  template <int M, int N>
  void pass_tile(const float* x, int64_t block, float* sums) const {  // sums: (N, M, 16)
    Lines<N> lines{{}, 64, (N - 1) * g_.block_bytes};
    for (int n = 0; n < N; ++n) lines.first[n] = g_.block(block + n);
    if (g_.run_scale == nullptr) {
      return few_tile<S, Weights, M, N>(x, g_.k_pad, lines, g_.k_pad, true, {sums, 16, M * 16});
    }
    for (int64_t k = 0; k < k_end_; k += g_.group) {
      const int64_t count = k_end_ - k < g_.group ? k_end_ - k : g_.group;
      float run[N * M * 16];
      for (int n = 0; n < N; ++n) lines.first[n] = line(block + n, k);
      few_tile<S, Weights, M, N>(x + k, g_.k_pad, lines, count, true, {run, 16, M * 16});
      for (int n = 0; n < N; ++n) add_run(run + n * M * 16, M, block + n, k, sums + n * M * 16);
    }
  }

  // sums (rows, 16) = themselves, or zeros, + run * its scales; of a block and the run from k on
  void add_run(const float* run, int64_t rows, int64_t block, int64_t k, float* sums) const {
    const F scale = S::load(g_.run_scale + (block * g_.groups + k / g_.group) * 16);
    for (int64_t m = 0; m < rows; ++m, run += 16, sums += 16) {
      const F before = k == 0 ? S::zero() : S::load(sums);
      S::store(sums, S::fma(S::load(run), scale, before));
    }
  }

  // `rows` tokens from `row` past `blocks` blocks from `block`. scratch: x (rows, kChunk), weights of kBlocks
  // blocks (chunk, 16), accumulators (blocks, rows, 16).
  void run_strip(int64_t row, int64_t rows, int64_t block, int64_t blocks, float* scratch) const {
    float* const x = scratch;
    float* const weights = x + kGroupTokens * kChunk;
    float* const acc = weights + 16 * kBlocks * kChunk;
    for (int64_t at = 0; at < k_end_; at += chunk_) {
      const int64_t count = k_end_ - at < chunk_ ? k_end_ - at : chunk_;
      expand_rows<S>(x_row(row) + at, g_.x.stride, rows, count, Weights::x_factor, x, kChunk);
      pass_chunk<kBlocks>(x, rows, at, count, block, 0, blocks, weights, acc);
    }
    finish_.blocks(row, rows, block, blocks, acc, rows * 16);
  }

  // A chunk of x past the blocks n … blocks - 1 after `block`, N at once while there are N.
  template <int N>
  void pass_chunk(const float* x, int64_t rows, int64_t at, int64_t count, int64_t block, int64_t n,
                  int64_t blocks, float* weights, float* acc) const {
    for (; n + N <= blocks; n += N) {
      for (int i = 0; i < N; ++i) {
        expand_lines<S, Weights>(line(block + n + i, at), 64, count, weights + i * 16 * kChunk);
      }
      const Expanded expanded{weights, count, 16 * kChunk};
      const std::byte* next = n + N < blocks ? line(block + n + N, at) : line(block, at + count);
      const Next fetched{next, g_.block_bytes, 0};
      const int64_t bytes = count / Weights::k_count * 64;
      float* const sums = acc + n * rows * 16;
      if (g_.run_scale == nullptr) {
        fma_rows<S, N, kChunk, true>(x, rows, expanded, at == 0, {sums, 16, rows * 16}, fetched, bytes);
        continue;
      }
      float run[N * kGroupTokens * 16];
      fma_rows<S, N, kChunk, true>(x, rows, expanded, true, {run, 16, rows * 16}, fetched, bytes);
      for (int i = 0; i < N; ++i) {
        add_run(run + i * rows * 16, rows, block + n + i, at, sums + i * rows * 16);
      }
    }
    if constexpr (N > 1) {
      if (n < blocks) pass_chunk<N / 2>(x, rows, at, count, block, n, blocks, weights, acc);
    }
  }

  const GemmOperands& g_;
  const Finish<S> finish_;
  const int64_t k_end_, chunk_;
};

}  // namespace
}  // namespace enginewright
