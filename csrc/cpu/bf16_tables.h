// Codes of 8 bits as bf16, which has every value of them: tables by the code without its sign.
//
//   i8     -127 … 127
//   e4m3   FP8 of the form E4M3FN: a sign, 4 bits of exponent (bias 7), 3 of fraction; subnormals, no
//          infinities, one NaN of each sign (OCP 8-bit Floating Point Specification, revision 1.0)
#pragma once

#include <cstdint>
#include <cstring>

namespace enginewright {
namespace {

// Bits of code * 2^exponent, exactly: code has at most 7 bits, and bf16 has 8.
constexpr uint16_t bf16_of(int code, int exponent) {
  if (code == 0) return 0;
  int top = 0;  // code = 1.… * 2^top
  while (code >> (top + 1) != 0) ++top;
  return static_cast<uint16_t>(((127 + exponent + top) << 7) | ((code << (7 - top)) & 0x7f));
}

constexpr uint16_t bf16_of_i8(int code) { return bf16_of(code, 0); }

constexpr uint16_t bf16_of_e4m3(int code) {
  if (code == 0x7f) return 0x7fc0;
  const int exponent = code >> 3, fraction = code & 7;
  return exponent == 0 ? bf16_of(fraction, -9) : bf16_of(8 + fraction, exponent - 10);
}

// Both bytes of it, each in a table of its own.
struct Bf16Table {
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};
  constexpr explicit Bf16Table(uint16_t (*bits)(int)) {
    for (int code = 0; code < 128; ++code) {
      low[code] = static_cast<uint8_t>(bits(code));
      high[code] = static_cast<uint8_t>(bits(code) >> 8);
    }
  }
};
constexpr Bf16Table kI8Table(bf16_of_i8), kE4m3Table(bf16_of_e4m3);

// The code nearest to x, ties to even; |x| <= 464, which rounds to 448, the largest.
inline uint8_t e4m3_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;  // exponent and 3 bits
  float fixed;  // below 2^-6, in units of 2^-9: those of 2^14 in fp32
  std::memcpy(&fixed, &magnitude, 4);
  fixed += 0x1p14f;
  uint32_t subnormal;
  std::memcpy(&subnormal, &fixed, 4);
  const uint32_t code = magnitude < 0x3c800000u ? subnormal & 0xfu : normal - (120u << 3);
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}

}  // namespace
}  // namespace enginewright
