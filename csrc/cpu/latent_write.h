// What latent attention reads of new tokens (arXiv:2405.04434; plugins/attention/latent_attention.py has the
// formulas).
//
//   latent_write@1  q_out: bf16 [tokens, heads * (C + R)], each head its C columns of q, then its R columns
//   of
//                   q_rope, rotated as rope.h says; to the plane at `slots`, c and then k_rope, rotated.
//
// q: f32 [tokens, heads * C]; q_rope: f32 [tokens, heads * R]; c: f32 [tokens, C]; k_rope: f32 [tokens, R];
// cos, sin: f32 [tokens, R/2]; slots: i32 step input [tokens]; latent: a plane of one head, bf16, which lies
// as keys do (kernel.h). Threads share heads of tokens.
#pragma once

#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class LatentWrite final : public Kernel {
 public:
  LatentWrite(const Operands& operands, const Attributes& attributes)
      : q_(matrix(operands, "q", DType::f32)),
        q_rope_(matrix(operands, "q_rope", DType::f32)),
        c_(matrix(operands, "c", DType::f32)),
        k_rope_(matrix(operands, "k_rope", DType::f32)),
        cos_(matrix(operands, "cos", DType::f32)),
        sin_(matrix(operands, "sin", DType::f32)),
        q_out_(matrix(operands, "q_out", DType::bf16)),
        slots_(step_input(operands, "slots")),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        plane_(cache_plane(operands, "latent")),
        latent_(c_.columns),
        half_(cos_.columns) {
    require_known(operands, attributes,
                  {"q", "q_rope", "c", "k_rope", "cos", "sin", "slots", "latent", "q_out"}, {"heads"});
    for (const Operand* other : {&q_rope_, &c_, &k_rope_, &cos_, &sin_, &q_out_, &slots_}) {
      require_same_rows(q_, *other);
    }
    require_columns(q_, heads_ * latent_);
    require_columns(q_rope_, heads_ * 2 * half_);
    require_columns(k_rope_, 2 * half_);
    require_columns(sin_, half_);
    require_columns(slots_, 1);
    require_columns(q_out_, heads_ * width());
    require_planes(plane_, plane_, 1, width());
    require(plane_.dtype == DType::bf16, "latent vectors are stored as bf16");
  }

  int64_t scratch_bytes() const override { return plane_.dim_pad * 6; }  // a head in f32, and in bf16

  void add_checks(StepChecks& checks) const override {
    checks.indices.push_back({slots_, Linear{plane_.num_blocks * plane_.block_size, {}}});
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&q_, &q_rope_, &c_, &k_rope_, &cos_, &sin_, &q_out_}, sizes);
    work.kv_bytes = q_.rows.at(sizes) * plane_.token_bytes();
    work.fp32_ops = 6 * q_.rows.at(sizes) * (heads_ + 1) * half_;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t units = heads_ + 1;
    const Range mine = share(q_.rows.at(sizes) * units, worker);
    auto* joined = reinterpret_cast<float*>(worker.scratch);
    auto* rounded = reinterpret_cast<uint16_t*>(joined + plane_.dim_pad);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t token = item / units, head = item % units;
      if (head < heads_) {
        write_query(token, head, joined);
      } else {
        write_latent(token, joined, rounded);
      }
    }
  }

 private:
  int64_t width() const { return latent_ + 2 * half_; }
  static const float* row(const Operand& x, int64_t token, int64_t column) {
    return x.as<const float>() + token * x.stride + column;
  }

  // width() floats: `latent`, then `turned`, rotated.
  void join(const float* latent, const float* turned, int64_t token, float* out) const {
    std::memcpy(out, latent, static_cast<size_t>(latent_) * sizeof(float));
    const float *cos = row(cos_, token, 0), *sin = row(sin_, token, 0);
    out += latent_;
    for (int64_t i = 0; i < half_; ++i) {
      const float a = turned[i], b = turned[half_ + i];
      out[i] = a * cos[i] - b * sin[i];
      out[half_ + i] = b * cos[i] + a * sin[i];
    }
  }
  void round(const float* x, uint16_t* out) const {
    int64_t i = 0;
    for (; i + 16 <= width(); i += 16) S::store_bf16(out + i, S::load(x + i));
    if (i < width()) S::store_bf16_first(out + i, S::load_first(x + i, width() - i), width() - i);
  }

  void write_query(int64_t token, int64_t head, float* joined) const {
    join(row(q_, token, head * latent_), row(q_rope_, token, head * 2 * half_), token, joined);
    round(joined, q_out_.as<uint16_t>() + token * q_out_.stride + head * width());
    if (head == heads_ - 1) RowWriter<S>(q_out_, token).zero_pad(q_out_);
  }

  void write_latent(int64_t token, float* joined, uint16_t* rounded) const {
    join(row(c_, token, 0), row(k_rope_, token, 0), token, joined);
    round(joined, rounded);
    for (int64_t i = width(); i < plane_.dim_pad; ++i) rounded[i] = 0;
    const int64_t slot = slots_.as<const int32_t>()[token * slots_.stride], at = slot % plane_.block_size;
    auto* tile = reinterpret_cast<uint16_t*>(plane_.data + slot / plane_.block_size * plane_.block_stride);
    uint16_t* lines = tile + at / 16 * 16 * plane_.dim_pad + at % 16 * 2;
    for (int64_t i = 0; i < plane_.dim_pad; i += 2) std::memcpy(lines + i * 16, rounded + i, 4);
  }

  const Operand q_, q_rope_, c_, k_rope_, cos_, sin_, q_out_, slots_;
  const int64_t heads_;
  const CachePlane plane_;
  const int64_t latent_, half_;
};

}  // namespace
}  // namespace enginewright
