// A few tokens through a GEMM in the arithmetic of TDPBF16PS, but without tiles: few tokens would leave most
// of a tile empty, and weights of 8 bits need not become tiles first.
//
// What the instruction computes (Intel SDM vol. 2, TDPBF16PS), for each element of C and 32 of K:
//   even = sum of a[2i] b[2i], odd = sum of a[2i+1] b[2i+1], each by 16 fp32 FMAs, i ascending, from zero
//   C = C + (even + odd)
// rounded to nearest even, denormal operands and results taken as zero. Vector FMAs with MXCSR.FTZ and DAZ
// set give the same bits; tests/cpu/test_gemm.py compares them on every machine that has both.
#pragma once

#include "gemm_epilogue.h"
#include "gemm_operands.h"
#include "simd_avx512_bf16.h"

namespace enginewright {
namespace {

// TDPBF16PS knows no denormals; for as long as this lives, neither do vector instructions.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFtz | kDaz); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFtz = 0x8000, kDaz = 0x0040;
  const unsigned saved_;
};

// A line of weights as fp32: kWidth vectors, one for each k in it.
struct Bf16Floats {
  static constexpr int kWidth = 2;
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, __m512* f) {
    const __m512i line = _mm512_loadu_si512(p);
    f[0] = _mm512_castsi512_ps(_mm512_slli_epi32(line, 16));
    f[1] = _mm512_castsi512_ps(_mm512_and_si512(line, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
};

struct I8Floats {
  static constexpr int kWidth = 4;
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, __m512* f) {
    const __m512i line = _mm512_loadu_si512(p);
    f[0] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(line, 24), 24));
    f[1] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(line, 16), 24));
    f[2] = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(line, 8), 24));
    f[3] = _mm512_cvtepi32_ps(_mm512_srai_epi32(line, 24));
  }
};

struct E4m3Floats {
  static constexpr int kWidth = 4;
  static ENGINEWRIGHT_INLINE void load(const std::byte* p, __m512* f) {
    __m512i lines[2];
    Avx512::expand_fp8<E4m3>(p, lines[0], lines[1]);
    for (int i = 0; i < 2; ++i) {
      f[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(lines[i], 16));
      f[2 * i + 1] =
          _mm512_castsi512_ps(_mm512_and_si512(lines[i], _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }
};

template <class Floats>
class FewTokens {
 public:
  static constexpr int64_t kMaxTokens = 2;  // with more, tiles are faster

  // x: scratch of kMaxTokens * k_pad floats.
  FewTokens(const GemmOperands& g, int64_t tokens, float* x) : g_(g), finish_(g), tokens_(tokens), x_(x) {
    for (int64_t m = 0; m < tokens; ++m) {
      const uint16_t* row = g.x.as<const uint16_t>() + m * g.x.stride;
      for (int64_t k = 0; k < g.k_pad; k += 16)
        Avx512::store(x + m * g.k_pad + k, Avx512::load_bf16(row + k));
    }
  }

  // Blocks [block, end) of weight.
  void run(int64_t block, int64_t end) const {
    if (tokens_ == 1) {
      pass_blocks<1, 8>(block, end);
    } else {
      pass_blocks<2, 4>(block, end);
    }
  }

 private:
  template <int M, int N>
  void pass_blocks(int64_t block, int64_t end) const {
    for (; block + N <= end; block += N) tile<M, N>(block);
    if constexpr (N > 1) {
      if (block < end) pass_blocks<M, N / 2>(block, end);
    }
  }

  template <int M, int N>
  void tile(int64_t block) const {
    constexpr int64_t kLines = 32 / Floats::kWidth, kPrefetchBytes = 1024;
    __m512 c[M][N];
    for (int m = 0; m < M; ++m) {
      for (int n = 0; n < N; ++n) c[m][n] = _mm512_setzero_ps();
    }
    const std::byte* weight = g_.block(block);
    const float* x = x_;
    for (int64_t k = 0; k < g_.k_pad; k += 32) {
      __m512 sum[2][M][N];  // even, odd
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) sum[0][m][n] = sum[1][m][n] = _mm512_setzero_ps();
      }
      for (int64_t line = 0; line < kLines; ++line, weight += 64, x += Floats::kWidth) {
        for (int n = 0; n < N; ++n) {
          const std::byte* p = weight + n * g_.block_bytes;
          __m512 f[Floats::kWidth];
          Avx512::prefetch(p + kPrefetchBytes);
          Floats::load(p, f);
          for (int m = 0; m < M; ++m) {
            for (int i = 0; i < Floats::kWidth; ++i) {
              sum[i % 2][m][n] = _mm512_fmadd_ps(f[i], _mm512_set1_ps(x[m * g_.k_pad + i]), sum[i % 2][m][n]);
            }
          }
        }
      }
      for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) {
          c[m][n] = _mm512_add_ps(c[m][n], _mm512_add_ps(sum[0][m][n], sum[1][m][n]));
        }
      }
    }
    for (int m = 0; m < M; ++m) {
      if constexpr (N % 2 == 0) {
        if (g_.gated()) {
          for (int n = 0; n < N; n += 2) finish_.gated(m, (block + n) / 2, c[m][n], c[m][n + 1]);
          continue;
        }
      }
      for (int n = 0; n < N; ++n) finish_.plain(m, block + n, c[m][n]);
    }
  }

  const GemmOperands& g_;
  const Finish<Avx512> finish_;
  const int64_t tokens_;
  const float* const x_;
};

}  // namespace
}  // namespace enginewright
