// Linear recurrences: a state for each head, [K, V], that decays, adds a token's value under its key, and
// is read with its query. Token by token, in fp32.
//
//   gated_delta@1      The gated delta rule, Yang et al. 2024 (arXiv:2412.06464).
//                      dt = softplus(decay + dt_bias), g = exp(-exp(log_a) * dt), b = sigmoid(beta)
//                      k = key / sqrt(|key|^2 + epsilon), q = scale * query / sqrt(|query|^2 + epsilon)
//                      S = g S;  S = S + k (b (value - S^T k))^T;  out = S^T q
//                      With a decay for each row of S it is Kimi's, arXiv:2510.26692: g is diagonal.
//   selective_state@1  Mamba-2, Dao & Gu 2024 (arXiv:2405.21060), where query and key are called C and B.
//                      dt = max(softplus(decay + dt_bias), dt_min), g = exp(-exp(log_a) * dt)
//                      S = g S + key (dt value)^T;  out = S^T query + skip * value
//
// query, key: f32 [tokens, key_heads * K]; value, out: f32 [tokens, heads * V]; decay, beta: f32 [tokens,
// heads]; log_a, dt_bias, skip: f32 [heads]. Heads h * heads / key_heads ... share query and key head h.
// Of the gated delta rule decay may be f32 [tokens, heads * K], and dt_bias f32 [heads * K].
// state: f32 [heads, K, V] a sequence, laid out as [heads][V / 16][K][16]; the last columns of V, where they
// are fewer than 16, as [K][V % 16].
//
// Columns of V know nothing of each other: a few are taken through a tile of tokens with their part of S in
// the first cache. Rows of S are summed in kSums sums, by their index, and these in one tree. Threads share
// heads, parts of their columns where there are few, and in these sequences; so a long prompt among others
// is every thread's.
#pragma once

#include "recurrence.h"
#include "rows.h"
#include "simd_math.h"

namespace enginewright {
namespace {

template <class S, bool Delta>
class LinearRecurrence final : public Kernel {
 public:
  LinearRecurrence(const Operands& operands, const Attributes& attributes)
      : query_(matrix(operands, "query", DType::f32)),
        key_(matrix(operands, "key", DType::f32)),
        value_(matrix(operands, "value", DType::f32)),
        decay_(matrix(operands, "decay", DType::f32)),
        beta_(matrix(operands, Delta ? "beta" : "decay", DType::f32)),
        out_(matrix(operands, "out", DType::f32)),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        key_heads_(integer(attributes, "key_heads", 1, 1 << 16)),
        rows_(key_.columns / key_heads_),
        columns_(value_.columns / heads_),
        by_row_(Delta && decay_.columns != heads_),
        log_a_(vector_weight(operands, "log_a", heads_).template as<const float>()),
        dt_bias_(vector_weight(operands, "dt_bias", decay_.columns).template as<const float>()),
        skip_(Delta ? nullptr : vector_weight(operands, "skip", heads_).template as<const float>()),
        scale_(Delta ? static_cast<float>(number(attributes, "scale")) : 1.0f),
        epsilon_(Delta ? static_cast<float>(number(attributes, "epsilon")) : 1.0f),
        dt_min_(Delta ? 0.0f : static_cast<float>(number(attributes, "dt_min"))),
        sequences_(operands, value_, heads_ * rows_ * columns_) {
    require_known(operands, attributes,
                  {"query", "key", "value", "decay", Delta ? "beta" : "skip", "log_a", "dt_bias", "state",
                   "query_start", "slots", "out"},
                  {"heads", "key_heads", Delta ? "scale" : "dt_min", Delta ? "epsilon" : "dt_min"});
    require(heads_ % key_heads_ == 0, "the number of heads is no multiple of 'key_heads'");
    require(rows_ >= 1 && columns_ >= 1, "a head has no columns");
    for (const Operand* other : {&query_, &key_, &decay_, &beta_, &out_}) require_same_rows(value_, *other);
    require_columns(key_, key_heads_ * rows_);
    require_columns(query_, key_.columns);
    require_columns(value_, heads_ * columns_);
    require_columns(out_, value_.columns);
    require_columns(decay_, by_row_ ? heads_ * rows_ : heads_);
    require_columns(beta_, heads_);
    require(epsilon_ > 0, "the attribute 'epsilon' must be positive");
  }

  void add_checks(StepChecks& checks) const override { sequences_.add_checks(checks); }

  int64_t scratch_bytes() const override { return kRows * kTile * row_floats() * 4; }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&query_, &key_, &value_, &decay_, &beta_, &out_}, sizes);
    work.kv_bytes = sequences_.moved_bytes(sizes);
    work.fp32_ops = (Delta ? 7 : 5) * value_.rows.at(sizes) * heads_ * rows_ * columns_;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t parts = heads_ < kItemsPerThread * worker.count ? groups() : 1;
    const Range mine = share(heads_ * parts * sizes[kSequences], worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t s = item % sizes[kSequences], part = item / sizes[kSequences] % parts;
      const int64_t head = item / sizes[kSequences] / parts;
      const Range own = parts == 1 ? Range{0, groups()} : Range{part, part + 1};
      float* const state = sequences_.state(s) + head * rows_ * columns_;
      float* const scratch = reinterpret_cast<float*>(worker.scratch);
      if (by_row_) {
        if constexpr (Delta) run_head<RowDecay>(sequences_.tokens(s), head, own, state, scratch);
      } else {
        run_head<HeadDecay>(sequences_.tokens(s), head, own, state, scratch);
      }
    }
  }

 private:
  using F = typename S::F;
  static constexpr int64_t kTile = 8;            // tokens
  static constexpr int64_t kRows = 4;            // of scratch, for each token: below
  static constexpr int64_t kItemsPerThread = 4;  // heads, or their columns are shared, too
  static constexpr int kSums = 4;
  // Vectors of columns that are summed at once: with kSums, as many sums as hide the latency of one.
  static constexpr int kVectors = S::tile_blocks / 2;
  static constexpr int64_t kGroup = 16 * kVectors;  // columns

  // What S is multiplied with before a token. Of S^T k the decay of a head is after the sum; that of a row
  // is in what the row is multiplied with, (rows).
  struct HeadDecay {
    float factor;
    ENGINEWRIGHT_INLINE float of_row(int64_t) const { return factor; }
    ENGINEWRIGHT_INLINE F of_sum(F sum) const { return S::mul(S::set1(factor), sum); }
  };
  struct RowDecay {
    const float* factors;  // (rows)
    ENGINEWRIGHT_INLINE float of_row(int64_t i) const { return factors[i]; }
    ENGINEWRIGHT_INLINE F of_sum(F sum) const { return sum; }
  };
  template <class Decay>
  struct Token {
    const float *query, *key;  // (rows), normalized
    const float* held;         // (rows), what is read of S: the key, with its rows' decays
    Decay decay;
    float beta;          // factor of a value that is added
    const float* value;  // of the head
    float* out;
    float skip;
  };

  int64_t row_floats() const { return round_up(rows_, 16); }
  int64_t groups() const { return (columns_ + kGroup - 1) / kGroup; }
  static const float* row(const Operand& x, int64_t token, int64_t column) {
    return x.as<const float>() + token * x.stride + column;
  }

  template <class Decay>
  void run_head(Range tokens, int64_t head, Range own, float* state, float* scratch) const {
    Token<Decay> tile[kTile];
    for (int64_t first = tokens.begin; first < tokens.end; first += kTile) {
      const int64_t count = tokens.end - first < kTile ? tokens.end - first : kTile;
      for (int64_t t = 0; t < count; ++t) {
        prepare(first + t, head, scratch + kRows * t * row_floats(), tile[t]);
      }
      for (int64_t group = own.begin; group < own.end; ++group) {
        const int64_t column = group * kGroup;
        float* part = state + column * rows_;
        if (column + kGroup <= columns_) {
          for (int64_t t = 0; t < count; ++t) step<kVectors>(tile[t], part, column);
        } else {
          run_last(tile, count, part, column);
        }
      }
    }
  }

  // Fewer columns than a group has.
  template <class Decay>
  void run_last(const Token<Decay>* tile, int64_t count, float* state, int64_t column) const {
    for (; column + 16 <= columns_; column += 16, state += 16 * rows_) {
      for (int64_t t = 0; t < count; ++t) step<1>(tile[t], state, column);
    }
    for (int64_t t = 0; column < columns_ && t < count; ++t) {
      step<1>(tile[t], state, column, columns_ - column);
    }
  }

  void prepare(int64_t token, int64_t head, float* scratch, Token<HeadDecay>& to) const {
    const float x = row(decay_, token, head)[0] + dt_bias_[head];
    const float dt = std::max(softplus(x), dt_min_);
    to.decay.factor = std::exp(-std::exp(log_a_[head]) * dt);
    place(token, head, scratch, to);
    to.held = to.key;
    if constexpr (!Delta) to.beta = dt;
  }

  void prepare(int64_t token, int64_t head, float* scratch, Token<RowDecay>& to) const {
    float *factors = scratch + 2 * row_floats(), *held = scratch + 3 * row_floats();
    const float rate = std::exp(log_a_[head]);
    const float *decay = row(decay_, token, head * rows_), *bias = dt_bias_ + head * rows_;
    place(token, head, scratch, to);
    for (int64_t i = 0; i < rows_; ++i) {
      factors[i] = std::exp(-rate * softplus(decay[i] + bias[i]));
      held[i] = factors[i] * to.key[i];
    }
    to.decay.factors = factors;
    to.held = held;
  }

  // Everything but the decay.
  template <class Decay>
  void place(int64_t token, int64_t head, float* scratch, Token<Decay>& to) const {
    const int64_t from = head / (heads_ / key_heads_) * rows_, column = head * columns_;
    to.query = row(query_, token, from);
    to.key = row(key_, token, from);
    to.value = row(value_, token, column);
    to.out = out_.as<float>() + token * out_.stride + column;
    if constexpr (Delta) {
      normalize(to.query, scale_, scratch);
      normalize(to.key, 1.0f, scratch + row_floats());
      to.query = scratch;
      to.key = scratch + row_floats();
      to.beta = 1.0f / (1.0f + std::exp(-row(beta_, token, head)[0]));
    } else {
      to.skip = skip_[head];
    }
  }

  // Above 20 it is the same number.
  static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

  void normalize(const float* x, float scale, float* out) const {
    const auto load = [&](int64_t i) {
      return rows_ - i < 16 ? S::load_first(x + i, rows_ - i) : S::load(x + i);
    };
    F sum = S::zero();
    for (int64_t i = 0; i < rows_; i += 16) sum = S::fma(load(i), load(i), sum);
    const float inverse = 1.0f / std::sqrt(S::reduce_add(sum) + epsilon_);
    const F factor = S::set1(inverse * scale);
    for (int64_t i = 0; i < rows_; i += 16) S::store(out + i, S::mul(load(i), factor));
  }

  // One token in `n` columns of a head from `column` on: V vectors of 16, or fewer columns than 16. Their
  // part of S is [V][rows][n].
  template <int V, class Decay>
  ENGINEWRIGHT_INLINE void step(const Token<Decay>& token, float* state, int64_t column,
                                int64_t n = 16) const {
    const bool tail = n < 16;
    const int64_t rows = rows_;  // no store can change it
    const auto load = [=](const float* p) { return tail ? S::load_first(p, n) : S::load(p); };
    const auto store = [=](float* p, F x) { tail ? S::store_first(p, x, n) : S::store(p, x); };
    F sums[kSums][V], taken[V];
    ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) { taken[v] = load(token.value + column + 16 * v); }
    if constexpr (Delta) {  // what S already holds under the key is not added again
      clear<V>(sums);
      const auto read = [&](int64_t i, int p) __attribute__((always_inline)) {
        const F k = S::set1(token.held[i]);
        ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) {
          sums[p][v] = S::fma(k, load(state + (v * rows + i) * n), sums[p][v]);
        }
      };
      for_rows(rows, read);
      ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) {
        taken[v] = S::sub(taken[v], token.decay.of_sum(total<V>(sums, v)));
      }
    }
    ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) taken[v] = S::mul(S::set1(token.beta), taken[v]);
    clear<V>(sums);
    const auto write = [&](int64_t i, int p) __attribute__((always_inline)) {
      const F k = S::set1(token.key[i]), q = S::set1(token.query[i]), g = S::set1(token.decay.of_row(i));
      ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) {
        float* at = state + (v * rows + i) * n;
        const F next = S::fma(k, taken[v], S::mul(g, load(at)));
        store(at, next);
        sums[p][v] = S::fma(q, next, sums[p][v]);
      }
    };
    for_rows(rows, write);
    ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) {
      F out = total<V>(sums, v);
      if constexpr (!Delta) out = S::fma(S::set1(token.skip), load(token.value + column + 16 * v), out);
      store(token.out + column + 16 * v, out);
    }
  }

  // f(i, i % kSums) of all rows.
  template <class Function>
  static ENGINEWRIGHT_INLINE void for_rows(int64_t rows, const Function& f) {
    int64_t i = 0;
    for (; i + kSums <= rows; i += kSums) {
      ENGINEWRIGHT_UNROLL for (int p = 0; p < kSums; ++p) f(i + p, p);
    }
    ENGINEWRIGHT_UNROLL for (int p = 0; p < kSums; ++p) {
      if (i + p < rows) f(i + p, p);
    }
  }
  template <int V>
  static ENGINEWRIGHT_INLINE void clear(F (&sums)[kSums][V]) {
    ENGINEWRIGHT_UNROLL for (int p = 0; p < kSums; ++p) {
      ENGINEWRIGHT_UNROLL for (int v = 0; v < V; ++v) sums[p][v] = S::zero();
    }
  }
  template <int V>
  static ENGINEWRIGHT_INLINE F total(const F (&sums)[kSums][V], int v) {
    return S::add(S::add(sums[0][v], sums[1][v]), S::add(sums[2][v], sums[3][v]));
  }

  const Operand query_, key_, value_, decay_, beta_, out_;
  const int64_t heads_, key_heads_, rows_, columns_;
  const bool by_row_;  // whether each row of S has a decay of its own
  const float *const log_a_, *const dt_bias_, *const skip_;
  const float scale_, epsilon_, dt_min_;
  const StateSequences sequences_;
};

}  // namespace
}  // namespace enginewright
