#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "noise.h"

// Compiled for each, and chosen at load. No sum is left to the compiler to order, so all give the same bits.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__)
#define ENGINEWRIGHT_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ENGINEWRIGHT_CLONES
#endif
#define ENGINEWRIGHT_INLINE inline __attribute__((always_inline))

namespace enginewright {
namespace {

constexpr int64_t kBlock = 64;          // values under one maximum and one sum
constexpr int64_t kLanes = kBlock / 4;  // partial results in a block
constexpr float kGreedyBelow = 1e-5f;   // a temperature under this is greedy, as in vLLM

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

int64_t blocks_of(int64_t n) { return (n + kBlock - 1) / kBlock; }

// Loops over a block have a constant length and no branches, so that the compiler makes vectors of them,
// which are as wide as the instruction set's. It would take comparisons of wider vector types apart, into
// floats.

// The block of x at `start`; what it has after the end of x is `otherwise`, and lies in `padded`.
ENGINEWRIGHT_INLINE const float* block_at(const float* x, int64_t n, int64_t start, float otherwise,
                                          float* padded) {
  if (start + kBlock <= n) return x + start;
  std::fill(std::copy(x + start, x + n, padded), padded + kBlock, otherwise);
  return padded;
}

ENGINEWRIGHT_INLINE float larger(float a, float b) { return a > b ? a : b; }

ENGINEWRIGHT_INLINE float max_of_block(const float* x) {
  float lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) {
    lane[j] = larger(larger(x[j], x[j + kLanes]), larger(x[j + 2 * kLanes], x[j + 3 * kLanes]));
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t j = 0; j < half; ++j) lane[j] = larger(lane[j], lane[j + half]);
  }
  return lane[0];
}

ENGINEWRIGHT_INLINE double mass_of_block(const float* weights) {
  float lane[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) {
    lane[j] = weights[j] + weights[j + kLanes] + weights[j + 2 * kLanes] + weights[j + 3 * kLanes];
  }
  double mass = 0;
  for (int64_t j = 0; j < kLanes; ++j) mass += lane[j];
  return mass;
}

constexpr float kZeroBelow = -87.0f;  // e^x is taken as 0 from here down

// e^x for x <= 0 within 2 ulp: exactly 1 at 0, exactly 0 from kZeroBelow down. Cody-Waite reduction, then the
// polynomial of Cephes' expf. Adding 1.5 * 2^23 rounds to an integer that lands in the low bits.
ENGINEWRIGHT_INLINE float exp_of_negative(float x) {
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float mantissa = (p * (r * r) + r) + 1.0f;
  const float power = float_of((bits_of(shifted) + 127) << 23);
  // A mask, since `x > kZeroBelow ? … : 0` becomes a branch, and a loop with a branch no vectors.
  const uint32_t mask = -uint32_t{x > kZeroBelow};
  return float_of(bits_of(mantissa * power) & mask);
}

// The maximum of each block; true if nothing is NaN or +inf.
ENGINEWRIGHT_CLONES bool block_maxima(const float* x, int64_t n, float* block_max) {
  uint32_t bad = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    float padded[kBlock];
    const float* block = block_at(x, n, start, kMinusInfinity, padded);
    for (int64_t i = 0; i < kBlock; ++i) bad |= !(block[i] <= FLT_MAX);
    block_max[start / kBlock] = max_of_block(block);
  }
  return bad == 0;
}

// weights = e^((x - max) * inverse_temperature), in whole blocks, and their sum in each. block_max: of x, or
// null. A block whose maximum has no weight is not looked at: of a grammar's few allowed tokens most blocks
// hold none.
ENGINEWRIGHT_CLONES void weigh(const float* x, int64_t n, const float* block_max, float max,
                               float inverse_temperature, float* weights, double* block_mass) {
  for (int64_t start = 0; start < n; start += kBlock) {
    float weight[kBlock] = {};
    if (block_max == nullptr || (block_max[start / kBlock] - max) * inverse_temperature > kZeroBelow) {
      float padded[kBlock];
      const float* block = block_at(x, n, start, kMinusInfinity, padded);
      for (int64_t i = 0; i < kBlock; ++i) {
        weight[i] = exp_of_negative((block[i] - max) * inverse_temperature);
      }
    }
    block_mass[start / kBlock] = mass_of_block(weight);
    std::copy(weight, weight + kBlock, weights + start);
  }
}

// The least likely token that a filter keeps: it keeps higher weights, and equal ones up to this index.
struct Floor {
  float weight;
  int32_t index;
};

// Weights under the floor become 0; block_mass again. No weight is greater than its block's mass. The weights
// are whole blocks, of n tokens.
ENGINEWRIGHT_CLONES void cut(float* weights, int64_t n, Floor floor, double* block_mass) {
  const float more = std::nextafter(floor.weight, FLT_MAX);
  for (int64_t start = 0; start < n; start += kBlock) {
    float* block = weights + start;
    if (block_mass[start / kBlock] < floor.weight) {
      std::fill(block, block + kBlock, 0.0f);
      block_mass[start / kBlock] = 0;
      continue;
    }
    const bool equal_too = start <= floor.index;
    const int64_t after = int64_t{floor.index} + 1 - start;  // within the floor's own block
    for (int64_t i = after; equal_too && i < kBlock; ++i) {
      if (block[i] == floor.weight) block[i] = 0.0f;
    }
    const float minimum = equal_too ? floor.weight : more;
    for (int64_t i = 0; i < kBlock; ++i) block[i] = block[i] >= minimum ? block[i] : 0.0f;
    block_mass[start / kBlock] = mass_of_block(block);
  }
}

double sum(const std::vector<double>& values) {
  double total = 0;
  for (const double value : values) total += value;
  return total;
}

// Into `ids`: the k largest of x, equal ones by id; in no order. The k-th largest block maximum is a lower
// bound of the k-th largest value, so few values other than those k are looked at.
template <class Order>
void select_largest(const float* x, int64_t n, int64_t k, SamplingScratch& scratch, Order order) {
  float minimum = kMinusInfinity;
  if (k <= static_cast<int64_t>(scratch.block_max.size())) {
    scratch.bound = scratch.block_max;
    std::nth_element(scratch.bound.begin(), scratch.bound.begin() + (k - 1), scratch.bound.end(),
                     std::greater<>());
    minimum = scratch.bound[k - 1];
  }
  scratch.ids.clear();
  for (int64_t start = 0; start < n; start += kBlock) {
    if (scratch.block_max[start / kBlock] < minimum) continue;
    for (int64_t i = start; i < std::min(start + kBlock, n); ++i) {
      if (x[i] >= minimum) scratch.ids.push_back(static_cast<int32_t>(i));
    }
  }
  std::nth_element(scratch.ids.begin(), scratch.ids.begin() + (k - 1), scratch.ids.end(), order);
  scratch.ids.resize(k);
}

struct Descending {
  const float* x;
  bool operator()(int32_t a, int32_t b) const { return x[a] > x[b] || (x[a] == x[b] && a < b); }
};

// Smaller weights are in higher buckets, 32 of them to a factor of 2.
inline int64_t bucket_of(float weight) {
  return std::max(0, 0x3F800000 - static_cast<int32_t>(bits_of(weight))) >> 18;
}
constexpr int64_t kBuckets = (0x3F800000 >> 18) + 1;

// The smallest set of the most likely tokens whose mass reaches top_p: the token that reaches it is kept.
// Mass is counted in buckets, and only the bucket where it reaches top_p is sorted.
Floor nucleus(const float* weights, int64_t n, double top_p, SamplingScratch& scratch) {
  const double total = sum(scratch.block_mass);
  const double wanted = top_p * total;
  const float negligible =
      static_cast<float>(0.5 * (1.0 - top_p) * total / n);  // all of these together don't matter
  auto& ids = scratch.boundary;
  ids.resize(n);
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += kBlock) {
    if (scratch.block_mass[start / kBlock] < negligible) continue;
    for (int64_t i = start; i < std::min(start + kBlock, n); ++i) {
      ids[count] = static_cast<int32_t>(i);
      count += weights[i] >= negligible;
    }
  }
  const int64_t buckets = bucket_of(negligible) + 1;
  auto& mass = scratch.bucket_mass;
  mass.assign(buckets, 0.0);
  for (int64_t i = 0; i < count; ++i) mass[bucket_of(weights[ids[i]])] += weights[ids[i]];
  double reached = 0;
  int64_t bucket = 0;
  for (; bucket < buckets && reached + mass[bucket] < wanted; ++bucket) reached += mass[bucket];
  if (bucket == buckets) return {0.0f, std::numeric_limits<int32_t>::max()};  // by rounding: keep all

  int64_t inside = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (bucket_of(weights[ids[i]]) == bucket) ids[inside++] = ids[i];
  }
  std::sort(ids.begin(), ids.begin() + inside, Descending{weights});
  int64_t last = 0;
  for (; last + 1 < inside; ++last) {
    reached += weights[ids[last]];
    if (reached >= wanted) break;
  }
  return {weights[ids[last]], ids[last]};
}

// Tokens enter with their weights; the one of the largest weight / E wins, of equal ones the first.
class Race {
 public:
  explicit Race(const SamplingRow& row) : noise_(row.seed, row.choice, row.position) {}

  // Whether a token of this group may win that weighs so much. Rounding adds less than a millionth.
  bool may_win(int32_t group, float weight) {
    if (group != group_) {
      group_ = group;
      min_noise_ = noise_.minimum(group);
    }
    return weight >= best_ * min_noise_.value * 0.999999f;
  }
  void enter(int32_t token, float weight) {
    if (weight == 0.0f || !may_win(token / kNoiseGroup, weight)) return;
    const float score = weight / noise_.of(token, min_noise_);
    if (score < best_ || (score == best_ && token > winner_)) return;
    best_ = score;
    winner_ = token;
  }
  int32_t winner() const { return winner_; }

 private:
  const Noise noise_;
  int32_t group_ = -1, winner_ = 0;
  MinNoise min_noise_{};
  float best_ = 0;
};

// `masked` is x where a token is allowed, and -inf elsewhere, in whole blocks; block_max becomes its maxima.
// x is finite or -inf.
ENGINEWRIGHT_CLONES void mask(const float* x, int64_t n, const uint32_t* allowed, float* masked,
                              float* block_max) {
  for (int64_t start = 0; start < n; start += kBlock) {
    const uint32_t words[2] = {allowed[start / 32], start + 32 < n ? allowed[start / 32 + 1] : 0};
    float left[kBlock];
    if ((words[0] | words[1]) == 0) {
      std::fill(left, left + kBlock, kMinusInfinity);
      block_max[start / kBlock] = kMinusInfinity;
    } else {
      float padded[kBlock];
      const float* block = block_at(x, n, start, kMinusInfinity, padded);
      for (int64_t half = 0; half < 2; ++half) {
        for (int64_t j = 0; j < 32; ++j) {
          const bool here = (words[half] & uint32_t{1} << j) != 0;
          left[32 * half + j] = here ? block[32 * half + j] : kMinusInfinity;
        }
      }
      block_max[start / kBlock] = max_of_block(left);
    }
    std::copy(left, left + kBlock, masked + start);
  }
}

// The logits with biases, penalties and the mask; block_max, which is theirs, becomes that of the result.
// False if what is added is beyond all floats.
bool adjust(const float* logits, int64_t vocab, const SamplingRow& row, Span<TokenCount> history,
            Span<TokenBias> biases, const uint32_t* allowed, std::vector<float>& adjusted,
            std::vector<float>& block_max) {
  adjusted.resize(blocks_of(vocab) * kBlock);
  if (allowed != nullptr) {
    mask(logits, vocab, allowed, adjusted.data(), block_max.data());
    if (biases.size + history.size == 0) return true;
  } else {
    std::copy(logits, logits + vocab, adjusted.data());
  }
  for (const auto [token, bias] : biases) adjusted[token] += bias;  // -inf stays -inf
  for (const auto [token, count] : history) {
    float& x = adjusted[token];
    x = x > 0.0f ? x / row.repetition_penalty : x * row.repetition_penalty;
    x -= row.frequency_penalty * static_cast<float>(count);
    x -= count > 0 ? row.presence_penalty : 0.0f;
  }
  return block_maxima(adjusted.data(), vocab, block_max.data());
}

// Temperature, top-k, top-p, min-p and the draw. `max` is the largest of x, and finite.
int32_t sample_token(const float* x, int64_t vocab, float max, const SamplingRow& row,
                     SamplingScratch& scratch) {
  const auto& block_max = scratch.block_max;
  const int64_t block = std::find(block_max.begin(), block_max.end(), max) - block_max.begin();
  const auto likeliest = static_cast<int32_t>(std::find(x + block * kBlock, x + vocab, max) - x);
  if (row.temperature < kGreedyBelow || row.top_k == 1) return likeliest;
  const bool some = row.top_k > 0 && row.top_k < vocab;
  int64_t n = vocab;
  if (some) {
    n = row.top_k;
    select_largest(x, vocab, n, scratch, Descending{x});
    std::sort(scratch.ids.begin(), scratch.ids.end());
    scratch.bound.resize(n);
    for (int64_t i = 0; i < n; ++i) scratch.bound[i] = x[scratch.ids[i]];
    x = scratch.bound.data();
  }
  scratch.weights.resize(blocks_of(n) * kBlock);
  scratch.block_mass.resize(blocks_of(n));
  float* weights = scratch.weights.data();
  weigh(x, n, some ? nullptr : scratch.block_max.data(), max, 1.0f / row.temperature, weights,
        scratch.block_mass.data());
  Floor floor{0.0f, std::numeric_limits<int32_t>::max()};
  if (row.top_p < 1.0f) floor = nucleus(weights, n, row.top_p, scratch);
  if (row.min_p > floor.weight) floor = {row.min_p, std::numeric_limits<int32_t>::max()};
  if (floor.weight > 0.0f) cut(weights, n, floor, scratch.block_mass.data());

  Race race(row);
  if (some) {
    for (int64_t i = 0; i < n; ++i) race.enter(scratch.ids[i], weights[i]);
    return race.winner();
  }
  race.enter(likeliest, weights[likeliest]);  // after which few others need their numbers
  static_assert(kBlock == kNoiseGroup);
  for (int64_t start = 0; start < n; start += kBlock) {
    const auto mass =
        static_cast<float>(scratch.block_mass[start / kBlock]);  // of which each weight is a part
    if (mass == 0.0f || !race.may_win(static_cast<int32_t>(start / kBlock), mass)) continue;
    for (int64_t i = start; i < start + kBlock; ++i) race.enter(static_cast<int32_t>(i), weights[i]);
  }
  return race.winner();
}

}  // namespace

void SamplingScratch::reserve(int64_t vocab) {
  for (auto* floats : {&adjusted, &weights, &block_max, &bound}) floats->reserve(blocks_of(vocab) * kBlock);
  for (auto* ints : {&ids, &boundary}) ints->reserve(vocab);
  block_mass.reserve(blocks_of(vocab));
  bucket_mass.reserve(kBuckets);
}

SampledRow sample_row(const float* logits, int64_t vocab, const SamplingRow& row, Span<TokenCount> history,
                      Span<TokenBias> biases, const uint32_t* allowed, SamplingScratch& scratch,
                      int32_t* top_tokens, float* top_values) {
  auto& block_max = scratch.block_max;
  block_max.resize(blocks_of(vocab));
  if (!block_maxima(logits, vocab, block_max.data())) return {0, RowStatus::not_finite, 0.0f};
  float max = *std::max_element(block_max.begin(), block_max.end());
  if (max == kMinusInfinity) return {0, RowStatus::no_token, 0.0f};

  double log_total = 0;  // log Σ e^logit
  if (row.logprobs) {
    scratch.weights.resize(blocks_of(vocab) * kBlock);
    scratch.block_mass.resize(blocks_of(vocab));
    weigh(logits, vocab, block_max.data(), max, 1.0f, scratch.weights.data(), scratch.block_mass.data());
    log_total = max + std::log(sum(scratch.block_mass));
  }
  if (row.top_logprobs > 0) {
    select_largest(logits, vocab, row.top_logprobs, scratch, Descending{logits});
    std::sort(scratch.ids.begin(), scratch.ids.end(), Descending{logits});
    for (int32_t i = 0; i < row.top_logprobs; ++i) {
      top_tokens[i] = scratch.ids[i];
      top_values[i] = static_cast<float>(logits[scratch.ids[i]] - log_total);
    }
  }

  const bool penalized =
      row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f;
  if (!penalized) history.size = 0;
  const float* x = logits;
  if (allowed != nullptr || biases.size + history.size > 0) {
    if (!adjust(logits, vocab, row, history, biases, allowed, scratch.adjusted, block_max)) {
      return {0, RowStatus::not_finite, 0.0f};
    }
    x = scratch.adjusted.data();
    max = *std::max_element(block_max.begin(), block_max.end());
    if (max == kMinusInfinity) return {0, RowStatus::no_token, 0.0f};
  }
  const int32_t token = sample_token(x, vocab, max, row, scratch);
  return {token, RowStatus::ok, row.logprobs ? static_cast<float>(logits[token] - log_total) : 0.0f};
}

}  // namespace enginewright
