// Rotary position embedding, Su et al. 2021 (arXiv:2104.09864), half-split ("neox") pairs, and the KV write.
//
//   rope_table@1     cos, sin [tokens, R/2] = cos, sin(position * inv_freq) * scale. The product is fp32, as
//                    models were trained with it; its cosine is exact to the last bit or so.
//   rope@1           out = rope(x), f32.
//   rope_kv_write@1  rope(q) to q_out, rope(k) and v to the planes at `slots`, as attention reads them
//   (kv.h).
//   rope_queries@1   rope(q) to q_out alone, for attention to what another layer wrote to the planes.
//                    (x[i], x[i + R/2]) turns by angle i for i < R/2; dims from R on pass unchanged. Without
//                    cos and sin all of them do.
//
// x, out, q: f32 [tokens, heads * D]; k, v: f32 [tokens, kv_heads * D]; cos, sin: f32 [tokens, R/2], R <= D;
// slots: i32 step input [tokens]; key, value: planes (kv.h); q_out: bf16 [tokens, heads * D].
// Threads share heads of tokens.
#pragma once

#include "kv.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class RopeTable final : public Kernel {
 public:
  RopeTable(const Operands& operands, const Attributes& attributes)
      : positions_(step_input(operands, "positions")),
        inv_freq_(vector_weight(operands, "inv_freq", operand(operands, "inv_freq").columns)),
        cos_(matrix(operands, "cos", DType::f32)),
        sin_(matrix(operands, "sin", DType::f32)),
        scale_(static_cast<float>(number(attributes, "scale"))) {
    require_known(operands, attributes, {"positions", "inv_freq", "cos", "sin"}, {"scale"});
    require_columns(positions_, 1);
    for (const Operand* table : {&cos_, &sin_}) {
      require_same_rows(positions_, *table);
      require_columns(*table, inv_freq_.columns);
    }
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&inv_freq_, &cos_, &sin_}, sizes);
    work.fp32_ops = 5 * cos_.rows.at(sizes) * cos_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t half = inv_freq_.columns;
    const Range mine = share(positions_.rows.at(sizes) * half, worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t token = item / half, i = item % half;
      const auto position = static_cast<float>(positions_.as<const int32_t>()[token * positions_.stride]);
      const double angle = position * inv_freq_.as<const float>()[i];
      cos_.as<float>()[token * cos_.stride + i] = static_cast<float>(std::cos(angle)) * scale_;
      sin_.as<float>()[token * sin_.stride + i] = static_cast<float>(std::sin(angle)) * scale_;
    }
  }

 private:
  const Operand positions_, inv_freq_, cos_, sin_;
  const float scale_;
};

// A head, turned by a token's angles, `half` of them.
template <class S>
ENGINEWRIGHT_INLINE void rotate_head(const float* x, const float* cos, const float* sin, int64_t half,
                                     int64_t head_dim, float* out) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i < 16 ? half - i : 16;  // mostly 16: what masks have stored is slow to load
    const auto load = [n](const float* p) { return n < 16 ? S::load_first(p, n) : S::load(p); };
    const auto store = [n](float* p, typename S::F v) { n < 16 ? S::store_first(p, v, n) : S::store(p, v); };
    const auto a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(out + i, S::sub(S::mul(a, c), S::mul(b, s)));
    store(out + half + i, S::add(S::mul(b, c), S::mul(a, s)));
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) out[i] = x[i];
}

template <class S>
class Rope final : public Kernel {
 public:
  Rope(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::f32)),
        cos_(matrix(operands, "cos", DType::f32)),
        sin_(matrix(operands, "sin", DType::f32)),
        out_(matrix(operands, "out", DType::f32)),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        head_dim_(x_.columns / heads_) {
    require_known(operands, attributes, {"x", "cos", "sin", "out"}, {"heads"});
    for (const Operand* other : {&cos_, &sin_, &out_}) require_same_rows(x_, *other);
    require(x_.columns % heads_ == 0, "'heads' does not divide the columns of 'x'");
    require_columns(out_, x_.columns);
    require_columns(sin_, cos_.columns);
    require(2 * cos_.columns <= head_dim_, "the rotation is wider than a head");
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&x_, &cos_, &sin_, &out_}, sizes);
    work.fp32_ops = 6 * x_.rows.at(sizes) * heads_ * cos_.columns;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(x_.rows.at(sizes) * heads_, worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t token = item / heads_, column = item % heads_ * head_dim_;
      rotate_head<S>(x_.as<const float>() + token * x_.stride + column,
                     cos_.as<const float>() + token * cos_.stride,
                     sin_.as<const float>() + token * sin_.stride, cos_.columns, head_dim_,
                     out_.as<float>() + token * out_.stride + column);
    }
  }

 private:
  const Operand x_, cos_, sin_, out_;
  const int64_t heads_, head_dim_;
};

// Queries, the tables that they are turned by, and the planes that they are meant for.
template <class S>
class QueryRows {
 public:
  QueryRows(const Operands& operands, const Attributes& attributes)
      : q_(matrix(operands, "q", DType::f32)),
        turns_(operands.count("cos") != 0),
        cos_(turns_ ? matrix(operands, "cos", DType::f32) : Operand{}),
        sin_(turns_ ? matrix(operands, "sin", DType::f32) : Operand{}),
        q_out_(matrix(operands, "q_out", DType::bf16)),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        kv_heads_(integer(attributes, "kv_heads", 1, 1 << 16)),
        head_dim_(integer(attributes, "head_dim", 1, 1 << 16)),
        keys_(cache_plane(operands, "key")),
        values_(cache_plane(operands, "value")),
        half_(cos_.columns),
        writer_(keys_, values_) {
    require_same_rows(q_, q_out_);
    require(turns_ == (operands.count("sin") != 0), "'cos' and 'sin' are there together or not at all");
    if (turns_) {
      for (const Operand* table : {&cos_, &sin_}) require_same_rows(q_, *table);
    }
    require_columns(q_, heads_ * head_dim_);
    require_columns(q_out_, heads_ * head_dim_);
    require_columns(sin_, half_);
    require(2 * half_ <= head_dim_, "the rotation is wider than a head");
    require_planes(keys_, values_, kv_heads_, head_dim_);
  }

 protected:
  static const float* row(const Operand& x, int64_t token, int64_t column) {
    return x.as<const float>() + token * x.stride + column;
  }

  // x, a head, turned; head_dim floats.
  ENGINEWRIGHT_INLINE void rotate(const float* x, int64_t token, float* out) const {
    rotate_head<S>(x, row(cos_, token, 0), row(sin_, token, 0), half_, head_dim_, out);
  }

  // scratch: room for a head.
  void write_query(int64_t token, int64_t head, std::byte* scratch) const {
    auto* turned = reinterpret_cast<float*>(scratch);
    rotate(row(q_, token, head * head_dim_), token, turned);
    writer_.write_query(turned, q_out_.as<uint16_t>() + token * q_out_.stride + head * head_dim_);
    if (head == heads_ - 1) RowWriter<S>(q_out_, token).zero_pad(q_out_);
  }

  const Operand q_;
  const bool turns_;
  const Operand cos_, sin_, q_out_;
  const int64_t heads_, kv_heads_, head_dim_;
  const CachePlane keys_, values_;
  const int64_t half_;
  const KvWriter<S> writer_;
};

template <class S>
class RopeQueries final : public Kernel, private QueryRows<S> {
 public:
  RopeQueries(const Operands& operands, const Attributes& attributes) : QueryRows<S>(operands, attributes) {
    require_known(operands, attributes, {"q", "cos", "sin", "key", "value", "q_out"},
                  {"heads", "kv_heads", "head_dim"});
  }

  int64_t scratch_bytes() const override { return this->keys_.dim_pad * 4; }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&this->q_, &this->cos_, &this->sin_, &this->q_out_}, sizes);
    work.fp32_ops = 6 * this->q_.rows.at(sizes) * this->heads_ * this->half_;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(this->q_.rows.at(sizes) * this->heads_, worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      this->write_query(item / this->heads_, item % this->heads_, worker.scratch);
    }
  }
};

template <class S>
class RopeKvWrite final : public Kernel, private QueryRows<S> {
  using Base = QueryRows<S>;
  using Base::cos_, Base::half_, Base::head_dim_, Base::heads_, Base::keys_, Base::kv_heads_, Base::q_,
      Base::q_out_, Base::sin_, Base::values_, Base::writer_;

 public:
  RopeKvWrite(const Operands& operands, const Attributes& attributes)
      : Base(operands, attributes),
        k_(matrix(operands, "k", DType::f32)),
        v_(matrix(operands, "v", DType::f32)),
        slots_(step_input(operands, "slots")) {
    require_known(operands, attributes, {"q", "k", "v", "cos", "sin", "slots", "key", "value", "q_out"},
                  {"heads", "kv_heads", "head_dim"});
    for (const Operand* other : {&k_, &v_, &slots_}) require_same_rows(q_, *other);
    require_columns(k_, kv_heads_ * head_dim_);
    require_columns(v_, kv_heads_ * head_dim_);
    require_columns(slots_, 1);
  }

  int64_t scratch_bytes() const override { return keys_.dim_pad * 4 + writer_.scratch_bytes(); }

  void add_checks(StepChecks& checks) const override {
    checks.indices.push_back({slots_, Linear{keys_.num_blocks * keys_.block_size, {}}});
  }

  Work work(const Sizes& sizes) const override {
    Work work = touched({&q_, &k_, &v_, &cos_, &sin_, &q_out_}, sizes);
    work.kv_bytes = q_.rows.at(sizes) * (keys_.token_bytes() + values_.token_bytes());
    work.fp32_ops = 6 * q_.rows.at(sizes) * (heads_ + kv_heads_) * half_;
    if (keys_.scaled()) work.fp32_ops += 4 * q_.rows.at(sizes) * 2 * kv_heads_ * head_dim_;
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const int64_t units = heads_ + kv_heads_;
    const Range mine = share(q_.rows.at(sizes) * units, worker);
    for (int64_t item = mine.begin; item < mine.end; ++item) {
      const int64_t token = item / units, unit = item % units;
      if (unit < heads_) {
        this->write_query(token, unit, worker.scratch);
      } else {
        write_kv(token, unit - heads_, worker.scratch);
      }
    }
  }

 private:
  void write_kv(int64_t token, int64_t head, std::byte* scratch) const {
    auto* turned = reinterpret_cast<float*>(scratch);
    this->rotate(this->row(k_, token, head * head_dim_), token, turned);
    writer_.write(turned, this->row(v_, token, head * head_dim_),
                  slots_.as<const int32_t>()[token * slots_.stride], head, scratch + keys_.dim_pad * 4);
  }

  const Operand k_, v_, slots_;
};

}  // namespace
}  // namespace enginewright
