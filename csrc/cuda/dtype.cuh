// Number types: how kernels store numbers of each, and all that they know of codes of 8 bits. Another FP8 is
// a name in Type, a struct, and its Stored and Codes.
#pragma once

#include "device.cuh"

namespace enginewright {

// What a number becomes where it is stored: src/enginewright/dtypes.py has the table.
enum class Type { f32, bf16, i32, i8, e4m3, u4, e2m1 };

struct e4m3 {
  uint8_t bits;
};

template <Type TYPE>
struct Stored;
template <>
struct Stored<Type::f32> {
  using type = float;
};
template <>
struct Stored<Type::bf16> {
  using type = bf16;
};
template <>
struct Stored<Type::i8> {
  using type = int8_t;
};
template <>
struct Stored<Type::e4m3> {
  using type = e4m3;
};
template <Type TYPE>
using stored_t = typename Stored<TYPE>::type;

// FP8: a sign, bits of exponent and bits of fraction; subnormals, too.
template <int EXPONENT_BITS>
struct Fp8 {
  static constexpr int FRACTION_BITS = 7 - EXPONENT_BITS, BIAS = (1 << (EXPONENT_BITS - 1)) - 1;
};

// The largest code, and the amax below which numbers count as zero (plugins/gemm/quantize_rows.py).
template <class Code>
struct Codes;
template <>
struct Codes<int8_t> {
  static constexpr float LARGEST = 127.0f, TINY = 0x1p-120f;
};
template <>
struct Codes<e4m3> : Fp8<4> {
  static constexpr float LARGEST = 448.0f, TINY = 0x1p-118f;
};

// Of FP8; device.cuh has other types. Rounded to nearest even: |x| <= LARGEST.
template <class Code>
DEVICE Code from_float(float x) {
  using C = Codes<Code>;
  constexpr int DROPPED = 23 - C::FRACTION_BITS;  // bits of an fp32's fraction
  constexpr uint32_t NORMAL = 128 - C::BIAS;      // an fp32's exponent from which codes are normal numbers
  constexpr float SUBNORMALS = 1 << (C::BIAS - 1 + C::FRACTION_BITS);  // that are 1
  uint32_t bits = bits_of_float(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  uint32_t code = size < (NORMAL << 23)
                      ? static_cast<uint32_t>(round_half_even(float_of_bits(size) * SUBNORMALS))
                      : ((size + ((1 << (DROPPED - 1)) - 1) + (size >> DROPPED & 1)) >> DROPPED) -
                            ((NORMAL - 1) << C::FRACTION_BITS);
  return {static_cast<uint8_t>(sign | code)};
}

// Two FP8 in upper halves as bf16: exponent and fraction at their places mean 2^(BIAS - 127) of the number,
// exactly, subnormals included.
template <class Code>
DEVICE uint32_t bf16_of_fp8(uint32_t bytes) {
  using C = Codes<Code>;
  constexpr int SHIFT = 1 + C::FRACTION_BITS;
  constexpr uint32_t KEPT = (0x7f00 >> SHIFT) * 0x10001u, FACTOR = ((254 - C::BIAS) << 7) * 0x10001u;
  uint32_t bits = and_or(bytes, 0x80008000u, bytes >> SHIFT & KEPT);
  return fma_bf16(bits, FACTOR, 0x80008000u);  // -0
}

}  // namespace enginewright
