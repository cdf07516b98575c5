#include "adapter_embed.h"

#include <cstring>

#include "adapters.h"
#include "operands.h"

namespace enginewright {

namespace {

float to_float(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
float to_float(int8_t code) { return static_cast<float>(code); }

float scale_of(const FactorMatrix& matrix, int64_t row) {
  return matrix.scale == nullptr ? 1.0f : matrix.scale[row];
}

// A number of a matrix of `columns` columns, without the scale of its row.
float number_at(const FactorMatrix& matrix, int64_t columns, int64_t row, int64_t column) {
  const int64_t index = (row / 16 * columns + column) * 16 + row % 16;
  if (matrix.scale == nullptr) return to_float(reinterpret_cast<const uint16_t*>(matrix.data)[index]);
  return to_float(reinterpret_cast<const int8_t*>(matrix.data)[index]);
}

// sums = 16 rows of a matrix, which begin there, times x.
template <class Element>
void multiply(const Element* rows, const float* x, int64_t columns, float (&sums)[16]) {
  for (float& sum : sums) sum = 0.0f;
  for (int64_t k = 0; k < columns; ++k) {
    for (int64_t i = 0; i < 16; ++i) sums[i] += x[k] * to_float(rows[k * 16 + i]);
  }
}

class AdapterEmbed final : public Kernel {
 public:
  AdapterEmbed(const Operands& operands, const Attributes& attributes)
      : tokens_(step_input(operands, "tokens")),
        out_(matrix(operands, "out", DType::f32)),
        adapters_(adapters_of(operands, "adapters")),
        site_(operand(operands, "adapters").site),
        scale_(static_cast<float>(number(attributes, "scale"))) {
    require_known(operands, attributes, {"tokens", "adapters", "out"}, {"scale"});
    const AdapterSite& site = adapters_->site(site_);
    require(site.is_table, "'adapters' are of no table");
    static_assert(kTokens == 0);
    require(tokens_.rows == Linear{0, {1}}, "'tokens' must have a row for each token");
    require(out_.kind == Operand::Kind::arena, "'out' must be a buffer");
    require_same_rows(tokens_, out_);
    require_columns(out_, site.columns);
  }

  bool is_idle() const override { return !adapters_->changes(site_); }
  int64_t scratch_bytes() const override { return adapters_->max_rank() * 4; }
  void add_checks(StepChecks& checks) const override {
    checks.indices.push_back({tokens_, {adapters_->site(site_).rows, {}}});
    checks.adapters = adapters_;
  }

  Work work(const Sizes&) const override {
    Work work;
    for (const AdapterGroup& group : adapters_->rows(false).groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      int64_t numbers = 0;
      for (const AdapterPiece& piece : change.pieces) {
        work.weight_bytes += piece.count * piece.rank * piece.b.element_bytes();
        numbers += piece.count * piece.rank;
      }
      work.weight_bytes += group.count * change.rank * change.a.element_bytes();
      work.fp32_ops += group.count * (2 * numbers + out_.columns);
      work.activation_bytes += group.count * out_.columns * 4;
    }
    return work;
  }

  void run(const Sizes& sizes, Worker& worker) const override {
    const Range mine = share(out_.rows.at(sizes), worker);
    const int32_t* slots = adapters_->rows(false).slots();
    for (int64_t t = mine.begin; t < mine.end; ++t) {
      if (slots[t] < 0) continue;
      const SiteAdapter& change = adapters_->at(site_, slots[t]);
      const int32_t token = tokens_.as<const int32_t>()[t];
      float* out = out_.as<float>() + t * out_.stride;
      const int64_t place = change.replaced.first_from(token);
      if (place < change.replaced.count && change.replaced.ids[place] == token) {
        replace(change.replaced.rows, place, out);
      } else {
        add(change, token, reinterpret_cast<float*>(worker.scratch), out);
      }
    }
  }

 private:
  void replace(const FactorMatrix& rows, int64_t place, float* out) const {
    const float row_scale = scale_of(rows, place);
    for (int64_t h = 0; h < out_.columns; ++h) {
      out[h] = number_at(rows, out_.columns, place, h) * row_scale * scale_;
    }
  }

  // ranks: scratch for A[:, token].
  void add(const SiteAdapter& change, int32_t token, float* ranks, float* out) const {
    for (int64_t r = 0; r < change.rank; ++r) {
      ranks[r] = number_at(change.a, adapters_->site(site_).rows, r, token) * scale_of(change.a, r);
    }
    for (const AdapterPiece& piece : change.pieces) {
      for (int64_t begin = 0; piece.rank > 0 && begin < piece.count; begin += 16) {
        const int64_t end = piece.count - begin < 16 ? piece.count : begin + 16;
        const float* x = ranks + piece.first_rank;
        float sums[16];
        if (piece.b.scale == nullptr) {
          multiply(reinterpret_cast<const uint16_t*>(piece.b.data) + begin * piece.rank, x, piece.rank, sums);
        } else {
          multiply(reinterpret_cast<const int8_t*>(piece.b.data) + begin * piece.rank, x, piece.rank, sums);
        }
        for (int64_t h = begin; h < end; ++h) {
          out[piece.begin + h] += sums[h - begin] * scale_of(piece.b, h) * scale_;
        }
      }
    }
  }

  const Operand tokens_, out_;
  Adapters* const adapters_;
  const int64_t site_;
  const float scale_;
};

}  // namespace

std::unique_ptr<Kernel> make_adapter_embed(const Operands& operands, const Attributes& attributes) {
  return std::make_unique<AdapterEmbed>(operands, attributes);
}

}  // namespace enginewright
