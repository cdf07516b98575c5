// From a row of logits to a token.
//
// In this order, as in vLLM and transformers: logit bias, penalties (repetition, frequency, presence), the
// mask; then greedy, or temperature, top-k, top-p, min-p and the draw (noise.h). Equal values are ordered by
// token id, so top-k keeps exactly k tokens, and top_k = 1 is greedy. Log-probabilities are those of the
// logits as the model gave them. Nothing depends on other rows, on threads, or on the instruction set: sums
// have one order.
#pragma once

#include <cstdint>
#include <vector>

namespace enginewright {

// One row's parameters; the same bytes as numpy's `_cpu.SAMPLING_ROW`.
struct SamplingRow {
  uint64_t seed;
  uint64_t position;         // of the token to be sampled, in the whole text
  uint32_t choice;           // which of the request's n answers
  int32_t top_k;             // 0: all
  float temperature;         // 0: greedy
  float top_p;               // 1: all
  float min_p;               // 0: all
  float repetition_penalty;  // 1: none
  float frequency_penalty;   // 0: none
  float presence_penalty;    // 0: none
  int32_t logprobs;          // 1: wanted
  int32_t top_logprobs;      // how many of the most likely tokens, too
  int32_t history_end;       // this row's entries in `history` and `biases` end here
  int32_t bias_end;          // and begin where the row before ends
};

// A token of the prompt or the output so far, each once; `count` is how often it is in the output.
struct TokenCount {
  int32_t token, count;
};

struct TokenBias {
  int32_t token;
  float bias;
};

enum class RowStatus : int32_t {
  ok = 0,
  not_finite = 1,  // NaN or +inf among the logits
  no_token = 2,    // every logit is -inf
};

struct SampledRow {
  int32_t token;
  RowStatus status;
  float logprob;  // of the token; 0 if not wanted
};

// Memory that a thread uses again from row to row. Once reserved, no row of that vocabulary allocates.
struct SamplingScratch {
  std::vector<float> adjusted, weights, block_max, bound;
  std::vector<double> block_mass, bucket_mass;
  std::vector<int32_t> ids, boundary;
  void reserve(int64_t vocab);
};

template <class T>
struct Span {
  const T* first;
  int64_t size;
  const T* begin() const { return first; }
  const T* end() const { return first + size; }
};

// 32-bit words with a bit a token, the first in the lowest.
inline int64_t mask_words(int64_t vocab) { return (vocab + 31) / 32; }

// logits: (vocab). allowed: (mask_words(vocab)), 1 for each token that may be sampled, or null if all may.
// top_tokens, top_values: (row.top_logprobs), most likely first.
SampledRow sample_row(const float* logits, int64_t vocab, const SamplingRow& row, Span<TokenCount> history,
                      Span<TokenBias> biases, const uint32_t* allowed, SamplingScratch& scratch,
                      int32_t* top_tokens, float* top_values);

}  // namespace enginewright
