// AVX-512 with VNNI (Cascade Lake and later). Members as in simd_portable.h, and what fma.h is made of;
// products of bf16 are two FMAs. To be compiled under the target pragma of an isa_avx512*.cpp or isa_amx.cpp
// alone.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "simd_portable.h"  // ENGINEWRIGHT_INLINE

namespace enginewright {
namespace {

struct Avx512Vnni {
  using F = __m512;
  using Line = __m512i;
  struct Pair {
    __m512 lo, hi;
  };
  using I = __m512i;
  using Bytes4 = __m512i;
  static constexpr int tile_tokens = 6, tile_blocks = 4, gemv_blocks = 8;
  static constexpr int i8_streams[] = {8, 4, 4, 2, 2, 2, 1, 1}, u4_streams[] = {8, 4, 4, 2, 2, 2, 1, 1};
  static constexpr int run_tokens = 7, run_blocks = 2;
  using KeptI8 = void;
  using KeptU4 = void;
  using Pairs = void;

  static ENGINEWRIGHT_INLINE __mmask16 below(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }

  static ENGINEWRIGHT_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  static ENGINEWRIGHT_INLINE F zero() { return _mm512_setzero_ps(); }
  static ENGINEWRIGHT_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static ENGINEWRIGHT_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static ENGINEWRIGHT_INLINE void stream(float* p, F a) { _mm512_stream_ps(p, a); }
  static ENGINEWRIGHT_INLINE F load_first(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(below(n), p);
  }
  static ENGINEWRIGHT_INLINE void store_first(float* p, F a, int64_t n) {
    _mm512_mask_storeu_ps(p, below(n), a);
  }

  static ENGINEWRIGHT_INLINE F widen(__m256i a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(a), 16));
  }
  static ENGINEWRIGHT_INLINE F load_bf16(const uint16_t* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static ENGINEWRIGHT_INLINE F load_bf16_first(const uint16_t* p, int64_t n) {
    return widen(_mm256_maskz_loadu_epi16(below(n), p));
  }
  static ENGINEWRIGHT_INLINE void store_bf16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_bf16(a));
  }
  static ENGINEWRIGHT_INLINE void store_bf16_first(uint16_t* p, F a, int64_t n) {
    _mm256_mask_storeu_epi16(p, below(n), round_bf16(a));
  }

  static ENGINEWRIGHT_INLINE void store_i8(int8_t* p, F a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
  }
  static ENGINEWRIGHT_INLINE void store_i8_first(int8_t* p, F a, int64_t n) {
    _mm_mask_storeu_epi8(p, below(n), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
  }

  static ENGINEWRIGHT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static ENGINEWRIGHT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static ENGINEWRIGHT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static ENGINEWRIGHT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static ENGINEWRIGHT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static ENGINEWRIGHT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static ENGINEWRIGHT_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  static ENGINEWRIGHT_INLINE F abs(F a) { return _mm512_abs_ps(a); }
  static ENGINEWRIGHT_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static ENGINEWRIGHT_INLINE F round(F a) {
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
  static ENGINEWRIGHT_INLINE F scale_pow2(F a, F n) { return _mm512_scalef_ps(a, n); }
  static ENGINEWRIGHT_INLINE F fraction(F x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  }
  static ENGINEWRIGHT_INLINE F scale_pow2_floor(F p, F x) { return _mm512_scalef_ps(p, x); }
  static ENGINEWRIGHT_INLINE F first(int64_t n, F a, F b) { return _mm512_mask_blend_ps(below(n), b, a); }
  static ENGINEWRIGHT_INLINE F where_less(F a, F b, F x, F y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static ENGINEWRIGHT_INLINE float reduce_add(F a) {
    const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static ENGINEWRIGHT_INLINE float reduce_max(F a) {
    const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }

  static ENGINEWRIGHT_INLINE Line load_line(const void* p) { return _mm512_loadu_si512(p); }
  static ENGINEWRIGHT_INLINE void store_line(void* p, Line a) { _mm512_storeu_si512(p, a); }
  static ENGINEWRIGHT_INLINE Pair pair(uint32_t bits) {
    const __m512i both = _mm512_set1_epi32(static_cast<int>(bits));
    return {low_bf16(both), high_bf16(both)};
  }
  static ENGINEWRIGHT_INLINE F dot(F acc, Pair x, Line w) {
    return fma(x.hi, high_bf16(w), fma(x.lo, low_bf16(w), acc));
  }
  static ENGINEWRIGHT_INLINE void prefetch_l2(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
  static ENGINEWRIGHT_INLINE void prefetch(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }

  static ENGINEWRIGHT_INLINE I set1_i(int32_t x) { return _mm512_set1_epi32(x); }
  static ENGINEWRIGHT_INLINE I load_i(const int32_t* p) { return _mm512_loadu_si512(p); }
  static ENGINEWRIGHT_INLINE void store_i(int32_t* p, I a) { _mm512_storeu_si512(p, a); }
  static ENGINEWRIGHT_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static ENGINEWRIGHT_INLINE Bytes4 load_bytes4(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm512_set1_epi32(bytes);
  }
  // VNNI multiplies unsigned bytes by signed ones: weights are larger by 128.
  static ENGINEWRIGHT_INLINE Line load_i8(const void* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  static ENGINEWRIGHT_INLINE I dot_i8(I acc, Line w, Bytes4 x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static ENGINEWRIGHT_INLINE void hold(I&) {}
  static ENGINEWRIGHT_INLINE int32_t excess_i8(const int8_t* p, int64_t n) { return 128 * sum_i8(p, n); }
  static ENGINEWRIGHT_INLINE void expand_u4(const void* p, Line& low, Line& high) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(0x0f);
    low = _mm512_and_si512(both, mask);
    high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
  }
  static ENGINEWRIGHT_INLINE Line lookup16(const uint8_t* table, Line a) {
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(all), a);
  }
  static ENGINEWRIGHT_INLINE I dot_u4(I acc, Line w, Bytes4 x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static ENGINEWRIGHT_INLINE I widen_i8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static ENGINEWRIGHT_INLINE I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static constexpr int byte_bits = 8;
  static ENGINEWRIGHT_INLINE I dot_u(I acc, Line w, Bytes4 x) { return _mm512_dpbusd_epi32(acc, x, w); }
  static ENGINEWRIGHT_INLINE void store_two_bytes(int8_t* p, F a) {
    const __m128i parts = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i parted = _mm512_shuffle_epi8(_mm512_cvtps_epi32(a), _mm512_broadcast_i32x4(parts));
    const __m512i evens = _mm512_setr_epi64(0, 2, 4, 6, 0, 2, 4, 6);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_castsi512_si256(_mm512_permutexvar_epi64(evens, parted)));
  }
  static ENGINEWRIGHT_INLINE int32_t sum_i8(const int8_t* p, int64_t n) {
    const __m256i ones = _mm256_set1_epi8(1);
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 32) {
      const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
      sum = _mm256_dpbusd_epi32(sum, ones, x);
    }
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i pair = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 1);
  }

  using Part = __m512;
  using Bits = __m512i;
  static constexpr int part_floats = 16;
  static constexpr int fma_rows = 12,
                       fma_blocks = 2;  // 24 accumulators, two registers of weights, a broadcast
  static constexpr int few_rows = 8, few_byte_rows = 8;
  static constexpr int64_t fma_chunk = 192;  // 24 KB of weights
  static ENGINEWRIGHT_INLINE Part part_zero() { return _mm512_setzero_ps(); }
  static ENGINEWRIGHT_INLINE Part part_load(const float* p) { return _mm512_loadu_ps(p); }
  static ENGINEWRIGHT_INLINE void part_store(float* p, Part x) { _mm512_storeu_ps(p, x); }
  static ENGINEWRIGHT_INLINE Part part_broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static ENGINEWRIGHT_INLINE Part part_fma(Part x, Part y, Part z) { return _mm512_fmadd_ps(x, y, z); }
  static ENGINEWRIGHT_INLINE Bits load_bits(const std::byte* p) { return _mm512_loadu_si512(p); }
  static ENGINEWRIGHT_INLINE Part low_bf16(Bits pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  }
  static ENGINEWRIGHT_INLINE Part high_bf16(Bits pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static ENGINEWRIGHT_INLINE Bits byte_on_top(Bits words, int k) {
    return _mm512_shuffle_epi8(
        words, _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kByteOnTop[k]))));
  }
  static ENGINEWRIGHT_INLINE Part part_of_words(Bits words) { return _mm512_cvtepi32_ps(words); }
  template <class Code>
  static ENGINEWRIGHT_INLINE Part part_of_fp8(Bits top) {
    const __m512i kept = _mm512_set1_epi32(Code::kKept),
                  bits = _mm512_and_si512(_mm512_srai_epi32(top, Code::kShift), kept);
    return _mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(Code::kFactor));
  }

 private:
  // To nearest even. A NaN stays one, made quiet.
  static ENGINEWRIGHT_INLINE __m256i round_bf16(F x) {
    const __m512i bits = _mm512_castps_si512(x), half = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(half, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet = _mm512_or_si512(half, _mm512_set1_epi32(0x40));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, is_nan, quiet));
  }
};

}  // namespace
}  // namespace enginewright
