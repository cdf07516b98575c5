// Chances of tokens: their weights, as floats and as integers.
#pragma once

#include "device.cuh"

namespace enginewright {

constexpr int MASS_BITS = 44;  // of a weight of 1

// e^x for x <= 0, with the bits that csrc/cpu/sampling.cpp gives it.
DEVICE float exp_of_negative(float x) {
  if (!(x > -87.0f)) return 0.0f;
  float shifted = x * 1.44269504088896341f + 12582912.0f;
  float n = shifted - 12582912.0f;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float mantissa = (p * (r * r) + r) + 1.0f;
  return mantissa * float_of_bits((bits_of_float(shifted) + 127) << 23);
}

// A weight in 0 ... 1 as an integer, rounded down.
DEVICE uint64_t mass_of(float weight) {
  uint32_t bits = bits_of_float(weight);
  int down = 127 - static_cast<int>(bits >> 23);
  uint64_t mantissa = static_cast<uint64_t>((bits & 0x7fffff) | 0x800000) << (MASS_BITS - 23);
  return down <= MASS_BITS ? mantissa >> down : 0;
}

// The least mass that is top_p of `total` (top_p < 1): 2^64 top_p is an integer, unless it is below 2^-41.
DEVICE uint64_t share_of(uint64_t total, float top_p) {
  uint32_t bits = bits_of_float(top_p);
  int down = 127 - static_cast<int>(bits >> 23);
  uint64_t mantissa = (bits & 0x7fffff) | 0x800000;
  uint64_t share = down <= 41 ? mantissa << (41 - down) : down <= 64 ? mantissa >> (down - 41) : 0;
  uint64_t mass = multiply_high(total, share) + (total * share != 0);
  return mass > 0 ? mass : 1;
}

}  // namespace enginewright
