// AVX2 with AVX-VNNI (Intel's cores without AVX-512 from Alder Lake on): products of int8 in one instruction
// instead of three. To be compiled under isa_avx2_vnni.cpp's target pragma alone.
#pragma once

#include "simd_avx2.h"

namespace enginewright {
namespace {

struct Avx2Vnni : Avx2 {
  using Bytes4 = __m256i;
  using KeptI8 = KeptBytes<Avx2Vnni>;
  using KeptU4 = KeptBytes<Avx2Vnni>;
  using Pairs = void;

  // VNNI multiplies unsigned bytes by signed ones: weights are larger by 128.
  static ENGINEWRIGHT_INLINE Line load_i8(const void* p) {
    const Line line = load_line(p);
    const __m256i top = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(line.a, top), _mm256_xor_si256(line.b, top)};
  }
  static ENGINEWRIGHT_INLINE Bytes4 load_bytes4(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return _mm256_set1_epi32(bytes);
  }
  static ENGINEWRIGHT_INLINE I dot_i8(I acc, Line w, Bytes4 x) {
    return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
  }
  static ENGINEWRIGHT_INLINE int32_t excess_i8(const int8_t* p, int64_t n) { return 128 * sum_i8(p, n); }
  static ENGINEWRIGHT_INLINE I dot_u4(I acc, Line w, Bytes4 x) { return dot_i8(acc, w, x); }
  static ENGINEWRIGHT_INLINE I dot_u(I acc, Line w, Bytes4 x) {
    return {_mm256_dpbusd_avx_epi32(acc.a, x, w.a), _mm256_dpbusd_avx_epi32(acc.b, x, w.b)};
  }
};

}  // namespace
}  // namespace enginewright
