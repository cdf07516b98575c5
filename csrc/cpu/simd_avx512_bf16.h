// AVX-512 with BF16 and VBMI as well (Zen 4 and later, Sapphire Rapids and later). To be compiled under the
// target pragma of isa_avx512.cpp or isa_amx.cpp alone.
#pragma once

#include "simd_avx512.h"

namespace enginewright {
namespace {

struct Avx512 : Avx512Vnni {
  using Pair = __m512i;

  static ENGINEWRIGHT_INLINE void store_bf16(uint16_t* p, F a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a));
  }
  static ENGINEWRIGHT_INLINE void store_bf16_first(uint16_t* p, F a, int64_t n) {
    _mm256_mask_storeu_epi16(p, below(n), (__m256i)_mm512_cvtneps_pbh(a));
  }
  static ENGINEWRIGHT_INLINE Pair pair(uint32_t bits) { return _mm512_set1_epi32(static_cast<int>(bits)); }
  static ENGINEWRIGHT_INLINE Pair load_pair(const void* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    return pair(bits);
  }
  static ENGINEWRIGHT_INLINE F dot(F acc, Pair a, Line b) {
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
  }
  static ENGINEWRIGHT_INLINE void expand_i8(const void* p, Line& a, Line& b) {
    const __m512i codes = _mm512_loadu_si512(p);
    look_up(kBf16Table<I8>, _mm512_abs_epi8(codes), codes, a, b);
  }
  template <class Code>
  static ENGINEWRIGHT_INLINE void expand_fp8(const void* p, Line& a, Line& b) {
    const __m512i codes = _mm512_loadu_si512(p);
    look_up(kBf16Table<Code>, codes, codes, a, b);
  }

 private:
  // Each byte of `codes` looks up both bytes of its bf16 (VPERMI2B reads 7 bits of it), and gets the sign of
  // `signs`. Of the bytes of a line, k0 … k3 of a row in each of 16 words, unpacking makes words k0 k1 and k2
  // k3 in turn.
  static ENGINEWRIGHT_INLINE void look_up(const Bf16Table& table, __m512i codes, __m512i signs, Line& a,
                                          Line& b) {
    const __m512i low =
        _mm512_permutex2var_epi8(_mm512_load_si512(table.low), codes, _mm512_load_si512(table.low + 64));
    const __m512i unsigned_high =
        _mm512_permutex2var_epi8(_mm512_load_si512(table.high), codes, _mm512_load_si512(table.high + 64));
    const __m512i high = _mm512_ternarylogic_epi32(
        unsigned_high, signs, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // x | y & z
    const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));   // rows 0, 1 of four
    const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));  // rows 2, 3
    a = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0x88));
    b = _mm512_castps_si512(_mm512_shuffle_ps(first, second, 0xdd));
  }
};

}  // namespace
}  // namespace enginewright
