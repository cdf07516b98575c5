// Depthwise causal convolution over the tokens of a sequence, with the last inputs as its state.
//
//   causal_conv@1  u[t] = before[t] * x[t]
//                  out[t] = behind[t] * f(bias + sum over j of taps[:, j] * u[t - (W - 1) + j])
//
// x, before?, behind?: f32 [tokens, C]; taps: f32 r16_columns [C, W], W >= 2; bias?: f32 [C]; out: f32 or
// bf16 [tokens, C]; f: silu or nothing. state: f32 [W - 1][C] a sequence, u of the tokens before, the oldest
// first; in a sequence without any they are zeros. In Mamba and the gated delta net (arXiv:2312.00752,
// arXiv:2412.06464) f is silu, and there are no gates; LFM2 has both gates, and no f (arXiv:2511.23404).
// Threads share pieces of channels of all sequences; taps are added in ascending order.
#pragma once

#include "recurrence.h"
#include "rows.h"
#include "simd_math.h"

namespace enginewright {
namespace {

template <class S>
class CausalConv final : public Kernel {
 public:
  CausalConv(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        taps_(operand(operands, "taps")),
        out_(float_matrix(operands, "out")),
        before_(gate(operands, "before")),
        behind_(gate(operands, "behind")),
        bias_(operands.count("bias") != 0
                  ? vector_weight(operands, "bias", x_.columns).template as<const float>()
                  : nullptr),
        width_(taps_.columns),
        silu_(text(attributes, "activation") == "silu"),
        sequences_(operands, x_, (width_ - 1) * x_.columns) {
    require_known(operands, attributes,
                  {"x", "taps", "bias", "before", "behind", "state", "query_start", "slots", "out"},
                  {"activation"});
    require(silu_ || text(attributes, "activation") == "none", "the activation must be silu or none");
    require(taps_.kind == Operand::Kind::weight && taps_.dtype == DType::f32 &&
                taps_.layout == Layout::r16_columns && taps_.max_rows == x_.columns,
            "'taps' must be f32 in r16_columns, with a row for each column of 'x'");
    require(2 <= width_ && width_ <= kMaxTaps, "'taps' must have 2 to 8 columns");
    require_same_rows(x_, out_);
    require_columns(out_, x_.columns);
  }

  void add_checks(StepChecks& checks) const override { sequences_.add_checks(checks); }

  Work work(const Sizes& sizes) const override {
    Work work =
        touched({&x_, &taps_, before_ ? &*before_ : nullptr, behind_ ? &*behind_ : nullptr, &out_}, sizes);
    work.kv_bytes = sequences_.moved_bytes(sizes);
    const int64_t of_element = 2 * width_ + (before_ ? 1 : 0) + (behind_ ? 1 : 0) + (silu_ ? 3 : 0);
    work.fp32_ops = of_element * x_.rows.at(sizes) * x_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t pieces = (x_.columns + kPieceColumns - 1) / kPieceColumns;
    const Range mine = share(pieces * sizes[kSequences], worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t s = item % sizes[kSequences], begin = item / sizes[kSequences] * kPieceColumns;
      const int64_t end = begin + kPieceColumns < x_.columns ? begin + kPieceColumns : x_.columns;
      run_piece(sequences_.tokens(s), sequences_.state(s), begin, end);
    }
  }

 private:
  using F = typename S::F;
  static constexpr int64_t kMaxTaps = 8, kPieceColumns = 256;

  // Inputs of one position: a row of x and its gate, or of the state, which has been gated.
  struct Input {
    const float *x, *gate;
    ENGINEWRIGHT_INLINE F at(int64_t column, int64_t n) const {
      const auto load = [n](const float* p) { return n < 16 ? S::load_first(p, n) : S::load(p); };
      const F value = load(x + column);
      return gate == nullptr ? value : S::mul(load(gate + column), value);
    }
  };

  static std::optional<Operand> gate(const Operands& operands, const std::string& name) {
    if (operands.count(name) == 0) return std::nullopt;
    const Operand& x = operand(operands, "x");
    const Operand& gate = matrix(operands, name, DType::f32);
    require_same_rows(x, gate);
    require_columns(gate, x.columns);
    return gate;
  }
  static const float* row(const Operand& x, int64_t token) { return x.as<const float>() + token * x.stride; }

  // The token `token`, of those that begin with `first`; before that, of the state.
  Input input(int64_t token, int64_t first, const float* state) const {
    if (token < first) return {state + (token - first + width_ - 1) * x_.columns, nullptr};
    return {row(x_, token), before_ ? row(*before_, token) : nullptr};
  }

  void run_piece(Range tokens, float* state, int64_t begin, int64_t end) const {
    Input inputs[kMaxTaps];
    for (int64_t token = tokens.begin; token < tokens.end; ++token) {
      for (int64_t j = 0; j < width_; ++j) {
        inputs[j] = input(token - (width_ - 1) + j, tokens.begin, state);
      }
      const float* behind = behind_ ? row(*behind_, token) : nullptr;
      const RowWriter<S> out(out_, token);
      for (int64_t column = begin; column < end; column += 16) {
        const int64_t n = end - column < 16 ? end - column : 16;
        const auto load = [n](const float* p) { return n < 16 ? S::load_first(p, n) : S::load(p); };
        const float* taps = taps_.as<const float>() + column * width_;
        F sum = bias_ == nullptr ? S::zero() : load(bias_ + column);
        for (int64_t j = 0; j < width_; ++j) {
          sum = S::fma(S::load(taps + 16 * j), inputs[j].at(column, n), sum);
        }
        if (silu_) sum = silu<S>(sum);
        if (behind != nullptr) sum = S::mul(load(behind + column), sum);
        n < 16 ? out.put_first(column, sum, n) : out.put(column, sum);
      }
      if (end == x_.columns) out.zero_pad(out_);
    }
    // What the next step reads. Rows move towards the oldest: each is read before it is written.
    for (int64_t j = 0; j < width_ - 1; ++j) {
      const Input last = input(tokens.end - (width_ - 1) + j, tokens.begin, state);
      for (int64_t column = begin; column < end; column += 16) {
        const int64_t n = end - column < 16 ? end - column : 16;
        const F value = last.at(column, n);
        float* to = state + j * x_.columns + column;
        n < 16 ? S::store_first(to, value, n) : S::store(to, value);
      }
    }
  }

  const Operand x_, taps_, out_;
  const std::optional<Operand> before_, behind_;
  const float* const bias_;
  const int64_t width_;
  const bool silu_;
  const StateSequences sequences_;
};

}  // namespace
}  // namespace enginewright
