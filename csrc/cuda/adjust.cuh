// What a request changes in its row of logits before a token is sampled: biases, and penalties of tokens that
// have occurred.
#pragma once

#include "select.cuh"

namespace enginewright {

// The same bytes as csrc/cpu/sampling.h has them.
struct SamplingRow {
  uint64_t seed, position;
  uint32_t choice;
  int32_t top_k;
  float temperature, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty;
  int32_t logprobs, top_logprobs, history_end, bias_end;
};
struct TokenCount {
  int32_t token, count;
};
constexpr int32_t BEING_DRAWN = -1;  // a token that the host does not know yet
struct TokenBias {
  int32_t token;
  float bias;
};

// Biases and penalties of a row. In place: what was there goes to `saved`, and comes back by `restore`.
template <int THREADS>
struct Adjustment {
  const SamplingRow& row;
  const TokenCount* history;
  const TokenBias* biases;
  float *saved_history, *saved_biases;
  int num_history, num_biases;
  int newest = -1;  // the token that the row's logits come from, if the history has it as BEING_DRAWN

  DEVICE bool penalized() const {
    return row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
  }
  // The last entry may be BEING_DRAWN. If another has the same token, that one counts it.
  DEVICE void resolve(SelectMemory<THREADS>& m, const int32_t* token) {
    if (num_history == 0 || history[num_history - 1].token != BEING_DRAWN) return;
    newest = *token;
    uint64_t again = 0;
    for (int i = thread_index(); i < num_history - 1; i += THREADS) again |= history[i].token == newest;
    if (combined(m, again, Maximum())) --num_history;
  }
  DEVICE TokenCount entry(int i) const {
    auto [token, count] = history[i];
    return token == BEING_DRAWN ? TokenCount{newest, count} : TokenCount{token, count + (token == newest)};
  }
  DEVICE void apply(float* x) const {
    NO_UNROLL
    for (int i = thread_index(); i < num_biases; i += THREADS) {
      saved_biases[i] = x[biases[i].token];
      x[biases[i].token] += biases[i].bias;
    }
    sync_threads();
    NO_UNROLL
    for (int i = thread_index(); i < num_history; i += THREADS) {
      auto [token, count] = entry(i);
      float value = saved_history[i] = x[token];
      value = value > 0.0f ? divide(value, row.repetition_penalty) : value * row.repetition_penalty;
      value -= row.frequency_penalty * static_cast<float>(count);
      x[token] = value - (count > 0 ? row.presence_penalty : 0.0f);
    }
    sync_threads();
  }
  DEVICE void restore(float* x) const {
    for (int i = thread_index(); i < num_history; i += THREADS) x[entry(i).token] = saved_history[i];
    sync_threads();
    for (int i = thread_index(); i < num_biases; i += THREADS) x[biases[i].token] = saved_biases[i];
    sync_threads();
  }
};

}  // namespace enginewright
