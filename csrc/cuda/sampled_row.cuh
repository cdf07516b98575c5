// What a step draws, and how the next one finds it where the host does not know it yet.
#pragma once

#include "device.cuh"

namespace enginewright {

enum class RowStatus : int32_t { ok = 0, not_finite = 1, no_token = 2 };
struct SampledRow {
  int32_t token;
  RowStatus status;
  float logprob;
};

// An input token; one below 0 is the one that the step before has sampled from row -1 - token.
DEVICE int known_token(int32_t token, const SampledRow* sampled) {
  return token < 0 ? sampled[-1 - token].token : token;
}

}  // namespace enginewright
