// The random numbers of a draw, one for each token.
//
// A draw gives the token of the largest weight / E, where E is exponential and of each token its own: token x
// with the probability of its weight among all weights. Equally, it is the largest logit + Gumbel noise. E
// depends on seed, choice, position and the token alone, so two models that draw with the same numbers mostly
// draw the same token where their probabilities are alike (https://arxiv.org/abs/2408.07978).
//
// To make the numbers of all tokens would take longer than all else of a draw. But the least E of a group of
// 64 tokens is exponential, too, only 64 times as small, and each token is as likely to have it as any other;
// what the others have above it is exponential again, since such numbers have no memory. So a group's least E
// is drawn first, and the others only where they can matter. csrc/cuda/noise.cuh makes the same bits.
#pragma once

#include <cstring>

#include "philox.h"

namespace enginewright {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// log x for x in (0, 1], within 2 ulp. x = 2^n (1 + r) with 1 + r in [√½, √2), and the polynomial of Cephes'
// logf.
inline float log_of_share(float x) {
  const int32_t n = static_cast<int32_t>(bits_of(x) - 0x3F3504F3u) >> 23;
  const float r = float_of(bits_of(x) - (static_cast<uint32_t>(n) << 23)) - 1.0f, square = r * r;
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

// -log(1 - v) for the v in the middle of one of 2^26 parts of [0, 1], by the upper 26 bits. Both v and the
// rest are rounded; what the rest has lost by that is taken back, which is nearly all where v is small.
inline float exponential(uint32_t bits) {
  const auto part = static_cast<int32_t>(bits >> 6);
  const float v = (static_cast<float>(part) + 0.5f) * 0x1p-26f;
  const float rest = (static_cast<float>((1 << 26) - 1 - part) + 0.5f) * 0x1p-26f;
  return -(log_of_share(rest) + ((1.0f - rest) - v));
}

constexpr int32_t kNoiseGroup = 64;  // tokens

struct MinNoise {  // of a group
  float value;
  int32_t token;
};

// Of a draw, which seed, choice and position name.
class Noise {
 public:
  Noise(uint64_t seed, uint32_t choice, uint64_t position)
      : key_{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
        counter_{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), choice, 0} {}

  MinNoise minimum(int32_t group) const {
    const uint32_t bits = word(0x80000000u | static_cast<uint32_t>(group));  // no token has this number
    return {exponential(bits) / kNoiseGroup, group * kNoiseGroup + static_cast<int32_t>(bits % kNoiseGroup)};
  }
  float of(int32_t token, MinNoise minimum) const {
    if (token == minimum.token) return minimum.value;
    return minimum.value + exponential(word(static_cast<uint32_t>(token)));
  }

 private:
  uint32_t word(uint32_t number) const {
    return philox4x32({counter_[0], counter_[1], counter_[2], number}, key_)[0];
  }

  const PhiloxKey key_;
  const PhiloxCounter counter_;
};

}  // namespace enginewright
