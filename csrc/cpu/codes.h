// Codes of 8 bits: all that kernels know of each type. Another FP8 is a struct here, and a case of with_fp8.
//
//   I8     -127 … 127
//   Fp8    a sign, bits of exponent and bits of fraction, subnormals too (OCP 8-bit Floating Point
//          Specification, revision 1.0). E4m3 has the form E4M3FN: no infinities, one NaN of each sign
//
// Each has its Element, as a code is stored; kLargest and kTiny, by which rows are scaled (quantize.h); and
// bf16_of(code), the bits of a code without its sign as bf16, which has every value of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "dtype.h"

namespace enginewright {
namespace {

// Bits of code * 2^exponent, exactly: code has at most 7 bits, and bf16 has 8.
constexpr uint16_t bf16_bits(int code, int exponent) {
  if (code == 0) return 0;
  int top = 0;  // code = 1.… * 2^top
  while (code >> (top + 1) != 0) ++top;
  return static_cast<uint16_t>(((127 + exponent + top) << 7) | ((code << (7 - top)) & 0x7f));
}

struct I8 {
  using Element = int8_t;
  static constexpr float kLargest = 127.0f, kTiny = 0x1p-120f;
  static constexpr uint16_t bf16_of(int code) { return bf16_bits(code, 0); }
};

// Codes after kLargestCode are not finite.
template <int kExponentBits, int kLargestCode>
struct Fp8 {
  using Element = uint8_t;
  static constexpr int kFractionBits = 7 - kExponentBits, kBias = (1 << (kExponentBits - 1)) - 1;

  static constexpr uint16_t bf16_of(int code) {
    if (code > kLargestCode) return 0x7fc0;
    const int exponent = code >> kFractionBits, one = 1 << kFractionBits, fraction = code & (one - 1);
    return exponent == 0 ? bf16_bits(fraction, 1 - kBias - kFractionBits)
                         : bf16_bits(one + fraction, exponent - kBias - kFractionBits);
  }

  // The code nearest to x, ties to even; |x| is at most the largest.
  static uint8_t nearest(float x) {
    constexpr int kDropped = 23 - kFractionBits;  // bits of fp32's fraction
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal =  // exponent and fraction
        (magnitude + ((1u << (kDropped - 1)) - 1u) + (magnitude >> kDropped & 1u)) >> kDropped;
    float fixed;  // of subnormals, in their units: those of this power of 2 in fp32
    std::memcpy(&fixed, &magnitude, 4);
    fixed += static_cast<float>(1 << (24 - kBias - kFractionBits));
    uint32_t subnormal;
    std::memcpy(&subnormal, &fixed, 4);
    const uint32_t code = magnitude < static_cast<uint32_t>(128 - kBias) << 23
                              ? subnormal & ((2u << kFractionBits) - 1u)
                              : normal - (static_cast<uint32_t>(127 - kBias) << kFractionBits);
    return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
  }

  // A code on top of a word, moved down by kShift with its sign: what is left with the bits kKept is an fp32
  // with the exponent and fraction where they belong, the number over kFactor, subnormals too.
  static constexpr int kShift = 8 - kExponentBits;
  static constexpr int32_t kKept = static_cast<int32_t>(0x80000000u | 0x7fffffffu >> kShift);
  static constexpr float kFactor = 0x1p127f / (1 << kBias);
};

struct E4m3 : Fp8<4, 0x7e> {
  static constexpr DType kDType = DType::e4m3;
  static constexpr float kLargest = 448.0f, kTiny = 0x1p-118f;
};

// Calls use(code) with the struct of an FP8 dtype. Returns false if it is another dtype.
template <class Use>
bool with_fp8(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::e4m3:
      use(E4m3{});
      return true;
    default:
      return false;
  }
}

// Both bytes of the bf16 of each code without its sign, each in a table of its own.
struct Bf16Table {
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};
  constexpr explicit Bf16Table(uint16_t (*bf16_of)(int)) {
    for (int code = 0; code < 128; ++code) {
      low[code] = static_cast<uint8_t>(bf16_of(code));
      high[code] = static_cast<uint8_t>(bf16_of(code) >> 8);
    }
  }
};
template <class Code>
constexpr Bf16Table kBf16Table(Code::bf16_of);

}  // namespace
}  // namespace enginewright
