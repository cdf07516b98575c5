// What adapters add to the products of linear layers (adapters.h has the mathematics).
//
//   adapter_delta@1  x: f32 or bf16 [rows, K], or i8 with x_scale: f32 [rows, G]; adapters; shrunk: f32
//   [rows,
//                    ranks], which only this kernel uses; delta: f32 [rows, N]
//
// delta has bias + B (A x) of the rows that have an adapter which changes the site; its other rows mean
// nothing. Products of A are four chains of FMAs over K, which are added in one order, and those of B one
// chain over the ranks: a row's bits depend on nothing but the row and its adapter.
#pragma once

#include "adapters.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class AdapterDelta final : public Kernel {
 public:
  using F = typename S::F;
  AdapterDelta(const Operands& operands, const Attributes& attributes)
      : x_(operand(operands, "x")),
        shrunk_(matrix(operands, "shrunk", DType::f32)),
        delta_(matrix(operands, "delta", DType::f32)),
        adapters_(adapters_of(operands, "adapters")),
        site_(operand(operands, "adapters").site),
        logit_rows_(x_.rows.factors[kLogitRows] != 0) {
    require_known(operands, attributes, {"x", "x_scale", "adapters", "shrunk", "delta"}, {"group"});
    require(x_.kind == Operand::Kind::arena, "'x' must be a buffer");
    const AdapterSite& site = adapters_->site(site_);
    require_columns(x_, site.columns);
    require_columns(delta_, site.rows);
    require(shrunk_.columns >= adapters_->max_rank(), "'shrunk' has fewer columns than adapters have ranks");
    require_same_rows(x_, shrunk_);
    require_same_rows(x_, delta_);
    require(x_.rows == (logit_rows_ ? Linear{0, {0, 0, 1}} : Linear{0, {1}}),
            "'x' must have a row for each token, or for each row of logits");
    static_assert(kTokens == 0 && kLogitRows == 2);
    if (x_.dtype == DType::i8) {
      const Operand& scale = matrix(operands, "x_scale", DType::f32);
      require_same_rows(x_, scale);
      const int64_t group = integer(attributes, "group", 0, int64_t{1} << 17);
      group_ = group == 0 || group > x_.columns ? x_.columns : group;
      require(group_ == x_.columns || group_ % 16 == 0, "the attribute 'group' must be a multiple of 16");
      require_columns(scale, (x_.columns + group_ - 1) / group_);
      x_scale_ = scale.as<const float>();
      x_scale_stride_ = scale.stride;
    } else {
      require(x_.dtype == DType::f32 || x_.dtype == DType::bf16, "'x' must be f32, bf16 or i8");
    }
  }

  bool is_idle() const override { return !adapters_->is_active(); }
  int64_t scratch_bytes() const override { return round_up(x_.columns, 16) * 4; }
  void add_checks(StepChecks& checks) const override { checks.adapters = adapters_; }

  Work work(const Sizes& sizes) const override {
    Work work;
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      int64_t weights = change.rank * x_.columns;
      for (const AdapterPiece& piece : change.pieces) weights += piece.count * piece.rank;
      work.weight_bytes += 2 * weights;
      work.fp32_ops += 2 * weights * group.count;
      work.activation_bytes += group.count * (x_.columns * bytes_of(x_.dtype) + delta_.columns * 4);
    }
    (void)sizes;
    return work;
  }

  void run(const Sizes&, Worker& worker) const override {
    shrink(worker);
    worker.sync();
    expand(worker);
  }

 private:
  static constexpr int64_t kBlocks = 4;  // of 16 rows of B, whose chains hide each other's latency

  const std::vector<AdapterGroup>& groups() const { return adapters_->rows(logit_rows_).groups(); }

  // Calls visit(change, row, item) for this thread's share of all rows' items, of which a row of a group has
  // items_of(change).
  template <class ItemsOf, class Visit>
  void for_items(const Worker& worker, const ItemsOf& items_of, const Visit& visit) const {
    int64_t total = 0;
    for (const AdapterGroup& group : groups())
      total += group.count * items_of(adapters_->at(site_, group.slot));
    const Range mine = share(total, worker);
    int64_t begin = 0;
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      const int64_t each = items_of(change), count = group.count * each;
      const int64_t first = mine.begin > begin ? mine.begin - begin : 0;
      const int64_t last = mine.end - begin < count ? mine.end - begin : count;
      for (int64_t item = first; item < last; ++item) visit(change, group.rows[item / each], item % each);
      begin += count;
    }
  }

  // shrunk = A x, an item for each 16 ranks.
  void shrink(Worker& worker) const {
    auto* x = reinterpret_cast<float*>(worker.scratch);
    int64_t expanded = -1;  // row that x has
    for_items(
        worker, [](const SiteAdapter& change) { return change.rank / 16; },
        [&](const SiteAdapter& change, int64_t row, int64_t block) {
          if (row != expanded) expand_x(row, x);
          expanded = row;
          const uint16_t* a = change.a + block * x_.columns * 16;
          F sums[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
          int64_t k = 0;
          for (; k + 4 <= x_.columns; k += 4) {
            ENGINEWRIGHT_UNROLL
            for (int i = 0; i < 4; ++i) {
              sums[i] = S::fma(S::set1(x[k + i]), S::load_bf16(a + (k + i) * 16), sums[i]);
            }
          }
          for (; k < x_.columns; ++k) sums[0] = S::fma(S::set1(x[k]), S::load_bf16(a + k * 16), sums[0]);
          S::store(shrunk_.as<float>() + row * shrunk_.stride + block * 16,
                   S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3])));
        });
  }

  void expand_x(int64_t row, float* x) const {
    if (x_scale_ == nullptr) {
      const RowReader<S> reader(x_, row);
      int64_t k = 0;
      for (; k + 16 <= x_.columns; k += 16) S::store(x + k, reader.at(k));
      if (k < x_.columns) S::store(x + k, reader.first(k, x_.columns - k));
      return;
    }
    const int8_t* codes = x_.as<const int8_t>() + row * x_.stride;
    const float* scale = x_scale_ + row * x_scale_stride_;
    for (int64_t begin = 0; begin < x_.columns; begin += group_, ++scale) {
      const int64_t end = x_.columns - begin < group_ ? x_.columns : begin + group_;
      for (int64_t k = begin; k < end; ++k) x[k] = static_cast<float>(codes[k]) * *scale;
    }
  }

  static int64_t tiles_of(const AdapterPiece& piece) {
    return (piece.count + kBlocks * 16 - 1) / (kBlocks * 16);
  }

  // delta = bias + B shrunk, an item for each kBlocks blocks of a piece.
  void expand(Worker& worker) const {
    for_items(
        worker,
        [](const SiteAdapter& change) {
          int64_t tiles = 0;
          for (const AdapterPiece& piece : change.pieces) tiles += tiles_of(piece);
          return tiles;
        },
        [&](const SiteAdapter& change, int64_t row, int64_t tile) {
          const AdapterPiece* piece = change.pieces.data();
          for (; tile >= tiles_of(*piece); ++piece) tile -= tiles_of(*piece);
          const int64_t block = tile * kBlocks, blocks = (piece->count + 15) / 16 - block;
          of_blocks<kBlocks>(change, *piece, row, block, blocks);
        });
  }

  template <int N>
  void of_blocks(const SiteAdapter& change, const AdapterPiece& piece, int64_t row, int64_t block,
                 int64_t blocks) const {
    if constexpr (N > 1) {
      if (blocks < N) return of_blocks<N - 1>(change, piece, row, block, blocks);
    }
    const float* shrunk = shrunk_.as<const float>() + row * shrunk_.stride + piece.first_rank;
    const uint16_t* b = piece.b + block * piece.rank * 16;
    F sums[N];
    ENGINEWRIGHT_UNROLL
    for (int n = 0; n < N; ++n) sums[n] = S::zero();
    for (int64_t j = 0; j < piece.rank; ++j) {
      const F factor = S::set1(shrunk[j]);
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < N; ++n) {
        sums[n] = S::fma(factor, S::load_bf16(b + (n * piece.rank + j) * 16), sums[n]);
      }
    }
    float* delta = delta_.as<float>() + row * delta_.stride;
    for (int n = 0; n < N; ++n) {
      const int64_t first = piece.begin + (block + n) * 16, end = piece.begin + piece.count;
      const int64_t count = end - first < 16 ? end - first : 16;
      const bool all = count == 16;
      if (change.bias != nullptr) {
        const float* bias = change.bias + first;
        sums[n] = S::add(sums[n], all ? S::load(bias) : S::load_first(bias, count));
      }
      all ? S::store(delta + first, sums[n]) : S::store_first(delta + first, sums[n], count);
    }
  }

  const Operand x_, shrunk_, delta_;
  Adapters* const adapters_;
  const int64_t site_;
  const bool logit_rows_;
  const float* x_scale_ = nullptr;  // null: x is float
  int64_t x_scale_stride_ = 0, group_ = 0;
};

}  // namespace
}  // namespace enginewright
