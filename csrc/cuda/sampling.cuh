// From rows of logits to tokens, where the logits lie: csrc/cpu/sampling.h has what is done and in which
// order.
//
// A block a row. What a row gets depends on nothing but the row: weights e^((x - max) / temperature) have the
// CPU's bits, and are added as integers, in units of 2^-44, so that no order of additions (nor of atomics)
// matters. Status, adjusted logits, greedy tokens, the sets of top-k and min-p, the noise of each token, and
// ties (by token id) are exactly the CPU's. Sums differ from the CPU's by about 1e-7 of the whole, so a token
// at the border of top-p may be in or out.
//
// Passes over the row (in L2; each beyond the first, but those of top-k, weighs every token):
//   1        greedy
//   2        temperature alone or with min-p
//   2        top-k up to 11/16 THREADS, and top-p whose tokens are among the likeliest 11/16 THREADS (or
//            somewhat more): they are moved to shared memory, by a bound from each thread's largest logit
//   6        top-p of flatter rows: three to find its last weight, digit by digit
//   5 to 11  larger top-k, and many tokens that are equal to the last one of top-k or top-p
// and with log-probabilities one more; two, where biases, penalties or a grammar change the row.
#pragma once

#include "adjust.cuh"
#include "chances.cuh"
#include "noise.cuh"
#include "sampled_row.cuh"
#include "select.cuh"

namespace enginewright {

constexpr int MAX_TOP_LOGPROBS = 20;
struct TopLogprobs {
  int32_t tokens[MAX_TOP_LOGPROBS];
  float values[MAX_TOP_LOGPROBS];
};

// stride: elements from one row of logits to the next, a multiple of 4. threads: a power of two.
struct Sampling {
  int vocab, stride, threads;
};

constexpr float GREEDY_BELOW = 1e-5f;
constexpr float LARGEST_FLOAT = 0x1.fffffep127f;

template <int THREADS>
struct SamplingMemory {
  static constexpr int MOST = 2 * THREADS;  // in the list
  static constexpr int BOUNDED = THREADS / 16 * 11;
  uint64_t list[MOST];
  SelectMemory<THREADS> select;
  int32_t count;
};

// The block's tokens, in two forms. each: f(index, logit) for every one of them, by all threads; run: the
// same for those in [begin, end), by a warp. Indices are in the order of ids; token: the id of one.
template <Sampling S>
struct Row {
  const float* x;
  const uint32_t* allowed;  // a bit a token, or null

  DEVICE int size() const { return S.vocab; }
  DEVICE float masked(float value, int i) const {
    bool out = allowed && !(allowed[i / 32] >> (i % 32) & 1) && value <= LARGEST_FLOAT;
    return out ? -INF : value;  // what is not finite fails the row in any case
  }
  DEVICE float at(int i) const { return masked(x[i], i); }
  DEVICE int token(int i) const { return i; }

  // Four at a time; f's code stands there once.
  template <class F>
  DEVICE void strided(int begin, int end, int step, F f) const {
    NO_UNROLL
    for (int i = begin; i < end; i += step) {
      Words4 four = load16(x + i);
      NO_UNROLL
      for (int e = i; e < i + 4 && e < end; ++e) {
        f(e, masked(float_of_bits(four.x), e));
        four = {four.y, four.z, four.w, 0};
      }
    }
  }
  template <class F>
  DEVICE void each(F f) const {
    strided(4 * thread_index(), S.vocab, 4 * S.threads, f);
  }
  // The same for an f with little code.
  template <class F>
  DEVICE void each_unrolled(F f) const {
    for (int i = 4 * thread_index(); i < S.vocab; i += 4 * S.threads) {
      Words4 four = load16(x + i);
      uint32_t bits[4] = {four.x, four.y, four.z, four.w};
      for (int e = 0; e < 4; ++e)
        if (i + e < S.vocab) f(i + e, masked(float_of_bits(bits[e]), i + e));
    }
  }
  template <class F>
  DEVICE void run(int begin, int end, F f) const {
    strided(begin + 4 * lane(), end, 4 * WARP, f);
  }
};

template <Sampling S>
struct List {
  const uint64_t* entries;  // id, bits of the logit; sorted
  int count;

  DEVICE int size() const { return count; }
  DEVICE float at(int i) const { return float_of_bits(static_cast<uint32_t>(entries[i])); }
  DEVICE int token(int i) const { return static_cast<int>(entries[i] >> 32); }
  template <class F>
  DEVICE void each(F f) const {
    NO_UNROLL
    for (int i = thread_index(); i < count; i += S.threads) f(i, at(i));
  }
  template <class F>
  DEVICE void run(int begin, int end, F f) const {
    NO_UNROLL
    for (int i = begin + lane(); i < end; i += WARP) f(i, at(i));
  }
};

struct Largest {
  uint32_t key;
  int32_t id;     // the first one
  uint32_t mine;  // of this thread's tokens
};
constexpr uint32_t NOT_FINITE = ~0u;  // larger than any finite number's key

template <Sampling S>
COLD Largest largest_of(SelectMemory<S.threads>& m, Row<S> row) {
  uint32_t mine = 0, id = 0;
  row.each_unrolled([&](int i, float x) {
    uint32_t key = x <= LARGEST_FLOAT ? key_of(x) : NOT_FINITE;
    if (key > mine) {
      mine = key;
      id = static_cast<uint32_t>(i);
    }
  });
  uint64_t best = combined(m, static_cast<uint64_t>(mine) << 32 | ~id, Maximum());
  return {static_cast<uint32_t>(best >> 32), static_cast<int32_t>(~static_cast<uint32_t>(best)), mine};
}

DEVICE RowStatus status_of(const Largest& largest) {
  if (largest.key == NOT_FINITE) return RowStatus::not_finite;
  return largest.key == key_of(-INF) ? RowStatus::no_token : RowStatus::ok;
}

template <Sampling S, class Source>
COLD Floor top_of(SelectMemory<S.threads>& m, Source source, int k) {
  return floor_of(
      m, source, static_cast<uint64_t>(k), [](int, float x) { return key_of(x); },
      [](int, float) { return uint64_t{1}; }, [](uint32_t) { return uint64_t{1}; });
}

// What `floor` keeps goes to the list, in no order; gives how many they are, which may be more than fit.
// also: called with every logit.
template <Sampling S, class Also>
DEVICE int gather(SamplingMemory<S.threads>& m, Row<S> row, Floor floor, Also also) {
  if (thread_index() == 0) m.count = 0;
  sync_threads();
  row.each([&](int i, float x) {
    also(x);
    if (!floor.keeps(key_of(x), i)) return;
    int place = atomic_add(&m.count, 1);
    if (place < m.MOST) m.list[place] = static_cast<uint64_t>(i) << 32 | bits_of_float(x);
  });
  sync_threads();
  return m.count;
}
template <Sampling S>
COLD int gather(SamplingMemory<S.threads>& m, Row<S> row, Floor floor) {
  return gather(m, row, floor, [](float) {});
}

// A lower bound of the k-th largest logit (k <= BOUNDED): the k-th largest of the threads' largest, `mine`.
// About 1.7 k tokens are above it if threads' parts are alike.
template <Sampling S>
COLD Floor bound_of(SelectMemory<S.threads>& m, uint32_t mine, int k) {
  return {select(m, static_cast<uint64_t>(k), [&](auto add) { add(mine, 1); }).key, LAST};
}

// Tokens enter with their weights; the one of the largest weight / E wins, of equal ones the first. A
// thread's.
struct Race {
  Noise noise;
  int group = -1;
  MinNoise minimum = {};
  float best = 0;
  uint32_t winner = 0;

  DEVICE void enter(int token, float weight) {
    if (weight == 0.0f) return;
    if (token / NOISE_GROUP != group) {
      group = token / NOISE_GROUP;
      minimum = noise.minimum(group);
    }
    if (weight < best * minimum.value * 0.999999f) return;  // rounding adds less than a millionth
    float score = divide(weight, noise.of(token, minimum));
    if (score < best || (score == best && static_cast<uint32_t>(token) > winner)) return;
    best = score;
    winner = static_cast<uint32_t>(token);
  }
  // The larger, the better.
  DEVICE uint64_t result() const { return static_cast<uint64_t>(bits_of_float(best)) << 32 | ~winner; }
};

// Temperature, top-p, min-p and the draw, from what top-k has left (`kept`). whole: their mass, or 0 if it is
// to be found. first: the index of a token that enters first: after a likely one few need their noise.
template <Sampling S, class Source>
COLD int draw(SelectMemory<S.threads>& m, const SamplingRow& row, Source source, Floor kept, float max,
              uint64_t whole, int first) {
  float inverse_temperature = divide(1.0f, row.temperature);
  auto weight = [&](int i, float x) {
    return kept.keeps(key_of(x), i) ? exp_of_negative((x - max) * inverse_temperature) : 0.0f;
  };
  Floor floor = KEEP_ALL;  // of bits of weights, times 4
  if (row.top_p < 1.0f) {
    if (whole == 0) {
      source.each([&](int i, float x) { whole += mass_of(weight(i, x)); });
      whole = combined(m, whole, Sum());
    }
    floor = floor_of(
        m, source, share_of(whole, row.top_p),
        [&](int i, float x) { return bits_of_float(weight(i, x)) << 2; },
        [&](int i, float x) { return mass_of(weight(i, x)); },
        [](uint32_t key) { return mass_of(float_of_bits(key >> 2)); });
  }
  if (bits_of_float(row.min_p) << 2 > floor.key) floor = {bits_of_float(row.min_p) << 2, LAST};
  Race race = {{row.seed, row.position, row.choice}};
  auto enter = [&](int i, float x) {
    float w = weight(i, x);
    if (floor.keeps(bits_of_float(w) << 2, i)) race.enter(source.token(i), w);
  };
  enter(first, source.at(first));
  source.each(enter);
  return static_cast<int>(~static_cast<uint32_t>(combined(m, race.result(), Maximum())));
}

// A token of an adjusted row.
template <Sampling S>
DEVICE int sample(SamplingMemory<S.threads>& m, const SamplingRow& row, Row<S> logits,
                  const Largest& largest) {
  if (row.temperature < GREEDY_BELOW || row.top_k == 1) return largest.id;
  float max = float_of_key(largest.key), inverse_temperature = divide(1.0f, row.temperature);
  int k = row.top_k < S.vocab ? row.top_k : 0;
  auto weight = [&](float x) { return exp_of_negative((x - max) * inverse_temperature); };
  bool nucleus = k == 0 && row.top_p < 1.0f;
  int count = m.MOST + 1;
  Floor kept = KEEP_ALL, bound = KEEP_ALL;
  uint64_t whole = 0;
  if (nucleus || (k > 0 && k <= m.BOUNDED)) {
    bound = bound_of<S>(m.select, largest.mine, nucleus ? m.BOUNDED : k);
    count = gather(m, logits, bound, [&](float x) {
      if (nucleus) whole += mass_of(weight(x));
    });
    whole = combined(m.select, whole, Sum());
  }
  if (k > 0 && count > m.MOST) {
    kept = top_of<S>(m.select, logits, k);
    if (k <= m.MOST) count = gather(m, logits, kept);
  }
  if (count <= m.MOST) {
    sort<S.threads>(m.list, count);  // by id
    List<S> list = {m.list, count};
    bool enough = true;
    if (k > 0) {
      kept = count > k ? top_of<S>(m.select, list, k) : KEEP_ALL;
    } else {
      // Logits under the bound may weigh the same, and are not in the list: it has to do without these.
      float minimum = weight(float_of_key(bound.key)) * 1.000001f;
      uint64_t mass = 0;
      list.each([&](int, float x) { mass += weight(x) > minimum ? mass_of(weight(x)) : 0; });
      enough = combined(m.select, mass, Sum()) >= share_of(whole, row.top_p);
    }
    if (enough) return draw<S>(m.select, row, list, kept, max, whole, 0);
  }
  return draw<S>(m.select, row, logits, kept, max, whole, largest.id);
}

// The log-probabilities of the likeliest tokens, most likely first; gives log Σ e^logit to the first warp.
template <Sampling S>
DEVICE double log_probabilities(SamplingMemory<S.threads>& m, const SamplingRow& row, Row<S> logits,
                                const Largest& largest, TopLogprobs* top) {
  float max = float_of_key(largest.key);
  int k = row.top_logprobs, count = 0;
  uint64_t mass = 0;
  auto weigh = [&](float x) { mass += mass_of(exp_of_negative(x - max)); };
  if (k > 0) {
    count = gather(m, logits, bound_of<S>(m.select, largest.mine, k), weigh);
    if (count > m.MOST) count = gather(m, logits, top_of<S>(m.select, logits, k));
  } else {
    logits.each([&](int, float x) { weigh(x); });
  }
  mass = combined(m.select, mass, Sum());
  double log_total = warp() == 0 ? max + log_of(static_cast<double>(mass) * 0x1p-44) : 0;  // f64 is slow
  NO_UNROLL
  for (int i = thread_index(); i < count; i += S.threads) {
    uint64_t entry = m.list[i];
    m.list[i] =
        static_cast<uint64_t>(~key_of(float_of_bits(static_cast<uint32_t>(entry)))) << 32 | entry >> 32;
  }
  if (k > 0) sort<S.threads>(m.list, count);
  if (thread_index() < k) {
    uint64_t entry = m.list[thread_index()];
    float logit = float_of_key(~static_cast<uint32_t>(entry >> 32));
    top->tokens[thread_index()] = static_cast<int32_t>(entry);
    top->values[thread_index()] = static_cast<float>(logit - log_total);
  }
  return log_total;
}

// A block a row. entries: of all rows, the tokens of their histories, and after them their TokenBias; saved:
// a float for each of both. allowed: a bit for each token of a row, in words, or null. known: the step's
// tokens.
template <Sampling S>
KERNEL_OCCUPANCY(S.threads, 1)
sample_rows(const Sizes* sizes, const SamplingRow* rows, const TokenCount* entries, float* saved,
            const uint32_t* allowed, const int32_t* known, const int32_t* logit_rows, float* logits,
            SampledRow* sampled, TopLogprobs* tops) {
  static_assert(S.vocab <= 1 << (63 - MASS_BITS), "sums of weights need more than 64 bits");
  int index = block_x(), count = sizes->logit_rows();
  if (index >= count) return;
  auto& m = *shared_memory<SamplingMemory<S.threads>>();
  const SamplingRow& row = rows[index];
  float* x = logits + int64_t{index} * S.stride;
  int history_begin = index ? rows[index - 1].history_end : 0;
  int bias_begin = index ? rows[index - 1].bias_end : 0;
  int biases = rows[count - 1].history_end;  // where they begin
  Adjustment<S.threads> adjustment = {row,
                                      entries + history_begin,
                                      reinterpret_cast<const TokenBias*>(entries + biases) + bias_begin,
                                      saved + history_begin,
                                      saved + biases + bias_begin,
                                      row.history_end - history_begin,
                                      row.bias_end - bias_begin};
  if (!adjustment.penalized()) adjustment.num_history = 0;
  adjustment.resolve(m.select, known + logit_rows[index]);
  bool changes = allowed || adjustment.num_history + adjustment.num_biases > 0;

  Row<S> own = {x, nullptr}, changed = own;
  if (allowed) changed.allowed = allowed + int64_t{index} * ceil_div(S.vocab, 32);
  SampledRow result = {0, RowStatus::ok, 0.0f};
  Largest largest = {};
  double log_total = 0;
  if (row.logprobs || !changes) {
    largest = largest_of(m.select, own);
    result.status = status_of(largest);
    if (row.logprobs && result.status == RowStatus::ok)
      log_total = log_probabilities(m, row, own, largest, tops + index);
  }
  if (result.status == RowStatus::ok) {
    if (changes) {
      adjustment.apply(x);
      largest = largest_of(m.select, changed);
      result.status = status_of(largest);
    }
    if (result.status == RowStatus::ok) result.token = sample(m, row, changed, largest);
    if (changes) adjustment.restore(x);
  }
  if (thread_index() > 0) return;
  if (row.logprobs && result.status == RowStatus::ok)
    result.logprob = static_cast<float>(x[result.token] - log_total);
  sampled[index] = result;
}

}  // namespace enginewright
