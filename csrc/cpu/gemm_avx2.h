// GEMM for AVX2: out = x · weightᵀ, weights bf16 or i8 (gemm_operands.h has the shapes), by fp32 FMAs.
//
// Why not gemm.h: AVX2 has no dot product of bf16, so that each line of weights would be expanded anew for
// every few tokens, in the registers that the accumulators need. Here everything is fp32 before the inner
// loop, which is then one FMA an accumulator, and the order of rounding is the same everywhere:
// acc = fma(x[k], w[k], acc) for k from 0 up. What pads K adds exact zeros.
//
// Up to kDirectTokens tokens, weights pass from memory through registers, a line at a time. With more, a
// strip of weights is expanded into L2, a chunk of K at a time, and tiles of 6 tokens pass it: 12
// accumulators, two registers of weights and a broadcast. Between chunks accumulators rest in memory, which
// rounds nothing.
//
// i8 weights are expanded as w * 2^24, since a shuffle that puts a byte on top of a word is one instruction
// and sign extension two; x is scaled by 2^-24 to make up for it (exact for |x| >= 2^-118).
#pragma once

#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "operands.h"
#include "simd_avx2.h"

namespace enginewright {
namespace {

// Half a line (kernel.h), 8 rows, as a register of floats for each of its k.
struct Bf16Floats {
  static constexpr DType dtype = DType::bf16;
  static constexpr int k_count = 2;
  static constexpr float x_factor = 1.0f;
  static ENGINEWRIGHT_INLINE void expand(__m256i half, __m256 (&w)[k_count]) {
    w[0] = Avx2::low_bf16(half);
    w[1] = Avx2::high_bf16(half);
  }
};

struct I8Floats {
  static constexpr DType dtype = DType::i8;
  static constexpr int k_count = 4;
  static constexpr float x_factor = 0x1p-24f;
  static ENGINEWRIGHT_INLINE void expand(__m256i half, __m256 (&w)[k_count]) {
    for (int k = 0; k < k_count; ++k) {
      const __m128i top =
          _mm_setr_epi8(-1, -1, -1, static_cast<char>(k), -1, -1, -1, static_cast<char>(k + 4), -1, -1, -1,
                        static_cast<char>(k + 8), -1, -1, -1, static_cast<char>(k + 12));
      w[k] = _mm256_cvtepi32_ps(_mm256_shuffle_epi8(half, _mm256_broadcastsi128_si256(top)));
    }
  }
};

// columns, a multiple of 16, of a row of x.
ENGINEWRIGHT_INLINE void expand_row(const uint16_t* x, int64_t columns, float factor, float* out) {
  for (int64_t i = 0; i < columns; i += 16) {
    Avx2::store(out + i, Avx2::mul(Avx2::load_bf16(x + i), Avx2::set1(factor)));
  }
}

constexpr int kDirectTokens = 3;
constexpr int kTileTokens = 6;
constexpr int64_t kChunk = 320;           // of K: a block's weights and a tile's tokens share L1
constexpr int64_t kStripBlocks = 8;       // 16 rows each; a chunk of them is 160 KB
constexpr int64_t kGroupTokens = 512;     // whose accumulators rest at once
constexpr int64_t kPrefetchBytes = 1024;  // ahead in each block

template <class Weights>
class GemmAvx2 final : public Kernel {
 public:
  GemmAvx2(const Operands& operands, const Attributes& attributes)
      : g_(operands, attributes, Weights::dtype),
        finish_(g_),
        chunks_((g_.k_pad + kChunk - 1) / kChunk),
        chunk_(round_up((g_.k_pad + chunks_ - 1) / chunks_, 16)) {}

  int64_t scratch_bytes() const override {
    const int64_t direct = kDirectTokens * g_.k_pad;
    const int64_t strip =
        kStripBlocks * 16 * kChunk + kTileTokens * kChunk + kGroupTokens * kStripBlocks * 16;
    return (direct > strip ? direct : strip) * 4;
  }

  Work work(const Sizes& sizes) const override { return g_.work(sizes, &Work::fp32_ops); }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t tokens = g_.x.rows.at(sizes);
    const Range mine = share(g_.units, worker);
    const int64_t begin = mine.begin * g_.unit_blocks, end = mine.end * g_.unit_blocks;
    auto* scratch = reinterpret_cast<float*>(worker.scratch);
    if (tokens <= kDirectTokens) {
      for (int64_t m = 0; m < tokens; ++m)
        expand_row(x_row(m), g_.k_pad, Weights::x_factor, scratch + m * g_.k_pad);
      if (tokens == 1) pass_blocks<1, 4>(scratch, begin, end);
      if (tokens == 2) pass_blocks<2, 2>(scratch, begin, end);
      if (tokens == 3) pass_blocks<3, 2>(scratch, begin, end);
      return;
    }
    for (int64_t row = 0; row < tokens; row += kGroupTokens) {
      const int64_t rows = tokens - row < kGroupTokens ? tokens - row : kGroupTokens;
      for (int64_t block = begin; block < end; block += kStripBlocks) {
        run_strip(row, rows, block, end - block < kStripBlocks ? end - block : kStripBlocks, scratch);
      }
    }
  }

 private:
  const uint16_t* x_row(int64_t row) const { return g_.x.as<const uint16_t>() + row * g_.x.stride; }
  static ENGINEWRIGHT_INLINE __m256i load_half(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }

  // M tokens past the blocks [block, end), N at once while there are N, then half as many. N is a power of 2
  // and at least 2, so that the pairs of a gated epilogue are never divided. x: (M, k_pad)
  template <int M, int N>
  void pass_blocks(const float* x, int64_t block, int64_t end) const {
    for (; block + N <= end; block += N) direct_tile<M, N>(x, block);
    if constexpr (N > 1) {
      if (block < end) pass_blocks<M, N / 2>(x, block, end);
    }
  }

  template <int M, int N>
  void direct_tile(const float* x, int64_t block) const {
    Avx2::F acc[M][N];
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) acc[m][n] = Avx2::zero();
    }
    const std::byte* line = g_.block(block);
    for (const std::byte* end = line + g_.block_bytes; line < end; line += 64, x += Weights::k_count) {
      for (int n = 0; n < N; ++n) {
        const std::byte* at = line + n * g_.block_bytes;
        Avx2::prefetch(at + kPrefetchBytes);
        __m256 a[Weights::k_count], b[Weights::k_count];
        Weights::expand(load_half(at), a);
        for (int m = 0; m < M; ++m) {
          for (int k = 0; k < Weights::k_count; ++k) {
            acc[m][n].a = _mm256_fmadd_ps(_mm256_broadcast_ss(x + m * g_.k_pad + k), a[k], acc[m][n].a);
          }
        }
        Weights::expand(load_half(at + 32), b);
        for (int m = 0; m < M; ++m) {
          for (int k = 0; k < Weights::k_count; ++k) {
            acc[m][n].b = _mm256_fmadd_ps(_mm256_broadcast_ss(x + m * g_.k_pad + k), b[k], acc[m][n].b);
          }
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      if constexpr (N % 2 == 0) {
        if (g_.gated()) {
          for (int n = 0; n < N; n += 2) finish_.gated(m, (block + n) / 2, acc[m][n], acc[m][n + 1]);
          continue;
        }
      }
      for (int n = 0; n < N; ++n) finish_.plain(m, block + n, acc[m][n]);
    }
  }

  // `rows` tokens from `row` past `blocks` blocks from `block`. scratch: weights (blocks, chunk, 16), then x
  // (kTileTokens, kChunk), then the accumulators, a tile of tokens after the other, (blocks, tokens, 16)
  // each.
  void run_strip(int64_t row, int64_t rows, int64_t block, int64_t blocks, float* scratch) const {
    float* const weights = scratch;
    float* const x = weights + kStripBlocks * 16 * kChunk;
    float* const accumulators = x + kTileTokens * kChunk;
    for (int64_t at = 0; at < g_.k_pad; at += chunk_) {
      const int64_t count = g_.k_pad - at < chunk_ ? g_.k_pad - at : chunk_;
      for (int64_t n = 0; n < blocks; ++n) expand_block(block + n, at, count, weights + n * 16 * count);
      int64_t tiles = (rows + kTileTokens - 1) / kTileTokens;
      for (int64_t first = 0; first < rows; --tiles) {  // of nearly the same size
        const int64_t tokens = (rows - first + tiles - 1) / tiles;
        float* const acc = accumulators + first * blocks * 16;
        for (int64_t m = 0; m < tokens; ++m) {
          expand_row(x_row(row + first + m) + at, count, Weights::x_factor, x + m * kChunk);
        }
        tile<kTileTokens>(tokens, x, weights, blocks, count, at == 0, acc);
        if (at + count == g_.k_pad) finish(row + first, tokens, block, blocks, acc);
        first += tokens;
      }
    }
  }

  void expand_block(int64_t block, int64_t at, int64_t count, float* out) const {
    const std::byte* line = g_.block(block) + at / Weights::k_count * 64;
    for (int64_t k = 0; k < count; k += Weights::k_count, line += 64, out += 16 * Weights::k_count) {
      for (int half = 0; half < 2; ++half) {
        __m256 w[Weights::k_count];
        Weights::expand(load_half(line + 32 * half), w);
        for (int i = 0; i < Weights::k_count; ++i) _mm256_storeu_ps(out + 16 * i + 8 * half, w[i]);
      }
    }
  }

  template <int M>
  static void tile(int64_t tokens, const float* x, const float* weights, int64_t blocks, int64_t count,
                   bool zero, float* acc) {
    if constexpr (M > 0) {
      if (tokens != M) return tile<M - 1>(tokens, x, weights, blocks, count, zero, acc);
      for (int64_t n = 0; n < blocks; ++n)
        block_tile<M>(x, weights + n * 16 * count, count, zero, acc + n * 16 * M);
    }
  }

  // acc (M, 16) = acc, or zeros, + x (M, count) · weights (count, 16)
  template <int M>
  static void block_tile(const float* x, const float* weights, int64_t count, bool zero, float* acc) {
    Avx2::F sum[M];
    for (int m = 0; m < M; ++m) sum[m] = zero ? Avx2::zero() : Avx2::load(acc + 16 * m);
#pragma GCC unroll 4
    for (int64_t k = 0; k < count; ++k) {
      const Avx2::F w = Avx2::load(weights + 16 * k);
      for (int m = 0; m < M; ++m) {
        const __m256 factor = _mm256_broadcast_ss(x + m * kChunk + k);
        sum[m].a = _mm256_fmadd_ps(factor, w.a, sum[m].a);
        sum[m].b = _mm256_fmadd_ps(factor, w.b, sum[m].b);
      }
    }
    for (int m = 0; m < M; ++m) Avx2::store(acc + 16 * m, sum[m]);
  }

  void finish(int64_t row, int64_t tokens, int64_t block, int64_t blocks, const float* acc) const {
    for (int64_t n = 0; n < blocks; n += g_.unit_blocks, acc += 16 * tokens * g_.unit_blocks) {
      if (g_.gated()) {
        finish_.gated_rows(row, tokens, (block + n) / 2, acc, acc + 16 * tokens);
      } else {
        finish_.plain_rows(row, tokens, block + n, acc);
      }
    }
  }

  const GemmOperands g_;
  const Finish<Avx2> finish_;
  const int64_t chunks_, chunk_;
};

}  // namespace
}  // namespace enginewright
