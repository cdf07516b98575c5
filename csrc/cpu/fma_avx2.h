// What GEMM and attention for AVX2 are made of: bf16 and i8 become fp32 once, then tiles of 6 rows pass by
// FMAs alone. A tile has 12 accumulators, two registers of weights and a broadcast: all 16 registers.
//
// The order of rounding is one FMA a k, for k from 0 up: acc = fma(x[k], w[k], acc).
#pragma once

#include "simd_avx2.h"

namespace enginewright {
namespace {

ENGINEWRIGHT_INLINE __m256i load_half(const std::byte* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Byte k of each word, the others zero behind it.
ENGINEWRIGHT_INLINE __m256i byte_on_top(__m256i words, int k) {
  const auto at = [k](int word) { return static_cast<char>(4 * word + k); };
  const __m128i top =
      _mm_setr_epi8(-1, -1, -1, at(0), -1, -1, -1, at(1), -1, -1, -1, at(2), -1, -1, -1, at(3));
  return _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(top));
}

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

// w * 2^24, since a shuffle that puts a byte on top of a word is one instruction and sign extension two; x is
// scaled by 2^-24 to make up for it (exact for |x| >= 2^-118).
struct I8Floats {
  static constexpr DType dtype = DType::i8;
  static constexpr int k_count = 4;
  static constexpr float x_factor = 0x1p-24f;
  static ENGINEWRIGHT_INLINE void expand(__m256i half, __m256 (&w)[k_count]) {
    for (int k = 0; k < k_count; ++k) w[k] = _mm256_cvtepi32_ps(byte_on_top(half, k));
  }
};

// Exponent and fraction where fp32 has them: the value times 2^-120, subnormals too, and a product away from
// being exact (bf16_tables.h says what a code stands for; none of a weight is NaN).
struct E4m3Floats {
  static constexpr DType dtype = DType::e4m3;
  static constexpr int k_count = 4;
  static constexpr float x_factor = 1.0f;
  static ENGINEWRIGHT_INLINE void expand(__m256i half, __m256 (&w)[k_count]) {
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
    for (int k = 0; k < k_count; ++k) {
      const __m256i top = byte_on_top(half, k);
      const __m256i rest = _mm256_srli_epi32(_mm256_andnot_si256(sign, top), 4);
      const __m256i bits = _mm256_or_si256(_mm256_and_si256(sign, top), rest);
      w[k] = _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f));
    }
  }
};

// rows x columns (a multiple of 16) of bf16 times a power of 2.
inline void expand_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t columns, float factor,
                        float* out, int64_t out_stride) {
  for (int64_t m = 0; m < rows; ++m, x += x_stride, out += out_stride) {
    for (int64_t i = 0; i < columns; i += 16) {
      Avx2::prefetch(x + 2 * x_stride + i);  // rows are short, and far apart
      Avx2::store(out + i, Avx2::mul(Avx2::load_bf16(x + i), Avx2::set1(factor)));
    }
  }
}

// Lines of weights, line_bytes apart, for k in [0, count). out: (count, 16)
template <class Weights>
void expand_lines(const std::byte* line, int64_t line_bytes, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += Weights::k_count, line += line_bytes, out += 16 * Weights::k_count) {
    for (int half = 0; half < 2; ++half) {
      __m256 w[Weights::k_count];
      Weights::expand(load_half(line + 32 * half), w);
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < Weights::k_count; ++i) _mm256_storeu_ps(out + 16 * i + 8 * half, w[i]);
    }
  }
}

constexpr int kTileRows = 6;

// Sixteen columns of acc (M rows, acc_stride apart) = acc, or zeros, + x (M, count) · w (count, 16)
template <int M, int64_t x_stride>
void fma_tile(const float* x, const float* w, int64_t count, bool zero, float* acc, int64_t acc_stride) {
  __m256 a[M], b[M];  // not Avx2::F: GCC leaves copies of arrays of structs in memory
  ENGINEWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    a[m] = zero ? _mm256_setzero_ps() : _mm256_loadu_ps(acc + m * acc_stride);
    b[m] = zero ? _mm256_setzero_ps() : _mm256_loadu_ps(acc + m * acc_stride + 8);
  }
  for (int64_t k = 0; k < count; ++k, w += 16) {
    const __m256 w_a = _mm256_loadu_ps(w), w_b = _mm256_loadu_ps(w + 8);
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const __m256 factor = _mm256_broadcast_ss(x + m * x_stride + k);
      a[m] = _mm256_fmadd_ps(factor, w_a, a[m]);
      b[m] = _mm256_fmadd_ps(factor, w_b, b[m]);
    }
  }
  ENGINEWRIGHT_UNROLL
  for (int m = 0; m < M; ++m) {
    _mm256_storeu_ps(acc + m * acc_stride, a[m]);
    _mm256_storeu_ps(acc + m * acc_stride + 8, b[m]);
  }
}

template <int M, int64_t x_stride>
void fma_tile_of(int64_t rows, const float* x, const float* w, int64_t count, bool zero, float* acc,
                 int64_t acc_stride) {
  if constexpr (M > 0) {
    if (rows == M) return fma_tile<M, x_stride>(x, w, count, zero, acc, acc_stride);
    fma_tile_of<M - 1, x_stride>(rows, x, w, count, zero, acc, acc_stride);
  }
}

// The same for any number of rows, in tiles of nearly the same size. What comes next, `next_lines` lines from
// `next` on, is prefetched towards L2 meanwhile.
template <int64_t x_stride>
void fma_rows(const float* x, int64_t rows, const float* w, int64_t count, bool zero, float* acc,
              int64_t acc_stride, const std::byte* next = nullptr, int64_t next_lines = 0) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  const int64_t each = (next_lines + tiles - 1) / tiles;
  for (; rows > 0; --tiles) {
    const int64_t tile = (rows + tiles - 1) / tiles;
    for (int64_t i = 0; i < each; ++i, next += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
    }
    fma_tile_of<kTileRows, x_stride>(tile, x, w, count, zero, acc, acc_stride);
    x += tile * x_stride;
    acc += tile * acc_stride;
    rows -= tile;
  }
}

// Few rows: weights pass from memory through registers instead.
constexpr int kFewRows = 5;
constexpr int64_t kPrefetchBytes = 1024;

// Blocks of 16 columns that M rows pass at once: 8 to 12 accumulators, enough to hide an FMA's latency.
template <int M>
constexpr int few_blocks = M == 1   ? 4
                           : M <= 3 ? 2
                                    : 1;

// Lines of N blocks of weights, each line_bytes apart; behind the end of these lines, those that come next
// stand `jump` bytes further on.
template <int N>
struct Lines {
  const std::byte* first[N];
  int64_t line_bytes, jump;
};

// acc[m * row_stride + n * block_stride + …] = itself, or zeros, + x (M, count) · block n
template <class Weights, int M, int N>
ENGINEWRIGHT_INLINE void few_tile(const float* x, int64_t x_stride, const Lines<N>& lines, int64_t count,
                                  bool zero, float* acc, int64_t row_stride, int64_t block_stride) {
  __m256 sum[2 * N][M];  // a half of a block
  ENGINEWRIGHT_UNROLL
  for (int half = 0; half < 2 * N; ++half) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const float* from = acc + m * row_stride + half / 2 * block_stride + half % 2 * 8;
      sum[half][m] = zero ? _mm256_setzero_ps() : _mm256_loadu_ps(from);
    }
  }
  const int64_t end = count / Weights::k_count * lines.line_bytes;
  for (int64_t at = 0; at < end; at += lines.line_bytes, x += Weights::k_count) {
    const int64_t ahead = at + kPrefetchBytes + (end - at > kPrefetchBytes ? 0 : lines.jump);
    ENGINEWRIGHT_UNROLL
    for (int half = 0; half < 2 * N; ++half) {
      const std::byte* line = lines.first[half / 2];
      if (half % 2 == 0) Avx2::prefetch(line + ahead);
      __m256 w[Weights::k_count];
      Weights::expand(load_half(line + at + half % 2 * 32), w);
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) {
        ENGINEWRIGHT_UNROLL
        for (int k = 0; k < Weights::k_count; ++k) {
          sum[half][m] = _mm256_fmadd_ps(_mm256_broadcast_ss(x + m * x_stride + k), w[k], sum[half][m]);
        }
      }
    }
  }
  ENGINEWRIGHT_UNROLL
  for (int half = 0; half < 2 * N; ++half) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      _mm256_storeu_ps(acc + m * row_stride + half / 2 * block_stride + half % 2 * 8, sum[half][m]);
    }
  }
}

template <int M>
struct Few {
  static constexpr int rows = M;
};

// f(Few<rows>), rows <= kFewRows
template <int M = kFewRows, class Function>
ENGINEWRIGHT_INLINE void call_few(int64_t rows, const Function& f) {
  if constexpr (M > 0) {
    if (rows == M) return f(Few<M>{});
    call_few<M - 1>(rows, f);
  }
}

}  // namespace
}  // namespace enginewright
