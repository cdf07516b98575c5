// What adapters add to the products of linear layers (adapters.h has the mathematics).
//
//   adapter_delta@1  x: f32 or bf16 [rows, K], or i8 with x_scale: f32 [rows, G]; adapters; shrunk: f32
//   [rows,
//                    ranks], which only this kernel uses; delta: f32 [rows, N]. With places: i32 [tokens,
//                    top] the site is a layer of experts, and rows are copies of tokens, as in experts.h
//   adapter_rows@1   places; starts: i32 [1, E + 1], as in experts.h; adapters. Groups the rows of a layer of
//                    experts, before the first of its products.
//
// delta has bias + B (A x) of the rows that have an adapter which changes the site, and their expert; its
// other rows mean nothing. Products of A are four chains of FMAs over K, which are added in one order, and
// those of B one chain over the ranks; scales of int8 factors multiply the sums. A row's bits depend on
// nothing but the row and its adapter, whether it passes the factors alone or with others of its adapter.
#pragma once

#include "adapters.h"
#include "experts.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

inline void require_adapted_rows(const Operand& rows) {
  static_assert(kTokens == 0 && kLogitRows == 2);
  require(rows.rows == Linear{0, {1}} || rows.rows == Linear{0, {0, 0, 1}},
          "'" + rows.label + "' must have a row for each token, or for each row of logits");
}

// The operand `places` of a layer of experts.
inline const Operand& adapted_places(const Operands& operands, const Adapters& adapters) {
  const Operand& places = buffer(operands, "places", DType::i32);
  require_adapted_rows(places);
  require(places.max_rows * places.columns <= adapters.expert_rows().max_rows(),
          "'places' has more rows than adapters have room for");
  return places;
}

// How tokens' copies are grouped is in the Adapters, for the products that follow.
class GroupAdapterRows final : public Kernel {
 public:
  GroupAdapterRows(const Operands& operands, const Attributes& attributes)
      : places_(adapted_places(operands, *adapters_of(operands, "adapters"))),
        starts_(buffer(operands, "starts", DType::i32)),
        adapters_(adapters_of(operands, "adapters")),
        experts_(adapters_->site(operand(operands, "adapters").site).experts),
        logit_rows_(places_.rows.factors[kLogitRows] != 0) {
    require_known(operands, attributes, {"places", "starts", "adapters"}, {});
    require(experts_ > 0, "'adapters' are of no layer of experts");
    require(starts_.max_rows == 1, "'starts' must have one row");
    require_columns(starts_, experts_ + 1);
  }

  bool is_idle() const override { return !adapters_->is_active(); }
  void add_checks(StepChecks& checks) const override { checks.adapters = adapters_; }
  Work work(const Sizes& sizes) const override { return touched({&places_, &starts_}, sizes); }

  void run(const Sizes& sizes, Worker& worker) const override {
    if (worker.index != 0) return;
    adapters_->expert_rows().group(adapters_->rows(logit_rows_).slots(), places_.as<const int32_t>(),
                                   places_.stride, places_.rows.at(sizes), places_.columns,
                                   starts_.as<const int32_t>(), experts_);
  }

 private:
  const Operand places_, starts_;
  Adapters* const adapters_;
  const int64_t experts_;
  const bool logit_rows_;
};

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
        experts_(adapters_->site(site_).experts),
        logit_rows_(x_.rows.factors[kLogitRows] != 0) {
    require_known(operands, attributes, {"x", "x_scale", "places", "adapters", "shrunk", "delta"}, {"group"});
    require(x_.kind == Operand::Kind::arena, "'x' must be a buffer");
    const AdapterSite& site = adapters_->site(site_);
    require_columns(x_, site.columns);
    require_columns(delta_, site.rows);
    require(shrunk_.columns >= adapters_->max_rank(), "'shrunk' has fewer columns than adapters have ranks");
    require_same_rows(x_, shrunk_);
    require_same_rows(x_, delta_);
    require((operands.count("places") != 0) == (experts_ != 0), "'places' belong to layers of experts");
    if (experts_ == 0) {
      require_adapted_rows(x_);
    } else {
      const Operand& places = adapted_places(operands, *adapters_);
      require_copies(x_, places, places.columns);
      top_ = places.columns;
    }
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
  int64_t scratch_bytes() const override { return kTile * x_stride() * 4; }
  void add_checks(StepChecks& checks) const override { checks.adapters = adapters_; }

  Work work(const Sizes& sizes) const override {
    Work work;
    for (const AdapterGroup& group : adapters_->rows(logit_rows_).groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      int64_t numbers = change.rank * x_.columns, bytes = numbers * change.a.element_bytes();
      for (const AdapterPiece& piece : change.pieces) {
        numbers += piece.count * piece.rank;
        bytes += piece.count * piece.rank * piece.b.element_bytes();
      }
      int64_t rows = group.count * top_, matrices = 1;
      if (experts_ != 0) {  // which ones is known only when it runs: as if all were changed, each row another
        matrices = rows < experts_ ? rows : experts_;
      }
      work.weight_bytes += bytes * matrices;
      work.fp32_ops += 2 * numbers * rows;
      work.activation_bytes += rows * (x_.columns * bytes_of(x_.dtype) + delta_.columns * 4);
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
  static constexpr int kTile = 4;  // chains, whose FMAs hide each other's latency

  // How 16 numbers of A or B are read.
  struct Bf16 {
    using Element = uint16_t;
    static ENGINEWRIGHT_INLINE F load(const Element* p) { return S::load_bf16(p); }
  };
  struct Int8 {
    using Element = int8_t;
    static ENGINEWRIGHT_INLINE F load(const Element* p) { return S::to_float(S::widen_i8(p)); }
  };
  // Calls use(Bf16 or Int8, pointer to number `index` of the matrix).
  template <class Use>
  static void with_factor(const FactorMatrix& matrix, int64_t index, const Use& use) {
    if (matrix.scale == nullptr) {
      use(Bf16(), reinterpret_cast<const uint16_t*>(matrix.data) + index);
    } else {
      use(Int8(), reinterpret_cast<const int8_t*>(matrix.data) + index);
    }
  }

  // sums[i] += the sum of x[i][k] * w[i][16 k], over `count` k that are `step` apart.
  template <class Factor>
  static ENGINEWRIGHT_INLINE void pass(const typename Factor::Element* const (&w)[kTile],
                                       const float* const (&x)[kTile], int64_t count, int64_t step,
                                       F (&sums)[kTile]) {
    for (int64_t n = 0, k = 0; n < count; ++n, k += step) {
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < kTile; ++i) {
        sums[i] = S::fma(S::set1(x[i][k]), Factor::load(w[i] + k * 16), sums[i]);
      }
    }
  }
  // The same with one w, which is converted once.
  template <class Factor>
  static ENGINEWRIGHT_INLINE void pass_rows(const typename Factor::Element* w, const float* const (&x)[kTile],
                                            int64_t count, int64_t step, F (&sums)[kTile]) {
    for (int64_t n = 0, k = 0; n < count; ++n, k += step) {
      const F factor = Factor::load(w + k * 16);
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < kTile; ++i) sums[i] = S::fma(S::set1(x[i][k]), factor, sums[i]);
    }
  }

  const std::vector<AdapterGroup>& groups() const {
    return experts_ == 0 ? adapters_->rows(logit_rows_).groups() : adapters_->expert_rows().groups();
  }

  // Rows of a group pass kTile at once, and what is left of them one by one.
  static int64_t tiles_of(int64_t rows) { return rows / kTile + rows % kTile; }

  // Items of a group's tiles: of each as many as items_of(change), if its expert is changed.
  template <class ItemsOf>
  int64_t items_in(const AdapterGroup& group, const ItemsOf& items_of) const {
    const SiteAdapter& change = adapters_->at(site_, group.slot);
    return change.matrix_of(group.expert) < 0 ? 0 : tiles_of(group.count) * items_of(change);
  }

  // Calls visit(change, index of its matrices, rows, number of rows, item) for this thread's share of all
  // tiles' items, of which a tile of rows has items_of(change).
  template <class ItemsOf, class Visit>
  void for_items(const Worker& worker, const ItemsOf& items_of, const Visit& visit) const {
    int64_t total = 0;
    for (const AdapterGroup& group : groups()) total += items_in(group, items_of);
    const Range mine = share(total, worker);
    int64_t begin = 0;
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      const int64_t each = items_of(change), count = items_in(group, items_of);
      const int64_t first = mine.begin > begin ? mine.begin - begin : 0;
      const int64_t last = mine.end - begin < count ? mine.end - begin : count;
      for (int64_t item = first; item < last; ++item) {
        const int64_t tile = item / each, full = group.count / kTile;
        const int64_t row = tile < full ? tile * kTile : full * (kTile - 1) + tile;
        visit(change, change.matrix_of(group.expert), group.rows + row, tile < full ? kTile : 1, item % each);
      }
      begin += count;
    }
  }

  // shrunk = A x, an item for each 16 ranks.
  void shrink(Worker& worker) const {
    auto* x = reinterpret_cast<float*>(worker.scratch);
    const int32_t* expanded = nullptr;  // rows that x has
    for_items(
        worker, [](const SiteAdapter& change) { return change.rank / 16; },
        [&](const SiteAdapter& change, int64_t matrix, const int32_t* rows, int count, int64_t block) {
          const FactorMatrix factors = change.a.at(matrix, change.rank, x_.columns);
          for (int i = 0; i < count && rows != expanded; ++i) expand_x(rows[i], x + i * x_stride());
          expanded = rows;
          with_factor(factors, block * x_.columns * 16, [&](auto factor, const auto* a) {
            F sums[kTile];
            if (count == 1) {
              shrink_row<decltype(factor)>(a, x, sums);
            } else {
              shrink_rows<decltype(factor)>(a, x, sums);
            }
            for (int i = 0; i < count; ++i) {
              if (factors.scale != nullptr) sums[i] = S::mul(sums[i], S::load(factors.scale + block * 16));
              S::store(shrunk_.as<float>() + rows[i] * shrunk_.stride + block * 16, sums[i]);
            }
          });
        });
  }

  // The kTile chains of a row together. sums[0]: its result.
  template <class Factor>
  void shrink_row(const typename Factor::Element* a, const float* x, F (&sums)[kTile]) const {
    const typename Factor::Element* w[kTile];
    const float* places[kTile];
    for (int i = 0; i < kTile; ++i) {
      w[i] = a + i * 16;
      places[i] = x + i;
      sums[i] = S::zero();
    }
    pass<Factor>(w, places, x_.columns / kTile, kTile, sums);
    for (int64_t k = x_.columns / kTile * kTile, i = 0; k < x_.columns; ++k, ++i) {
      sums[i] = S::fma(S::set1(x[k]), Factor::load(a + k * 16), sums[i]);
    }
    sums[0] = S::add(S::add(sums[0], sums[1]), S::add(sums[2], sums[3]));
  }

  // kTile rows, a chain after the other. sums: their results.
  template <class Factor>
  void shrink_rows(const typename Factor::Element* a, const float* x, F (&sums)[kTile]) const {
    F chains[kTile][kTile];
    for (int chain = 0; chain < kTile; ++chain) {
      const float* places[kTile];
      for (int i = 0; i < kTile; ++i) {
        places[i] = x + i * x_stride() + chain;
        chains[chain][i] = S::zero();
      }
      const int64_t count = (x_.columns - chain + kTile - 1) / kTile;
      pass_rows<Factor>(a + chain * 16, places, count, kTile, chains[chain]);
    }
    for (int i = 0; i < kTile; ++i) {
      sums[i] = S::add(S::add(chains[0][i], chains[1][i]), S::add(chains[2][i], chains[3][i]));
    }
  }

  int64_t x_stride() const { return round_up(x_.columns, 16); }

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

  static int64_t tiles_of(const AdapterPiece& piece) { return (piece.count + kTile * 16 - 1) / (kTile * 16); }

  // delta = bias + B shrunk, an item for each kTile blocks of a piece.
  void expand(Worker& worker) const {
    for_items(
        worker,
        [](const SiteAdapter& change) {
          int64_t tiles = 0;
          for (const AdapterPiece& piece : change.pieces) tiles += tiles_of(piece);
          return tiles;
        },
        [&](const SiteAdapter& change, int64_t matrix, const int32_t* rows, int count, int64_t tile) {
          const AdapterPiece* found = change.pieces.data();
          for (; tile >= tiles_of(*found); ++found) tile -= tiles_of(*found);
          AdapterPiece piece = *found;
          piece.b = piece.b.at(matrix, piece.count, piece.rank);
          with_factor(piece.b, 0, [&](auto factor, const auto* b) {
            expand_tile<decltype(factor)>(change, piece, b, rows, count, tile * kTile);
          });
        });
  }

  // kTile blocks from `block` on, of one row or of kTile rows. Each sum is one chain over the ranks.
  template <class Factor>
  void expand_tile(const SiteAdapter& change, const AdapterPiece& piece, const typename Factor::Element* b,
                   const int32_t* rows, int count, int64_t block) const {
    const int64_t left = (piece.count + 15) / 16 - block, blocks = left < kTile ? left : kTile;
    const float* x[kTile];
    for (int i = 0; i < kTile; ++i) {
      x[i] = shrunk_.as<const float>() + rows[i < count ? i : 0] * shrunk_.stride + piece.first_rank;
    }
    F sums[kTile];
    if (count == 1) {
      const typename Factor::Element* w[kTile];
      for (int64_t n = 0; n < kTile; ++n) {
        w[n] = b + (block + (n < blocks ? n : 0)) * piece.rank * 16;
        sums[n] = S::zero();
      }
      pass<Factor>(w, x, piece.rank, 1, sums);
      for (int64_t n = 0; n < blocks; ++n) store(change, piece, rows[0], block + n, sums[n]);
      return;
    }
    for (int64_t n = 0; n < blocks; ++n) {
      for (int i = 0; i < kTile; ++i) sums[i] = S::zero();
      pass_rows<Factor>(b + (block + n) * piece.rank * 16, x, piece.rank, 1, sums);
      for (int i = 0; i < kTile; ++i) store(change, piece, rows[i], block + n, sums[i]);
    }
  }

  // delta of a row and a block of a piece = bias + scale * sum.
  void store(const SiteAdapter& change, const AdapterPiece& piece, int64_t row, int64_t block, F sum) const {
    const int64_t begin = block * 16, left = piece.count - begin, count = left < 16 ? left : 16;
    const auto load = [&](const float* from) {
      return count == 16 ? S::load(from) : S::load_first(from, count);
    };
    if (piece.b.scale != nullptr) sum = S::mul(sum, load(piece.b.scale + begin));
    if (change.bias != nullptr) sum = S::add(sum, load(change.bias + piece.begin + begin));
    float* delta = delta_.as<float>() + row * delta_.stride + piece.begin + begin;
    count == 16 ? S::store(delta, sum) : S::store_first(delta, sum, count);
  }

  const Operand x_, shrunk_, delta_;
  Adapters* const adapters_;
  const int64_t site_, experts_;  // experts_: 0 if the site is no layer of experts
  const bool logit_rows_;
  int64_t top_ = 1;                 // rows of a token
  const float* x_scale_ = nullptr;  // null: x is float
  int64_t x_scale_stride_ = 0, group_ = 0;
};

}  // namespace
}  // namespace enginewright
