// GEMM with int8 weights and int8 activations, for any instruction set (gemm_operands.h has the shapes).
//
// The sum of products is an integer, exact in any order, so that every way through the weights gives the same
// bits, on every instruction set; what follows it is fp32 in one order.
//
//   few tokens   weights pass once, as they come from memory
//   many tokens  a piece of K of a few blocks of weights is copied to where it stays in L1, as dot_i8 wants
//                it; all tokens of a panel pass it, while their sums wait in scratch
//
// Where dot_i8 takes weights that are larger by S::i8_bias, sums begin with -i8_bias * (sum of x).
#pragma once

#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "operands.h"

namespace enginewright {
namespace {

template <class S>
class GemmW8A8 final : public Kernel {
 public:
  GemmW8A8(const Operands& operands, const Attributes& attributes)
      : g_(operands, attributes, DType::i8, DType::i8), finish_(g_) {}

  int64_t scratch_bytes() const override { return kPieceBytes + panel_tokens() * (kBlocks * 64 + 4); }

  Work work(const Sizes& sizes) const override { return g_.work(sizes, &Work::int8_ops); }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t tokens = g_.x.rows.at(sizes), most = panel_tokens();
    const Range mine = share(g_.units, worker);
    const int64_t begin = mine.begin * g_.unit_blocks, end = mine.end * g_.unit_blocks;
    if (tokens <= kTokens) return few<kTokens>(tokens, begin, end);
    for (int64_t row = 0; row < tokens; row += most) {
      const Panel panel = panel_at(row, tokens - row < most ? tokens - row : most, worker.scratch);
      pass_groups<kBlocks>(panel, begin, end);
    }
  }

 private:
  using I = typename S::I;
  static constexpr int kTokens = S::tile_tokens, kBlocks = S::tile_blocks;
  static constexpr int64_t kPieceK = 512;
  static constexpr int64_t kPieceBytes = kBlocks * kPieceK * 16;  // of L1
  static constexpr int64_t kPanelBytes = 1 << 20;                 // of x: a part of L2
  static constexpr int64_t kPrefetchBytes = 1024;                 // ahead in each block

  // Tokens of a panel, a multiple of 16.
  int64_t panel_tokens() const {
    const int64_t fit = round_up(kPanelBytes / g_.k_pad, 16), all = round_up(g_.x.max_rows, 16);
    return all < fit ? all : fit;
  }

  struct Panel {
    int64_t row, tokens;
    std::byte* weights;  // (kPieceK / 4, blocks, 64)
    int32_t* sums;       // (tokens, blocks, 16)
    int32_t* first;      // (tokens): what sums begin with
  };

  Panel panel_at(int64_t row, int64_t tokens, std::byte* scratch) const {
    auto* sums = reinterpret_cast<int32_t*>(scratch + kPieceBytes);
    const Panel panel{row, tokens, scratch, sums, sums + tokens * kBlocks * 16};
    for (int64_t m = 0; m < tokens; ++m) panel.first[m] = first_sum(row + m);
    return panel;
  }

  const int8_t* x(int64_t row) const { return g_.x.as<const int8_t>() + row * g_.x.stride; }
  int32_t first_sum(int64_t row) const {
    return S::i8_bias == 0 ? 0 : -S::i8_bias * S::sum_i8(x(row), g_.k_pad);
  }

  // As many blocks at once as registers hold sums of. Their number is a power of 2, and at least 2 while
  // there are 2 blocks, so that the pairs of a gated epilogue are never divided.
  template <int M>
  void few(int64_t tokens, int64_t block, int64_t end) const {
    if constexpr (M > 1) {
      if (tokens < M) return few<M - 1>(tokens, block, end);
    }
    constexpr bool wide = M * S::gemv_blocks <= kTokens * kBlocks;
    if (tokens == M) pass_blocks<M, wide ? S::gemv_blocks : kBlocks>(block, end);
  }

  template <int M, int N>
  void pass_blocks(int64_t block, int64_t end) const {
    for (; block + N <= end; block += N) direct_tile<M, N>(block);
    if constexpr (N > 1) {
      if (block < end) pass_blocks<M, N / 2>(block, end);
    }
  }

  // The first M tokens past N blocks.
  template <int M, int N>
  void direct_tile(int64_t block) const {
    I acc[M][N];
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const int32_t first = first_sum(m);
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] = S::set1_i(first);
    }
    const std::byte* line = g_.block(block);
    const int8_t* k = x(0);
    for (const std::byte* end = line + g_.block_bytes; line < end; line += 64, k += 4) {
      typename S::Line w[N];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        S::prefetch(line + n * g_.block_bytes + kPrefetchBytes);
        w[n] = S::load_i8(line + n * g_.block_bytes);
      }
      dots<M, N>(k, w, acc);
    }
    write<M, N>(acc, 0, block);
  }

  template <int M, int N>
  ENGINEWRIGHT_INLINE void dots(const int8_t* k, const typename S::Line (&w)[N], I (&acc)[M][N]) const {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const typename S::Bytes4 four = S::load_bytes4(k + m * g_.x.stride);
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) acc[m][n] = S::dot_i8(acc[m][n], w[n], four);
    }
  }

  template <int M, int N>
  ENGINEWRIGHT_INLINE void write(const I (&acc)[M][N], int64_t row, int64_t block) const {
    int32_t sums[N][M][16];
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store_i(sums[n][m], acc[m][n]);
    }
    finish_.blocks(row, M, block, N, sums[0][0], M * 16);
  }

  // All tokens of a panel past the blocks [block, end), N at once while there are N, then half as many.
  template <int N>
  void pass_groups(const Panel& panel, int64_t block, int64_t end) const {
    for (; block + N <= end; block += N) {
      for (int64_t k = 0; k < g_.k_pad; k += kPieceK) {
        const int64_t depth = g_.k_pad - k < kPieceK ? g_.k_pad - k : kPieceK;
        copy<N>(g_.block(block) + k * 16, depth, panel.weights);
        int64_t m = 0;
        for (; m + kTokens <= panel.tokens; m += kTokens) tile<kTokens, N>(panel, m, block, k, depth);
        rest<kTokens - 1, N>(panel, m, block, k, depth);
      }
    }
    if constexpr (N > 1) {
      if (block < end) pass_groups<N / 2>(panel, block, end);
    }
  }

  template <int N>
  void copy(const std::byte* line, int64_t depth, std::byte* to) const {
    for (const std::byte* end = line + depth * 16; line < end; line += 64) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n, to += 64) {
        const std::byte* from = line + n * g_.block_bytes;
        S::prefetch(from + kPrefetchBytes);
        S::store_line(to, S::load_i8(from));
      }
    }
  }

  template <int M, int N>
  void rest(const Panel& panel, int64_t m, int64_t block, int64_t k, int64_t depth) const {
    if constexpr (M > 0) {
      if (panel.tokens - m < M) return rest<M - 1, N>(panel, m, block, k, depth);
      tile<M, N>(panel, m, block, k, depth);
    }
  }

  // Tokens [first, first + M) of the panel, [k, k + depth) of K.
  template <int M, int N>
  void tile(const Panel& panel, int64_t first, int64_t block, int64_t k, int64_t depth) const {
    I acc[M][N];
    int32_t* sums = panel.sums + first * N * 16;
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        acc[m][n] = k == 0 ? S::set1_i(panel.first[first + m]) : S::load_i(sums + (m * N + n) * 16);
      }
    }
    const int8_t* four = x(panel.row + first) + k;
    const std::byte* line = panel.weights;
    for (const std::byte* end = line + depth * N * 16; line < end; line += N * 64, four += 4) {
      typename S::Line w[N];
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) w[n] = S::load_line(line + n * 64);
      dots<M, N>(four, w, acc);
    }
    if (k + depth == g_.k_pad) return write<M, N>(acc, panel.row + first, block);
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) S::store_i(sums + (m * N + n) * 16, acc[m][n]);
    }
  }

  const GemmOperands g_;
  const Finish<S> finish_;
};

}  // namespace
}  // namespace enginewright
