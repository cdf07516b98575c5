// What GEMM and attention are made of where there is no good dot product of bf16: bf16 and i8 become fp32
// once, then tiles of S::fma_rows x S::fma_blocks blocks of 16 columns pass by FMAs alone.
//
// The order of rounding is one FMA a k, for k from 0 up: acc = fma(x[k], w[k], acc).
//
// S offers, in addition to what simd_portable.h says:
//
//   Part, Bits                     a register of part_floats floats, and of as many words
//   part_zero part_load part_store part_broadcast(ptr) part_fma(a, b, c) load_bits
//   low_bf16 high_bf16             of a pair of bf16 in each word, as Part
//   byte_on_top(Bits, k)           byte k of each word on top of it, zeros after
//   part_of_words(Bits)            words as floats
//   part_of_fp8<Code>(Bits)        words with an FP8 on top as floats
//   fma_rows, fma_blocks           a tile whose accumulators fit the registers
//   few_rows, few_byte_rows        of bf16, and of bytes: see below
//   fma_chunk                      of K, whose weights for fma_blocks blocks are to stay in L1
#pragma once

#include "gemm_operands.h"
#include "simd_portable.h"

namespace enginewright {
namespace {

// Registers of 16 columns.
template <class S>
constexpr int parts = 16 / S::part_floats;

// A part of a line (kernel.h), as many rows, as a register of floats for each of its k.
template <class S>
struct Bf16Floats {
  static constexpr DType dtype = DType::bf16;
  static constexpr int k_count = 2;
  static constexpr float x_factor = 1.0f;
  static ENGINEWRIGHT_INLINE void expand(typename S::Bits part, typename S::Part (&w)[k_count]) {
    w[0] = S::low_bf16(part);
    w[1] = S::high_bf16(part);
  }
};

// w * 2^24, since a shuffle that puts a byte on top of a word is one instruction and sign extension two; x is
// scaled by 2^-24 to make up for it (exact for |x| >= 2^-118).
template <class S>
struct I8Floats {
  static constexpr DType dtype = DType::i8;
  static constexpr int k_count = 4;
  static constexpr float x_factor = 0x1p-24f;
  static ENGINEWRIGHT_INLINE void expand(typename S::Bits part, typename S::Part (&w)[k_count]) {
    ENGINEWRIGHT_UNROLL
    for (int k = 0; k < k_count; ++k) w[k] = S::part_of_words(S::byte_on_top(part, k));
  }
};

// Exact (codes.h says what a code stands for; all are finite).
template <class S, class Code>
struct Fp8Floats {
  static constexpr DType dtype = Code::kDType;
  static constexpr int k_count = 4;
  static constexpr float x_factor = 1.0f;
  static ENGINEWRIGHT_INLINE void expand(typename S::Bits part, typename S::Part (&w)[k_count]) {
    ENGINEWRIGHT_UNROLL
    for (int k = 0; k < k_count; ++k) w[k] = S::template part_of_fp8<Code>(S::byte_on_top(part, k));
  }
};

// rows x columns (a multiple of 16) of bf16 times a power of 2.
template <class S>
void expand_rows(const uint16_t* x, int64_t x_stride, int64_t rows, int64_t columns, float factor, float* out,
                 int64_t out_stride) {
  for (int64_t m = 0; m < rows; ++m, x += x_stride, out += out_stride) {
    for (int64_t i = 0; i < columns; i += 16) {
      S::prefetch(x + 2 * x_stride + i);  // rows are short, and far apart
      S::store(out + i, S::mul(S::load_bf16(x + i), S::set1(factor)));
    }
  }
}

// Lines of weights, line_bytes apart, for k in [0, count). out: (count, 16)
template <class S, class Weights>
void expand_lines(const std::byte* line, int64_t line_bytes, int64_t count, float* out) {
  for (int64_t k = 0; k < count; k += Weights::k_count, line += line_bytes, out += 16 * Weights::k_count) {
    ENGINEWRIGHT_UNROLL
    for (int part = 0; part < parts<S>; ++part) {
      typename S::Part w[Weights::k_count];
      Weights::expand(S::load_bits(line + 4 * S::part_floats * part), w);
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < Weights::k_count; ++i) S::part_store(out + 16 * i + S::part_floats * part, w[i]);
    }
  }
}

// Where sums lie: 16 columns of a block together, rows and blocks so many floats apart.
struct Sums {
  float* data;
  int64_t row_stride, block_stride;
  ENGINEWRIGHT_INLINE float* at(int64_t row, int64_t block) const {
    return data + row * row_stride + block * block_stride;
  }
};

// Weights as fp32 (count, 16), the blocks `stride` floats apart.
struct Expanded {
  const float* data;
  int64_t count, stride;
};

// What to prefetch towards L2 meanwhile: of each block, which are `stride` bytes apart, so many bytes for
// each k.
struct Next {
  const std::byte* data = nullptr;
  int64_t stride = 0, step = 0;
};

// M rows and N blocks of `sums` = themselves, or zeros, + x (M, count) · w
template <class S, int M, int N, int64_t x_stride, bool fetch>
void fma_tile(const float* x, const Expanded& w, bool zero, const Sums& sums, Next ahead) {
  constexpr int kParts = parts<S>, kFloats = S::part_floats;
  typename S::Part acc[N * kParts][M];  // not S::F: GCC leaves copies of arrays of structs in memory
  ENGINEWRIGHT_UNROLL
  for (int p = 0; p < N * kParts; ++p) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      acc[p][m] = zero ? S::part_zero() : S::part_load(sums.at(m, p / kParts) + p % kParts * kFloats);
    }
  }
  const float* line = w.data;
  for (int64_t k = 0; k < w.count; ++k, line += 16, ahead.data += ahead.step) {
    for (int n = 0; fetch && n < N; ++n) S::prefetch_l2(ahead.data + n * ahead.stride);
    typename S::Part columns[N * kParts];
    ENGINEWRIGHT_UNROLL
    for (int p = 0; p < N * kParts; ++p) {
      columns[p] = S::part_load(line + p / kParts * w.stride + p % kParts * kFloats);
    }
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      const typename S::Part factor = S::part_broadcast(x + m * x_stride + k);
      ENGINEWRIGHT_UNROLL
      for (int p = 0; p < N * kParts; ++p) acc[p][m] = S::part_fma(factor, columns[p], acc[p][m]);
    }
  }
  ENGINEWRIGHT_UNROLL
  for (int p = 0; p < N * kParts; ++p) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) S::part_store(sums.at(m, p / kParts) + p % kParts * kFloats, acc[p][m]);
  }
}

// The least tile that more rows than few are divided into.
template <class S>
constexpr int min_rows = S::few_byte_rows < S::fma_rows / 2 ? S::few_byte_rows + 1 : (S::fma_rows + 1) / 2;

template <class S, int M, int N, int64_t x_stride, bool fetch>
void fma_tile_of(int64_t rows, const float* x, const Expanded& w, bool zero, const Sums& sums,
                 const Next& ahead) {
  if constexpr (M > min_rows<S>) {
    if (rows < M) return fma_tile_of<S, M - 1, N, x_stride, fetch>(rows, x, w, zero, sums, ahead);
  }
  fma_tile<S, M, N, x_stride, fetch>(x, w, zero, sums, ahead);
}

// The same for more rows than few, in tiles of nearly the same size. `fetch`: they share the `bytes` of
// each block that are to be prefetched from ahead.data on.
template <class S, int N, int64_t x_stride, bool fetch = false>
void fma_rows(const float* x, int64_t rows, const Expanded& w, bool zero, Sums sums, Next ahead = {},
              int64_t bytes = 0) {
  int64_t tiles = (rows + S::fma_rows - 1) / S::fma_rows;
  ahead.step = (bytes + tiles * w.count - 1) / (tiles * w.count);
  for (; rows > 0; --tiles, ahead.data += w.count * ahead.step) {
    const int64_t tile = (rows + tiles - 1) / tiles;
    fma_tile_of<S, S::fma_rows, N, x_stride, fetch>(tile, x, w, zero, sums, ahead);
    x += tile * x_stride;
    sums.data += tile * sums.row_stride;
    rows -= tile;
  }
}

// Few rows: weights pass from memory through registers instead.
template <class S, class Weights>
constexpr int few_rows = Weights::k_count == 4 ? S::few_byte_rows : S::few_rows;
constexpr int64_t kPrefetchBytes = 1024;

// Blocks of 16 columns that M rows pass at once: accumulators enough to hide an FMA's latency.
template <class S, int M>
constexpr int few_blocks = (M == 1   ? 8
                            : M <= 3 ? 4
                                     : 2) /
                           parts<S>;

// Lines of N blocks of weights, each line_bytes apart; after the end of these lines, those that come next
// stand `jump` bytes further on.
template <int N>
struct Lines {
  const std::byte* first[N];
  int64_t line_bytes, jump;
};

// M rows and N blocks of `sums` = themselves, or zeros, + x (M, count) · weights
template <class S, class Weights, int M, int N>
ENGINEWRIGHT_INLINE void few_tile(const float* x, int64_t x_stride, const Lines<N>& lines, int64_t count,
                                  bool zero, const Sums& sums) {
  constexpr int kParts = parts<S>, kFloats = S::part_floats;
  typename S::Part acc[N * kParts][M];
  ENGINEWRIGHT_UNROLL
  for (int p = 0; p < N * kParts; ++p) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) {
      acc[p][m] = zero ? S::part_zero() : S::part_load(sums.at(m, p / kParts) + p % kParts * kFloats);
    }
  }
  const int64_t end = count / Weights::k_count * lines.line_bytes;
  for (int64_t at = 0; at < end; at += lines.line_bytes, x += Weights::k_count) {
    const int64_t ahead = at + kPrefetchBytes + (end - at > kPrefetchBytes ? 0 : lines.jump);
    ENGINEWRIGHT_UNROLL
    for (int p = 0; p < N * kParts; ++p) {
      const std::byte* line = lines.first[p / kParts];
      if (p % kParts == 0) S::prefetch(line + ahead);
      typename S::Part w[Weights::k_count];
      Weights::expand(S::load_bits(line + at + p % kParts * 4 * kFloats), w);
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) {
        ENGINEWRIGHT_UNROLL
        for (int k = 0; k < Weights::k_count; ++k) {
          acc[p][m] = S::part_fma(S::part_broadcast(x + m * x_stride + k), w[k], acc[p][m]);
        }
      }
    }
  }
  ENGINEWRIGHT_UNROLL
  for (int p = 0; p < N * kParts; ++p) {
    ENGINEWRIGHT_UNROLL
    for (int m = 0; m < M; ++m) S::part_store(sums.at(m, p / kParts) + p % kParts * kFloats, acc[p][m]);
  }
}

template <int M>
struct Few {
  static constexpr int rows = M;
};

// f(Few<rows>), rows <= M
template <int M, class Function>
ENGINEWRIGHT_INLINE void call_few(int64_t rows, const Function& f) {
  if constexpr (M > 0) {
    if (rows == M) return f(Few<M>{});
    call_few<M - 1>(rows, f);
  }
}

}  // namespace
}  // namespace enginewright
