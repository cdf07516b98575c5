// AVX2 with FMA and F16C (Haswell and later, Zen and later): 16 lanes are two registers. Members as in
// simd_portable.h, apart from those that gemm.h and attention_tile.h alone use: fma.h is instead of
// them. To be compiled under the target pragma of an isa_avx2*.cpp alone.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd_portable.h"  // ENGINEWRIGHT_INLINE

namespace enginewright {
namespace {

struct Avx2 {
  struct F {
    __m256 a, b;
  };
  struct Line {
    __m256i a, b;
  };
  struct Pair {
    __m256 lo, hi;
  };
  struct I {
    __m256i a, b;
  };
  struct Bytes4 {
    __m256i all, size, negative;  // themselves, their absolute values, all bits where they are below 0
  };
  static constexpr int tile_tokens = 2, tile_blocks = 2, gemv_blocks = 4;
  static constexpr int i8_streams[] = {8, 4, 2, 1, 1, 1}, u4_streams[] = {4, 2, 2, 1, 1, 1};
  static constexpr int run_tokens = 4, run_blocks = 1;

  static ENGINEWRIGHT_INLINE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static ENGINEWRIGHT_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static ENGINEWRIGHT_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static ENGINEWRIGHT_INLINE void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static ENGINEWRIGHT_INLINE void stream(float* p, F x) {
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
  }
  static ENGINEWRIGHT_INLINE F load_first(const float* p, int64_t n) {
    const Line m = below(n);
    return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
  }
  static ENGINEWRIGHT_INLINE void store_first(float* p, F x, int64_t n) {
    const Line m = below(n);
    _mm256_maskstore_ps(p, m.a, x.a);
    _mm256_maskstore_ps(p + 8, m.b, x.b);
  }

  static ENGINEWRIGHT_INLINE F load_bf16(const uint16_t* p) { return {widen(p), widen(p + 8)}; }
  static ENGINEWRIGHT_INLINE F load_bf16_first(const uint16_t* p, int64_t n) {
    uint16_t lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load_bf16(lanes);
  }
  static ENGINEWRIGHT_INLINE void store_bf16(uint16_t* p, F x) {
    const __m256i packed = _mm256_packus_epi32(round_bf16(x.a), round_bf16(x.b));  // a0 b0 a1 b1
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  static ENGINEWRIGHT_INLINE void store_bf16_first(uint16_t* p, F x, int64_t n) {
    uint16_t lanes[16];
    store_bf16(lanes, x);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
  }

  static ENGINEWRIGHT_INLINE void store_i8(int8_t* p, F x) {
    const __m256i words =
        _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // a0 b0 a1 b1
    const __m256i sorted = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(sorted), _mm256_extracti128_si256(sorted, 1)));
  }
  static ENGINEWRIGHT_INLINE void store_i8_first(int8_t* p, F x, int64_t n) {
    int8_t lanes[16];
    store_i8(lanes, x);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
  }

  static ENGINEWRIGHT_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static ENGINEWRIGHT_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
  static ENGINEWRIGHT_INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
  }
  static ENGINEWRIGHT_INLINE F sqrt(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
  static ENGINEWRIGHT_INLINE F round(F x) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, nearest), _mm256_round_ps(x.b, nearest)};
  }
  static ENGINEWRIGHT_INLINE F scale_pow2(F x, F n) { return {scale_pow2(x.a, n.a), scale_pow2(x.b, n.b)}; }
  static ENGINEWRIGHT_INLINE F fraction(F x) { return sub(max(set1(-160.0f), x), floor(x)); }
  static ENGINEWRIGHT_INLINE F scale_pow2_floor(F p, F x) { return scale_pow2(p, floor(x)); }
  static ENGINEWRIGHT_INLINE F first(int64_t n, F x, F y) {
    const Line m = below(n);
    return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(m.a)),
            _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(m.b))};
  }
  static ENGINEWRIGHT_INLINE F where_less(F a, F b, F x, F y) {
    return {_mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ))};
  }
  static ENGINEWRIGHT_INLINE float reduce_add(F x) {
    const __m256 h = _mm256_add_ps(x.a, x.b);
    const __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
  }
  static ENGINEWRIGHT_INLINE float reduce_max(F x) {
    const __m256 h = _mm256_max_ps(x.a, x.b);
    const __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    const __m128 d = _mm_max_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
  }

  static ENGINEWRIGHT_INLINE Line load_line(const void* p) {
    const auto* half = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(half), _mm256_loadu_si256(half + 1)};
  }
  static ENGINEWRIGHT_INLINE Pair pair(uint32_t bits) {
    const __m256i both = _mm256_set1_epi32(static_cast<int>(bits));
    return {low_bf16(both), high_bf16(both)};
  }
  static ENGINEWRIGHT_INLINE F dot(F acc, Pair x, Line w) {
    acc.a = _mm256_fmadd_ps(x.lo, low_bf16(w.a), acc.a);
    acc.b = _mm256_fmadd_ps(x.lo, low_bf16(w.b), acc.b);
    acc.a = _mm256_fmadd_ps(x.hi, high_bf16(w.a), acc.a);
    acc.b = _mm256_fmadd_ps(x.hi, high_bf16(w.b), acc.b);
    return acc;
  }
  static ENGINEWRIGHT_INLINE void prefetch_l2(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
  static ENGINEWRIGHT_INLINE void prefetch(const void* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }

  static ENGINEWRIGHT_INLINE I set1_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
  static ENGINEWRIGHT_INLINE I load_i(const int32_t* p) {
    const Line line = load_line(p);
    return {line.a, line.b};
  }
  static ENGINEWRIGHT_INLINE void store_i(int32_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static ENGINEWRIGHT_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  static ENGINEWRIGHT_INLINE Bytes4 load_bytes4(const int8_t* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    const __m256i all = _mm256_set1_epi32(bytes);
    return {all, _mm256_abs_epi8(all), _mm256_cmpgt_epi8(_mm256_setzero_si256(), all)};
  }
  // Their absolute values and signs, which took a tenth of the time of products.
  struct KeptI8 {
    static constexpr int64_t bytes = 8;
    static void keep(const int8_t* x, int64_t n, std::byte* out, int64_t step) {
      for (int64_t i = 0; i < n; i += 32) {
        const __m256i all = load_bytes(x + i), size = _mm256_abs_epi8(all);
        const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), all);
        __m256i pairs[2] = {_mm256_unpacklo_epi32(size, negative), _mm256_unpackhi_epi32(size, negative)};
        const auto* fours = reinterpret_cast<const std::byte*>(pairs);
        for (int four : {0, 1, 4, 5, 2, 3, 6, 7}) {
          std::memcpy(out, fours + four * 8, 8);
          out += step;
        }
      }
    }
    static ENGINEWRIGHT_INLINE Bytes4 load(const std::byte* p) {
      int32_t size, negative;
      std::memcpy(&size, p, 4);
      std::memcpy(&negative, p + 4, 4);
      return {_mm256_setzero_si256(), _mm256_set1_epi32(size), _mm256_set1_epi32(negative)};
    }
  };
  using KeptU4 = KeptBytes<Avx2>;
  struct Pairs {
    __m256i a, b;
  };
  static ENGINEWRIGHT_INLINE Line load_i8(const void* p) { return load_line(p); }
  static ENGINEWRIGHT_INLINE void store_line(void* p, Line x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
  }
  static ENGINEWRIGHT_INLINE I dot_i8(I acc, Line w, Bytes4 x) {
    return {_mm256_add_epi32(acc.a, dot_i8(w.a, x)), _mm256_add_epi32(acc.b, dot_i8(w.b, x))};
  }
  // By itself GCC begins products of all tokens at once, and has no registers left for the sums.
  template <class Sums>
  static ENGINEWRIGHT_INLINE void hold(Sums& sums) {
    asm volatile("" : "+x"(sums.a), "+x"(sums.b));
  }
  static ENGINEWRIGHT_INLINE int32_t excess_i8(const int8_t* p, int64_t n) {  // the sum of those below 0
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 32)
      sum = add_bytes(sum, _mm256_min_epi8(load_bytes(p + i), _mm256_setzero_si256()));
    return total(sum);
  }
  static ENGINEWRIGHT_INLINE void expand_u4(const void* p, Line& low, Line& high) {
    const Line both = load_line(p);
    const __m256i mask = _mm256_set1_epi8(0x0f);
    low = {_mm256_and_si256(both.a, mask), _mm256_and_si256(both.b, mask)};
    high = {_mm256_and_si256(_mm256_srli_epi16(both.a, 4), mask),
            _mm256_and_si256(_mm256_srli_epi16(both.b, 4), mask)};
  }
  static ENGINEWRIGHT_INLINE Line lookup16(const uint8_t* table, Line x) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(all, x.a), _mm256_shuffle_epi8(all, x.b)};
  }
  static ENGINEWRIGHT_INLINE Pairs no_pairs() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static ENGINEWRIGHT_INLINE Pairs dot_u4(Pairs sums, Line w, Bytes4 x) {
    return {_mm256_add_epi16(sums.a, _mm256_maddubs_epi16(w.a, x.all)),
            _mm256_add_epi16(sums.b, _mm256_maddubs_epi16(w.b, x.all))};
  }
  static ENGINEWRIGHT_INLINE I add_pairs(I acc, Pairs sums) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(sums.a, ones)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(sums.b, ones))};
  }
  static ENGINEWRIGHT_INLINE I widen_i8(const int8_t* p) {
    const __m128i lanes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(lanes), _mm256_cvtepi8_epi32(_mm_srli_si128(lanes, 8))};
  }
  static ENGINEWRIGHT_INLINE I mul_i(I x, I y) {
    return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)};
  }
  static ENGINEWRIGHT_INLINE int32_t sum_i8(const int8_t* p, int64_t n) {
    __m256i sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < n; i += 32) sum = add_bytes(sum, load_bytes(p + i));
    return total(sum);
  }
  static constexpr int byte_bits = 7;  // two products of bytes of 8 would not fit int16
  static ENGINEWRIGHT_INLINE I dot_u(I acc, Line w, Bytes4 x) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(x.all, w.a), ones)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(x.all, w.b), ones))};
  }
  static ENGINEWRIGHT_INLINE void store_two_bytes(int8_t* p, F x) {
    const __m256i words =
        _mm256_packus_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // a0 b0 a1 b1
    const __m256i high = _mm256_srli_epi16(words, 7), low = _mm256_and_si256(words, _mm256_set1_epi16(127));
    const __m256i both =
        _mm256_packus_epi16(low, high);  // low a0, low b0, high a0, high b0, and those of a1, b1
    const __m256i order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permutevar8x32_epi32(both, order));
  }

  using Part = __m256;
  using Bits = __m256i;
  static constexpr int part_floats = 8;
  static constexpr int fma_rows = 6,
                       fma_blocks = 1;  // 12 accumulators, two registers of weights, a broadcast
  static constexpr int few_rows = 5, few_byte_rows = 3;
  static constexpr int64_t fma_chunk = 320;  // 20 KB of weights
  static ENGINEWRIGHT_INLINE Part part_zero() { return _mm256_setzero_ps(); }
  static ENGINEWRIGHT_INLINE Part part_load(const float* p) { return _mm256_loadu_ps(p); }
  static ENGINEWRIGHT_INLINE void part_store(float* p, Part x) { _mm256_storeu_ps(p, x); }
  static ENGINEWRIGHT_INLINE Part part_broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  static ENGINEWRIGHT_INLINE Part part_fma(Part x, Part y, Part z) { return _mm256_fmadd_ps(x, y, z); }
  static ENGINEWRIGHT_INLINE Bits load_bits(const std::byte* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static ENGINEWRIGHT_INLINE Part low_bf16(Bits pairs) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  }
  static ENGINEWRIGHT_INLINE Part high_bf16(Bits pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static ENGINEWRIGHT_INLINE Bits byte_on_top(Bits words, int k) {
    return _mm256_shuffle_epi8(
        words, _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kByteOnTop[k]))));
  }
  static ENGINEWRIGHT_INLINE Part part_of_words(Bits words) { return _mm256_cvtepi32_ps(words); }
  template <class Code>
  static ENGINEWRIGHT_INLINE Part part_of_fp8(Bits top) {
    const __m256i kept = _mm256_set1_epi32(Code::kKept),
                  bits = _mm256_and_si256(_mm256_srai_epi32(top, Code::kShift), kept);
    return _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(Code::kFactor));
  }

 private:
  static ENGINEWRIGHT_INLINE __m256i load_bytes(const int8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static ENGINEWRIGHT_INLINE __m256i add_bytes(__m256i sum, __m256i x) {  // four to a lane
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static ENGINEWRIGHT_INLINE int32_t total(__m256i sum) {
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    const __m128i pair = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(pair) + _mm_extract_epi32(pair, 1);
  }
  static ENGINEWRIGHT_INLINE F floor(F x) {  // of -160 at least
    const F held = max(set1(-160.0f), x);
    return {_mm256_floor_ps(held.a), _mm256_floor_ps(held.b)};
  }
  // |x| * (x < 0 ? ~w : w), where ~w is -w - 1: two products are at most 2 * 127 * 128, which int16 holds. To
  // negate w instead would take one of the two ports that multiply.
  static ENGINEWRIGHT_INLINE __m256i dot_i8(__m256i w, Bytes4 x) {
    const __m256i pairs = _mm256_maddubs_epi16(x.size, _mm256_xor_si256(w, x.negative));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  static ENGINEWRIGHT_INLINE Line below(int64_t n) {  // all bits in the first n lanes
    const __m256i lanes = _mm256_set1_epi32(static_cast<int>(n)),
                  index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return {_mm256_cmpgt_epi32(lanes, index),
            _mm256_cmpgt_epi32(lanes, _mm256_add_epi32(index, _mm256_set1_epi32(8)))};
  }
  static ENGINEWRIGHT_INLINE __m256 widen(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  // To nearest even; in the low half of each word. A NaN stays one, made quiet.
  static ENGINEWRIGHT_INLINE __m256i round_bf16(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x), half = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(half, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet = _mm256_or_si256(half, _mm256_set1_epi32(0x40));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
  }
  // In two factors, since 2^n itself may overflow.
  static ENGINEWRIGHT_INLINE __m256 scale_pow2(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
    return _mm256_mul_ps(_mm256_mul_ps(x, pow2(half)), pow2(_mm256_sub_epi32(whole, half)));
  }
  static ENGINEWRIGHT_INLINE __m256 pow2(__m256i n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
};

}  // namespace
}  // namespace enginewright
