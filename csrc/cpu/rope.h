// Rotary position embedding, Su et al. 2021 (arXiv:2104.09864), half-split ("neox") pairs, and the KV write.
//
//   rope_table@1     cos, sin [tokens, R/2] = cos, sin(position * inv_freq) * scale. The product is fp32, as
//                    models were trained with it; its cosine is exact to the last bit or so.
//   rope_kv_write@1  bf16(rope(q)) to q_out, rope(k) and v to the planes at `slots`, as bf16, or as int8 or
//                    e4m3 with a scale a row of head_dim (quantize.h has the rule).
//                    (x[i], x[i + R/2]) turns by angle i for i < R/2; dims from R on pass unchanged.
//
// q: f32 [tokens, heads * D]; k, v: f32 [tokens, kv_heads * D]; cos, sin: f32 [tokens, R/2], R <= D;
// slots: i32 step input [tokens]; key, value: planes (kernel.h); q_out: bf16 [tokens, heads * D].
// Threads share heads of tokens. Tokens of one V or K line may be different threads' work: they write
// different bytes.
#pragma once

#include "operands.h"
#include "quantize.h"
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

template <class S>
class RopeKvWrite final : public Kernel {
 public:
  RopeKvWrite(const Operands& operands, const Attributes& attributes)
      : q_(matrix(operands, "q", DType::f32)),
        k_(matrix(operands, "k", DType::f32)),
        v_(matrix(operands, "v", DType::f32)),
        cos_(matrix(operands, "cos", DType::f32)),
        sin_(matrix(operands, "sin", DType::f32)),
        q_out_(matrix(operands, "q_out", DType::bf16)),
        slots_(step_input(operands, "slots")),
        heads_(integer(attributes, "heads", 1, 1 << 16)),
        kv_heads_(integer(attributes, "kv_heads", 1, 1 << 16)),
        head_dim_(integer(attributes, "head_dim", 1, 1 << 16)),
        keys_(cache_plane(operands, "key")),
        values_(cache_plane(operands, "value")),
        half_(cos_.columns) {
    require_known(operands, attributes, {"q", "k", "v", "cos", "sin", "slots", "key", "value", "q_out"},
                  {"heads", "kv_heads", "head_dim"});
    for (const Operand* other : {&k_, &v_, &cos_, &sin_, &q_out_, &slots_}) require_same_rows(q_, *other);
    require_columns(q_, heads_ * head_dim_);
    require_columns(q_out_, heads_ * head_dim_);
    require_columns(k_, kv_heads_ * head_dim_);
    require_columns(v_, kv_heads_ * head_dim_);
    require_columns(sin_, half_);
    require_columns(slots_, 1);
    require(2 * half_ <= head_dim_, "the rotation is wider than a head");
    require_planes(keys_, values_, kv_heads_, head_dim_);
  }

  int64_t scratch_bytes() const override { return keys_.dim_pad * 8; }  // a head in f32, two in bf16

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
        write_query(token, unit, worker.scratch);
      } else {
        write_kv(token, unit - heads_, worker.scratch);
      }
    }
  }

 private:
  const float* row(const Operand& x, int64_t token, int64_t column) const {
    return x.as<const float>() + token * x.stride + column;
  }

  // x, a head, turned; head_dim floats.
  ENGINEWRIGHT_INLINE void rotate(const float* x, int64_t token, float* out) const {
    const float *cos = row(cos_, token, 0), *sin = row(sin_, token, 0);
    for (int64_t i = 0; i < half_; i += 16) {
      const int64_t n = half_ - i < 16 ? half_ - i : 16;  // mostly 16: what masks have stored is slow to load
      const auto load = [n](const float* p) { return n < 16 ? S::load_first(p, n) : S::load(p); };
      const auto store = [n](float* p, typename S::F v) {
        n < 16 ? S::store_first(p, v, n) : S::store(p, v);
      };
      const auto a = load(x + i), b = load(x + half_ + i), c = load(cos + i), s = load(sin + i);
      store(out + i, S::sub(S::mul(a, c), S::mul(b, s)));
      store(out + half_ + i, S::add(S::mul(b, c), S::mul(a, s)));
    }
    for (int64_t i = 2 * half_; i < head_dim_; ++i) out[i] = x[i];
  }

  // n floats to bf16.
  static ENGINEWRIGHT_INLINE void round(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) S::store_bf16(out + i, S::load(x + i));
    if (i < n) S::store_bf16_first(out + i, S::load_first(x + i, n - i), n - i);
  }

  void write_query(int64_t token, int64_t head, std::byte* scratch) const {
    auto* turned = reinterpret_cast<float*>(scratch);
    rotate(row(q_, token, head * head_dim_), token, turned);
    round(turned, head_dim_, q_out_.as<uint16_t>() + token * q_out_.stride + head * head_dim_);
    if (head == heads_ - 1) RowWriter<S>(q_out_, token).zero_pad(q_out_);
  }

  void write_kv(int64_t token, int64_t head, std::byte* scratch) const {
    auto* turned = reinterpret_cast<float*>(scratch);
    rotate(row(k_, token, head * head_dim_), token, turned);
    const float* value = row(v_, token, head * head_dim_);
    const int64_t slot = slots_.as<const int32_t>()[token * slots_.stride];
    const int64_t at = slot % keys_.block_size;
    const int64_t tile = slot / keys_.block_size * keys_.block_stride + head * keys_.tile_bytes;
    std::byte* rounded = scratch + keys_.dim_pad * 4;
    if (keys_.dtype == DType::i8) {
      write_codes<I8Rounding>(turned, value, at, tile, reinterpret_cast<int8_t*>(rounded));
    } else if (keys_.dtype == DType::e4m3) {
      write_codes<E4m3Rounding>(turned, value, at, tile, reinterpret_cast<uint8_t*>(rounded));
    } else {
      write_bf16(turned, value, at, tile, reinterpret_cast<uint16_t*>(rounded));
    }
  }

  // Position `at` of a tile, (head_dim) each. rounded: room for two heads.
  void write_bf16(const float* k, const float* v, int64_t at, int64_t tile, uint16_t* key) const {
    const int64_t width = keys_.dim_pad;
    uint16_t* value = key + width;
    round(k, head_dim_, key);
    round(v, head_dim_, value);
    for (int64_t i = head_dim_; i < width; ++i) key[i] = value[i] = 0;
    auto* keys = reinterpret_cast<uint16_t*>(keys_.data + tile) + at / 16 * 16 * width + at % 16 * 2;
    for (int64_t i = 0; i < width; i += 2) std::memcpy(keys + i * 16, key + i, 4);
    auto* values = reinterpret_cast<uint16_t*>(values_.data + tile) + at / 2 * 2 * width + at % 2;
    for (int64_t i = 0; i < width; ++i) values[2 * i] = value[i];
  }
  template <class Rounding, class Code>
  void write_codes(const float* k, const float* v, int64_t at, int64_t tile, Code* key) const {
    const int64_t width = keys_.dim_pad;
    Code* value = key + width;
    const float k_scale = quantize_run<S, Rounding>(RowReader<S>(k), 0, head_dim_, key),
                v_scale = quantize_run<S, Rounding>(RowReader<S>(v), 0, head_dim_, value);
    for (int64_t i = head_dim_; i < width; ++i) key[i] = value[i] = 0;
    auto *keys = reinterpret_cast<Code*>(keys_.data + tile),
         *values = reinterpret_cast<Code*>(values_.data + tile);
    reinterpret_cast<float*>(keys + keys_.code_bytes())[at] = k_scale;
    reinterpret_cast<float*>(values + keys_.code_bytes())[at] = v_scale;
    keys += at / 16 * 16 * width + at % 16 * 4;
    for (int64_t i = 0; i < width; i += 4) std::memcpy(keys + i * 16, key + i, 4);
    values += at / 4 * 4 * width + at % 4;
    for (int64_t i = 0; i < width; ++i) values[4 * i] = value[i];
  }

  const Operand q_, k_, v_, cos_, sin_, q_out_, slots_;
  const int64_t heads_, kv_heads_, head_dim_;
  const CachePlane keys_, values_;
  const int64_t half_;
};

}  // namespace
}  // namespace enginewright
