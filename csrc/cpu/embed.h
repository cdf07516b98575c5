// Embedding: out[t] = table[tokens[t]] * scale.
//
//   embed_bf16@1  table: bf16 r16 [V, H]
//   embed_w8@1    table: i8 r16 [V, H], table_scale: f32 [V]; out = (table * table_scale) * scale
//
// tokens: i32 step input [rows]; out: f32 [rows, H]. The table has the layout of the head's weight, so that a
// tied one is stored once: a row of it is 4 bytes in each of the block's 64-byte lines.
#pragma once

#include <cstring>

#include "operands.h"

namespace enginewright {
namespace {

struct EmbedOperands {
  Operand tokens, table, out;
  float scale;

  EmbedOperands(const Operands& operands, const Attributes& attributes, DType dtype)
      : tokens(step_input(operands, "tokens")),
        table(operand(operands, "table")),
        out(matrix(operands, "out", DType::f32)),
        scale(static_cast<float>(number(attributes, "scale"))) {
    require(table.kind == Operand::Kind::weight && table.layout == Layout::r16 && table.dtype == dtype,
            std::string("'table' must be an r16 weight of ") + name_of(dtype));
    require_same_rows(tokens, out);
    require_columns(out, table.columns);
  }

  // A row lies in all lines of its block. operations: an element.
  Work work(const Sizes& sizes, int64_t operations) const {
    Work work = touched({&out}, sizes);
    work.weight_bytes = out.rows.at(sizes) * block_bytes();
    work.fp32_ops = operations * out.rows.at(sizes) * out.columns;
    return work;
  }

  int64_t block_bytes() const { return 16 * table.stride * bytes_of(table.dtype); }

  // The 4-byte words of a row of the table: word i holds the elements from i * (4 / itemsize).
  const std::byte* words(int32_t token) const {
    return table.data + token / 16 * block_bytes() + token % 16 * 4;
  }
};

template <class S>
class EmbedBf16 final : public Kernel {
 public:
  EmbedBf16(const Operands& operands, const Attributes& attributes) : o_(operands, attributes, DType::bf16) {
    require_known(operands, attributes, {"tokens", "table", "out"}, {"scale"});
  }
  void add_checks(StepChecks& checks) const override { checks.indices.push_back({o_.tokens, o_.table.rows}); }
  Work work(const Sizes& sizes) const override { return o_.work(sizes, 1); }
  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(o_.out.rows.at(sizes), worker);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const std::byte* words = o_.words(o_.tokens.as<const int32_t>()[t]);
      float* out = o_.out.as<float>() + t * o_.out.stride;
      for (int64_t h = 0; h < o_.out.columns; ++h) {
        uint16_t half;
        std::memcpy(&half, words + h / 2 * 64 + h % 2 * 2, 2);
        const uint32_t bits = uint32_t{half} << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        out[h] = value * o_.scale;
      }
    }
  }

 private:
  const EmbedOperands o_;
};

template <class S>
class EmbedW8 final : public Kernel {
 public:
  EmbedW8(const Operands& operands, const Attributes& attributes)
      : o_(operands, attributes, DType::i8),
        table_scale_(vector_weight(operands, "table_scale", o_.table.max_rows)) {
    require_known(operands, attributes, {"tokens", "table", "table_scale", "out"}, {"scale"});
  }
  void add_checks(StepChecks& checks) const override { checks.indices.push_back({o_.tokens, o_.table.rows}); }
  Work work(const Sizes& sizes) const override {
    Work work = o_.work(sizes, 2);
    work.weight_bytes += o_.out.rows.at(sizes) * 4;  // scales
    return work;
  }
  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(o_.out.rows.at(sizes), worker);
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      const int32_t token = o_.tokens.as<const int32_t>()[t];
      const std::byte* words = o_.words(token);
      const float row_scale = table_scale_.as<const float>()[token];
      float* out = o_.out.as<float>() + t * o_.out.stride;
      for (int64_t h = 0; h < o_.out.columns; ++h) {
        const auto value = static_cast<int8_t>(words[h / 4 * 64 + h % 4]);
        out[h] = static_cast<float>(value) * row_scale * o_.scale;
      }
    }
  }

 private:
  const EmbedOperands o_;
  const Operand table_scale_;
};

}  // namespace
}  // namespace enginewright
