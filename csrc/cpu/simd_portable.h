// The portable instruction set: 16 fp32 lanes as four 16-byte vectors, in GCC/Clang vector extensions.
//
// This file also says what an instruction set S offers to kernels; simd_avx512.h has the same members, and
// simd_math.h adds exp, tanh, silu, … on top of them:
//
//   F                              16 fp32 lanes
//   zero set1 load store           unaligned; load_first / store_first touch the first n lanes alone, the
//                                  others read as 0, 0 <= n <= 16
//   stream                         store, past the caches if it can be; to a multiple of 64 bytes
//   load_bf16 store_bf16 (…_first) 16 bf16 in memory; stores round to nearest even
//   store_i8 store_i8_first        integral lanes in [-127, 127] as int8
//   add sub mul div sqrt abs       lane by lane
//   fma(a, b, c)                   a * b + c; one rounding or two, as the instruction set has it
//   max min                        a > b ? a : b: where a lane is NaN the second operand is returned
//   round                          to the nearest integer, ties to even; |x| < 2^22
//   scale_pow2(x, n)               x * 2^n for integral lanes n in [-252, 254]
//   fraction(x)                    x - floor(x) for x <= 0; 0 below -160
//   scale_pow2_floor(p, x)         p * 2^floor(x) for x <= 0 and p < 2; 0 below -160
//   first(n, a, b)                 lanes i < n of a, the others of b
//   where_less(a, b, x, y)         a < b ? x : y
//   reduce_add reduce_max          over lanes, in one fixed tree (halves folded: 16 -> 8 -> 4 -> 2 -> 1)
//   Line                           64 bytes of an r16 block: a pair of bf16 along K for each of 16 rows
//   Pair                           one pair of bf16 for all lanes
//   load_line store_line load_pair pair(uint32_t)
//   dot(acc, Pair a, Line b)       acc[i] + a.lo * b[i].lo + a.hi * b[i].hi, in one fixed order of rounding
//   expand_i8(ptr, Line&, Line&)   an i8 line (4 along K) as two bf16 lines, exactly
//   expand_fp8<Code>(ptr, Line&, Line&)
//                                  the same of a line of FP8 (codes.h)
//   I                              16 int32 lanes: set1_i, load_i, store_i; to_float rounds to nearest even
//   Bytes4 load_bytes4(ptr)        four int8 along K, for all lanes
//   load_i8(ptr)                   an i8 line as dot_i8 wants it
//   dot_i8(I, Line w, Bytes4 x)    acc[i] + the sum of w[i][j] * x[j] + the excess of x, which is the same
//   for
//                                  all w; codes are in [-127, 127]
//   excess_i8(ptr, n)              the excess of n int8 together, a multiple of 32
//   expand_u4(ptr, Line&, Line&)   64 bytes as two lines of unsigned bytes, low halves and high halves, as
//                                  dot_u4 wants them
//   lookup16(table, Line)          each byte i, of those in [0, 15], as the i-th of the table's
//   dot_u4(I, Line w, Bytes4 x)    acc[i] + the sum of w[i][j] * x[j], of bytes w up to 24
//   Pairs                          void, or what is faster than I to sum dot_u4 in: 16 lanes of two int16, of
//                                  the first and the last two products each. Then dot_u4(Pairs, w, x) takes
//                                  the place of that of I; no_pairs() are zeros; add_pairs(I, Pairs)
//   hold(I&)                       has it in registers by here, where the compiler needs to be told
//   widen_i8(ptr)                  16 int8 as I; mul_i: lane by lane
//   dot_u(I, Line w, Bytes4 x)     the same with w as load_line gives it, and x of byte_bits bits, unsigned
//   store_two_bytes(ptr, x)        lanes rounded to integers of 2 * byte_bits bits: of four at a time, first
//                                  their lower bits in four bytes, then the upper ones
//   sum_i8(ptr, n)                 the sum of n int8, a multiple of 32
//   prefetch(ptr) prefetch_l2(ptr) towards L1, or L2
//   tile_tokens, tile_blocks       the GEMM tile whose accumulators fit the registers; gemv_blocks: blocks of
//                                  16 rows that one token passes together; both powers of 2, at least 2
//   i8_streams, u4_streams         for 1, 2, … tokens that weights of gemm_a8.h pass as they come from
//   memory:
//                                  of how many blocks they come at once
//   run_tokens, run_blocks         the tile whose accumulators fit twice, as those of a run of K and of all
//   KeptI8, KeptU4                 how gemm_a8.h keeps four int8 of x for dot_i8 and dot_u4: `bytes` of them,
//                                  keep() and load() as KeptBytes has them; void: it reads x where it lies
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "codes.h"

#define ENGINEWRIGHT_INLINE inline __attribute__((always_inline))
// One copy of a function. GCC would also make one for each constant that a caller has for an argument.
#if defined(__clang__)
#define ENGINEWRIGHT_ONCE __attribute__((noinline))
#else
#define ENGINEWRIGHT_ONCE __attribute__((noinline, noclone))
#endif

// Before a loop over an array of registers, of constant length: GCC unrolls it too late by itself, and then
// stores every register in every pass of the loop around it.
#if defined(__clang__)
#define ENGINEWRIGHT_UNROLL _Pragma("unroll")
#define ENGINEWRIGHT_UNROLL_TWICE _Pragma("unroll 2")
#else
#define ENGINEWRIGHT_UNROLL _Pragma("GCC unroll 16")
#define ENGINEWRIGHT_UNROLL_TWICE _Pragma("GCC unroll 2")
#endif

namespace enginewright {
namespace {

// Four int8 of x as they are.
template <class S>
struct KeptBytes {
  static constexpr int64_t bytes = 4;
  // n numbers, a multiple of 32, four every `step` bytes.
  static void keep(const int8_t* x, int64_t n, std::byte* out, int64_t step) {
    for (int64_t i = 0; i < n; i += 4, out += step) std::memcpy(out, x + i, 4);
  }
  static ENGINEWRIGHT_INLINE auto load(const std::byte* p) {
    return S::load_bytes4(reinterpret_cast<const int8_t*>(p));
  }
};

// For byte shuffles of 16: byte k of each word on top of it, zeros after.
alignas(16) constexpr int8_t kByteOnTop[4][16] = {
    {-1, -1, -1, 0, -1, -1, -1, 4, -1, -1, -1, 8, -1, -1, -1, 12},
    {-1, -1, -1, 1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13},
    {-1, -1, -1, 2, -1, -1, -1, 6, -1, -1, -1, 10, -1, -1, -1, 14},
    {-1, -1, -1, 3, -1, -1, -1, 7, -1, -1, -1, 11, -1, -1, -1, 15}};

struct Portable {
  typedef float Quad __attribute__((vector_size(16)));
  typedef uint32_t Bits __attribute__((vector_size(16)));
  typedef int32_t Ints __attribute__((vector_size(16)));
  struct F {
    Quad q[4];
  };
  struct Line {
    Bits q[4];
  };
  struct Pair {
    float lo, hi;
  };
  struct I {
    Ints q[4];
  };
  struct Bytes4 {
    int8_t x[4];
  };
  static constexpr int tile_tokens = 2, tile_blocks = 2, gemv_blocks = 2;
  static constexpr int i8_streams[] = {2, 2}, u4_streams[] = {2, 2};
  static constexpr int run_tokens = 2, run_blocks = 2;
  using KeptI8 = void;
  using KeptU4 = void;
  using Pairs = void;

  static ENGINEWRIGHT_INLINE F set1(float x) {
    const Quad q = {x, x, x, x};
    return {{q, q, q, q}};
  }
  static ENGINEWRIGHT_INLINE F zero() { return set1(0.0f); }
  static ENGINEWRIGHT_INLINE F load(const float* p) {
    F r;
    std::memcpy(&r, p, 64);
    return r;
  }
  static ENGINEWRIGHT_INLINE void store(float* p, F a) { std::memcpy(p, &a, 64); }
  static ENGINEWRIGHT_INLINE void stream(float* p, F a) { store(p, a); }
  static ENGINEWRIGHT_INLINE F load_first(const float* p, int64_t n) {
    float lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
    return load(lanes);
  }
  static ENGINEWRIGHT_INLINE void store_first(float* p, F a, int64_t n) {
    float lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
  }

  static ENGINEWRIGHT_INLINE F load_bf16(const uint16_t* p) {
    float lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = from_bits(uint32_t{p[i]} << 16);
    return load(lanes);
  }
  static ENGINEWRIGHT_INLINE F load_bf16_first(const uint16_t* p, int64_t n) {
    float lanes[16] = {};
    for (int64_t i = 0; i < n; ++i) lanes[i] = from_bits(uint32_t{p[i]} << 16);
    return load(lanes);
  }
  static ENGINEWRIGHT_INLINE void store_bf16(uint16_t* p, F a) {
    float lanes[16];
    store(lanes, a);
    for (int i = 0; i < 16; ++i) p[i] = round_bf16(lanes[i]);
  }
  static ENGINEWRIGHT_INLINE void store_bf16_first(uint16_t* p, F a, int64_t n) {
    float lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = round_bf16(lanes[i]);
  }

  static ENGINEWRIGHT_INLINE void store_i8(int8_t* p, F a) { store_i8_first(p, a, 16); }
  static ENGINEWRIGHT_INLINE void store_i8_first(int8_t* p, F a, int64_t n) {
    float lanes[16];
    store(lanes, a);
    for (int64_t i = 0; i < n; ++i) p[i] = static_cast<int8_t>(lanes[i]);
  }

  static ENGINEWRIGHT_INLINE F add(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] + b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F sub(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] - b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F mul(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] * b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F div(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] / b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F fma(F a, F b, F c) { return add(mul(a, b), c); }
  static ENGINEWRIGHT_INLINE F max(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] > b.q[i] ? a.q[i] : b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F min(F a, F b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] < b.q[i] ? a.q[i] : b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE F abs(F a) {
    for (int i = 0; i < 4; ++i) a.q[i] = (Quad)((Bits)a.q[i] & 0x7fffffffu);
    return a;
  }
  static ENGINEWRIGHT_INLINE F sqrt(F a) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) a.q[i][j] = std::sqrt(a.q[i][j]);
    }
    return a;
  }
  static ENGINEWRIGHT_INLINE F round(F a) {  // below 2^22, adding 1.5 * 2^23 leaves no bits of fraction
    const F magic = set1(12582912.0f);
    return sub(add(a, magic), magic);
  }
  static ENGINEWRIGHT_INLINE F scale_pow2(F a, F n) {  // in two factors, since 2^n itself may overflow
    for (int i = 0; i < 4; ++i) {
      const Ints whole = __builtin_convertvector(n.q[i], Ints), half = whole >> 1;
      a.q[i] = a.q[i] * (Quad)((half + 127) << 23) * (Quad)((whole - half + 127) << 23);
    }
    return a;
  }
  static ENGINEWRIGHT_INLINE F fraction(F x) { return sub(max(set1(-160.0f), x), floor(x)); }
  static ENGINEWRIGHT_INLINE F scale_pow2_floor(F p, F x) { return scale_pow2(p, floor(x)); }
  static ENGINEWRIGHT_INLINE F first(int64_t n, F a, F b) {
    float x[16], y[16];
    store(x, a);
    store(y, b);
    for (int64_t i = n < 0 ? 0 : n; i < 16; ++i) x[i] = y[i];
    return load(x);
  }
  static ENGINEWRIGHT_INLINE F where_less(F a, F b, F x, F y) {
    for (int i = 0; i < 4; ++i) x.q[i] = a.q[i] < b.q[i] ? x.q[i] : y.q[i];
    return x;
  }
  static ENGINEWRIGHT_INLINE float reduce_add(F a) {
    const Quad s = (a.q[0] + a.q[2]) + (a.q[1] + a.q[3]);
    return (s[0] + s[2]) + (s[1] + s[3]);
  }
  static ENGINEWRIGHT_INLINE float reduce_max(F a) {
    float r = a.q[0][0];
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) r = a.q[i][j] > r ? a.q[i][j] : r;
    }
    return r;
  }

  static ENGINEWRIGHT_INLINE Line load_line(const void* p) {
    Line r;
    std::memcpy(&r, p, 64);
    return r;
  }
  static ENGINEWRIGHT_INLINE void store_line(void* p, Line a) { std::memcpy(p, &a, 64); }
  static ENGINEWRIGHT_INLINE Pair pair(uint32_t bits) {
    return {from_bits(bits << 16), from_bits(bits & 0xffff0000u)};
  }
  static ENGINEWRIGHT_INLINE Pair load_pair(const void* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    return pair(bits);
  }
  static ENGINEWRIGHT_INLINE F dot(F acc, Pair a, const Line& b) {
    for (int i = 0; i < 4; ++i) {
      acc.q[i] = acc.q[i] + a.lo * (Quad)(b.q[i] << 16);
      acc.q[i] = acc.q[i] + a.hi * (Quad)(b.q[i] & 0xffff0000u);
    }
    return acc;
  }
  static ENGINEWRIGHT_INLINE void expand_i8(const void* p, Line& a, Line& b) {
    Ints word[4];
    std::memcpy(word, p, 64);
    for (int i = 0; i < 4; ++i) {  // an integer below 2^8 is a float whose low 16 bits are zero
      const Quad k0 = __builtin_convertvector((word[i] << 24) >> 24, Quad);
      const Quad k1 = __builtin_convertvector((word[i] << 16) >> 24, Quad);
      const Quad k2 = __builtin_convertvector((word[i] << 8) >> 24, Quad);
      const Quad k3 = __builtin_convertvector(word[i] >> 24, Quad);
      a.q[i] = ((Bits)k0 >> 16) | (Bits)k1;
      b.q[i] = ((Bits)k2 >> 16) | (Bits)k3;
    }
  }
  template <class Code>
  static ENGINEWRIGHT_INLINE void expand_fp8(const void* p, Line& a, Line& b) {
    constexpr const Bf16Table& table = kBf16Table<Code>;
    const auto* codes = static_cast<const uint8_t*>(p);
    uint16_t pairs[2][16][2];
    for (int i = 0; i < 64; ++i) {
      const int code = codes[i] & 0x7f, sign = codes[i] & 0x80;
      const int bits = table.low[code] | (table.high[code] | sign) << 8;
      pairs[i / 2 % 2][i / 4][i % 2] = static_cast<uint16_t>(bits);
    }
    a = load_line(pairs[0]);
    b = load_line(pairs[1]);
  }
  static ENGINEWRIGHT_INLINE void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }
  static ENGINEWRIGHT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

  static ENGINEWRIGHT_INLINE I set1_i(int32_t x) {
    const Ints q = {x, x, x, x};
    return {{q, q, q, q}};
  }
  static ENGINEWRIGHT_INLINE I load_i(const int32_t* p) {
    I r;
    std::memcpy(&r, p, 64);
    return r;
  }
  static ENGINEWRIGHT_INLINE void store_i(int32_t* p, const I& a) { std::memcpy(p, &a, 64); }
  static ENGINEWRIGHT_INLINE F to_float(const I& a) {
    F r;
    for (int i = 0; i < 4; ++i) r.q[i] = __builtin_convertvector(a.q[i], Quad);
    return r;
  }
  static ENGINEWRIGHT_INLINE Bytes4 load_bytes4(const int8_t* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static ENGINEWRIGHT_INLINE Line load_i8(const void* p) { return load_line(p); }
  static ENGINEWRIGHT_INLINE void hold(I&) {}
  static ENGINEWRIGHT_INLINE I dot_i8(I acc, const Line& w, Bytes4 x) {
    for (int i = 0; i < 4; ++i) {
      const Ints word = (Ints)w.q[i];
      acc.q[i] += ((word << 24) >> 24) * x.x[0] + ((word << 16) >> 24) * x.x[1];
      acc.q[i] += ((word << 8) >> 24) * x.x[2] + (word >> 24) * x.x[3];
    }
    return acc;
  }
  static ENGINEWRIGHT_INLINE int32_t excess_i8(const int8_t*, int64_t) { return 0; }
  static ENGINEWRIGHT_INLINE void expand_u4(const void* p, Line& low, Line& high) {
    const Line both = load_line(p);
    for (int i = 0; i < 4; ++i) {
      low.q[i] = both.q[i] & 0x0f0f0f0fu;
      high.q[i] = both.q[i] >> 4 & 0x0f0f0f0fu;
    }
  }
  static ENGINEWRIGHT_INLINE Line lookup16(const uint8_t* table, const Line& a) {
    uint8_t bytes[64];
    store_line(bytes, a);
    for (uint8_t& byte : bytes) byte = table[byte];
    return load_line(bytes);
  }
  static ENGINEWRIGHT_INLINE I dot_u4(I acc, const Line& w, Bytes4 x) { return dot_i8(acc, w, x); }
  static ENGINEWRIGHT_INLINE I widen_i8(const int8_t* p) {
    int32_t lanes[16];
    for (int i = 0; i < 16; ++i) lanes[i] = p[i];
    return load_i(lanes);
  }
  static ENGINEWRIGHT_INLINE I mul_i(I a, const I& b) {
    for (int i = 0; i < 4; ++i) a.q[i] = a.q[i] * b.q[i];
    return a;
  }
  static ENGINEWRIGHT_INLINE int32_t sum_i8(const int8_t* p, int64_t n) {
    int32_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += p[i];
    return sum;
  }
  static constexpr int byte_bits = 7;
  static ENGINEWRIGHT_INLINE I dot_u(I acc, const Line& w, Bytes4 x) { return dot_i8(acc, w, x); }
  static ENGINEWRIGHT_INLINE void store_two_bytes(int8_t* p, F a) {
    float lanes[16];
    store(lanes, round(a));
    for (int i = 0; i < 16; ++i) {
      const int code = lanes[i] >= 0.0f ? static_cast<int>(lanes[i]) : 0;  // NaN has no integer
      p[i / 4 * 8 + i % 4] = static_cast<int8_t>(code & 127);
      p[i / 4 * 8 + i % 4 + 4] = static_cast<int8_t>(code >> 7);
    }
  }

 private:
  static ENGINEWRIGHT_INLINE F floor(F x) {  // of -160 at least
    const F held = max(set1(-160.0f), x), nearest = round(held);
    return where_less(held, nearest, sub(nearest, set1(1.0f)), nearest);
  }
  static ENGINEWRIGHT_INLINE float from_bits(uint32_t bits) {
    float r;
    std::memcpy(&r, &bits, 4);
    return r;
  }
  static ENGINEWRIGHT_INLINE uint16_t round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};

}  // namespace
}  // namespace enginewright
