// FP8 of the form E4M3FN: a sign, 4 bits of exponent (bias 7), 3 of fraction; no infinities, one NaN of each
// sign (OCP 8-bit Floating Point Specification, revision 1.0). Every value is one of bf16, subnormals too.
#pragma once

#include <cstdint>

namespace enginewright {
namespace {

// Bits of the bf16 that a code without its sign stands for.
constexpr uint16_t bf16_of_e4m3(int code) {
  if (code == 0x7f) return 0x7fc0;
  if (code >= 8) return static_cast<uint16_t>((code << 4) + ((127 - 7) << 7));
  if (code == 0) return 0;
  const int top = code >= 4 ? 2 : code >= 2 ? 1 : 0;  // code * 2^-9 = 1.… * 2^(top - 9)
  return static_cast<uint16_t>(((127 - 9 + top) << 7) | ((code << (7 - top)) & 0x7f));
}

struct E4m3Table {
  alignas(64) uint8_t low[128] = {};
  alignas(64) uint8_t high[128] = {};
  constexpr E4m3Table() {
    for (int code = 0; code < 128; ++code) {
      low[code] = static_cast<uint8_t>(bf16_of_e4m3(code));
      high[code] = static_cast<uint8_t>(bf16_of_e4m3(code) >> 8);
    }
  }
};
constexpr E4m3Table kE4m3;

}  // namespace
}  // namespace enginewright
