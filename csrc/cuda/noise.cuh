// The random numbers of a draw, one for each token: csrc/cpu/noise.h says what they are, and has the same
// bits.
#pragma once

#include "device.cuh"

namespace enginewright {

constexpr int NOISE_GROUP = 64;  // tokens

DEVICE float log_of_share(float x) {
  int n = static_cast<int>(bits_of_float(x) - 0x3F3504F3u) >> 23;
  float r = float_of_bits(bits_of_float(x) - (static_cast<uint32_t>(n) << 23)) - 1.0f, square = r * r;
  float p = r * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  return ((p * square * r - 0.5f * square) + r) + static_cast<float>(n) * 0.69314718056f;
}

DEVICE float exponential(uint32_t bits) {
  int part = static_cast<int>(bits >> 6);
  float v = (static_cast<float>(part) + 0.5f) * 0x1p-26f;
  float rest = (static_cast<float>((1 << 26) - 1 - part) + 0.5f) * 0x1p-26f;
  return -(log_of_share(rest) + ((1.0f - rest) - v));
}

// The first word of Philox4x32-10 (csrc/cpu/philox.h).
COLD uint32_t philox(uint64_t seed, uint32_t choice, uint64_t position, uint32_t number) {
  uint32_t counter[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice,
                         number};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  NO_UNROLL
  for (int round = 0; round < 10; ++round) {
    uint64_t first = static_cast<uint64_t>(0xD2511F53u) * counter[0];
    uint64_t second = static_cast<uint64_t>(0xCD9E8D57u) * counter[2];
    counter[0] = static_cast<uint32_t>(second >> 32) ^ counter[1] ^ key[0];
    counter[1] = static_cast<uint32_t>(second);
    counter[2] = static_cast<uint32_t>(first >> 32) ^ counter[3] ^ key[1];
    counter[3] = static_cast<uint32_t>(first);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter[0];
}

struct MinNoise {  // of a group
  float value;
  int32_t token;
};

struct Noise {
  uint64_t seed, position;
  uint32_t choice;

  DEVICE uint32_t word(uint32_t number) const { return philox(seed, choice, position, number); }
  DEVICE MinNoise minimum(int group) const {
    uint32_t bits = word(0x80000000u | static_cast<uint32_t>(group));
    return {exponential(bits) * (1.0f / NOISE_GROUP),
            group * NOISE_GROUP + static_cast<int32_t>(bits % NOISE_GROUP)};
  }
  DEVICE float of(int32_t token, MinNoise minimum) const {
    if (token == minimum.token) return minimum.value;
    return minimum.value + exponential(word(static_cast<uint32_t>(token)));
  }
};

}  // namespace enginewright
