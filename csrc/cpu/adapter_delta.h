// What adapters add to the products of linear layers (adapters.h has the mathematics).
//
//   adapter_delta@1  x: f32 or bf16 [rows, K], or i8 with x_scale: f32 [rows, G]; adapters; shrunk: f32
//   [rows,
//                    ranks], which only this kernel uses; delta: f32 [rows, N]; gated: 1 if the GEMM's
//                    epilogue is. With places: i32 [tokens, top] the site is a layer of experts, and rows
//                    are copies of tokens, as in experts.h
//   adapter_rows@1   places; starts: i32 [1, E + 1], as in experts.h; adapters. Groups the rows of a layer of
//                    experts, before the first of its products.
//
// delta has bias + B (A x) of the rows that have an adapter which changes the site, and their expert, and in
// columns whose rows of the weight are replaced bias + row x; its other rows mean nothing. Products of A are
// four chains of FMAs over K, which are added in one order, and those of B one chain over the ranks; scales
// of int8 factors multiply the sums. A row's bits depend on nothing but the row and its adapter, whether it
// passes the factors alone or with others of its adapter.
//
// A decode step of one sequence has hundreds of these calls of some microseconds, so barriers would be most
// of their time. Each thread computes the columns that it then multiplies in the GEMM (gemm_kernel.h), which
// can follow without a barrier, unless its threads share experts. If few rows have adapters, each thread also
// computes all of A x for itself.
#pragma once

#include "adapter_factors.h"
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

  bool is_idle() const override { return !adapters_->changes_matrices(); }
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
        logit_rows_(x_.rows.factors[kLogitRows] != 0),
        gated_(integer(attributes, "gated", 0, 1) != 0) {
    require_known(operands, attributes, {"x", "x_scale", "places", "adapters", "shrunk", "delta"},
                  {"group", "gated"});
    require(x_.kind == Operand::Kind::arena, "'x' must be a buffer");
    const AdapterSite& site = adapters_->site(site_);
    require(!site.is_table, "'adapters' are of a table");
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

  bool is_idle() const override { return !adapters_->changes(site_); }
  bool needs_barrier_after() const override { return experts_ != 0; }
  int64_t scratch_bytes() const override { return (kTile * x_stride() + kOwnRows * shrunk_.columns) * 4; }
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
      numbers += change.replaced.count * x_.columns;
      bytes += change.replaced.count * x_.columns * change.replaced.rows.element_bytes();
      const int64_t rows = group.count * top_;
      int64_t matrices = 1;
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
    auto* x = reinterpret_cast<float*>(worker.scratch);
    Shrunk shrunk{shrunk_.as<float>(), shrunk_.stride, groups().empty() ? nullptr : groups().front().rows};
    if (num_rows() <= kOwnRows) {
      shrunk.data = x + kTile * x_stride();
      shrunk.stride = shrunk_.columns;
      shrink({0, num_items()}, x, shrunk);
    } else {
      shrink(share(num_items(), worker), x, shrunk);
      worker.sync();
    }
    const int64_t outputs = gated_ ? delta_.columns / 2 : delta_.columns;
    const Range units = share((outputs + 15) / 16, worker);
    const int64_t begin = units.begin * 16, end = units.end * 16 < outputs ? units.end * 16 : outputs;
    expand({begin, end}, shrunk);
    if (gated_) expand({outputs + begin, outputs + end}, shrunk);
    replace({begin, end}, x);
    if (gated_) replace({outputs + begin, outputs + end}, x);
  }

 private:
  static constexpr int kTile = 4;      // chains, whose FMAs hide each other's latency
  static constexpr int kOwnRows = 2;   // rows, up to which each thread computes A x for itself
  static constexpr int kAhead = 2048;  // numbers of a factor from those that are read to those prefetched

  // A x of the rows that have adapters, in the order of the groups.
  struct Shrunk {
    float* data;  // [rows, ranks]
    int64_t stride;
    const int32_t* first;  // the first row's place in the groups

    float* at(const int32_t* row) const { return data + (row - first) * stride; }
  };

  // sums[i] += the sum of x[i][k] * w[i][16 k], over `count` k that are kStep apart.
  template <class Factor, int kStep>
  static ENGINEWRIGHT_INLINE void pass(const typename Factor::Element* const (&w)[kTile],
                                       const float* const (&x)[kTile], int64_t count, F (&sums)[kTile]) {
    for (int64_t n = 0, k = 0; n < count; ++n, k += kStep) {
      if (kStep == kTile) prefetch(w[0] + k * 16 + kAhead, kTile * 16);
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < kTile; ++i) {
        sums[i] = S::fma(S::set1(x[i][k]), Factor::load(w[i] + k * 16), sums[i]);
      }
    }
  }
  // The same with one w, which is converted once.
  template <class Factor, int kStep>
  static ENGINEWRIGHT_INLINE void pass_rows(const typename Factor::Element* w, const float* const (&x)[kTile],
                                            int64_t count, F (&sums)[kTile]) {
    for (int64_t n = 0, k = 0; n < count; ++n, k += kStep) {
      const F factor = Factor::load(w + k * 16);
      ENGINEWRIGHT_UNROLL
      for (int i = 0; i < kTile; ++i) sums[i] = S::fma(S::set1(x[i][k]), factor, sums[i]);
    }
  }
  template <class Element>
  static ENGINEWRIGHT_INLINE void prefetch(const Element* p, int64_t count) {
    for (int64_t i = 0; i < count; i += 64 / int64_t{sizeof(Element)}) S::prefetch_l2(p + i);
  }

  const std::vector<AdapterGroup>& groups() const {
    return experts_ == 0 ? adapters_->rows(logit_rows_).groups() : adapters_->expert_rows().groups();
  }

  int64_t num_rows() const {
    int64_t rows = 0;
    for (const AdapterGroup& group : groups()) rows += group.count;
    return rows;
  }

  // Rows of a group pass kTile at once, and what is left of them one by one. Calls visit(rows, number of
  // rows).
  template <class Visit>
  static void for_tiles(const AdapterGroup& group, const Visit& visit) {
    for (int64_t row = 0; row < group.count;) {
      const int count = group.count - row >= kTile ? kTile : 1;
      visit(group.rows + row, count);
      row += count;
    }
  }

  // Blocks of 16 ranks of a group's A; 0 if its expert is not changed.
  int64_t blocks_of(const AdapterGroup& group) const {
    const SiteAdapter& change = adapters_->at(site_, group.slot);
    return change.matrix_of(group.expert) < 0 ? 0 : change.rank / 16;
  }

  // An item is A x of a tile of rows and of 16 ranks.
  int64_t num_items() const {
    int64_t items = 0;
    for (const AdapterGroup& group : groups()) {
      items += (group.count / kTile + group.count % kTile) * blocks_of(group);
    }
    return items;
  }

  // Computes some items, with scratch for x.
  void shrink(Range items, float* x, const Shrunk& shrunk) const {
    int64_t begin = 0;  // the first item of a tile
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      const int64_t blocks = blocks_of(group);
      if (blocks == 0) continue;
      const FactorMatrix a = change.a.at(change.matrix_of(group.expert), change.rank, x_.columns);
      for_tiles(group, [&](const int32_t* rows, int count) {
        const int64_t first = items.begin > begin ? items.begin - begin : 0;
        const int64_t last = items.end - begin < blocks ? items.end - begin : blocks;
        begin += blocks;
        if (first >= last) return;
        for (int i = 0; i < count; ++i) expand_x(rows[i], x + i * x_stride());
        for (int64_t block = first; block < last; ++block) {
          shrink_block(a, block, rows, count, x, shrunk);
        }
      });
    }
  }

  void shrink_block(const FactorMatrix& factors, int64_t block, const int32_t* rows, int count,
                    const float* x, const Shrunk& shrunk) const {
    F sums[kTile];
    products(factors, block, 16, count, x, sums);
    for (int i = 0; i < count; ++i) S::store(shrunk.at(rows + i) + block * 16, sums[i]);
  }

  // Products of `count` rows, 1 or kTile, and a block of a matrix, which has `rows` rows of it.
  ENGINEWRIGHT_ONCE void products(const FactorMatrix& factors, int64_t block, int64_t rows, int count,
                                  const float* x, F (&sums)[kTile]) const {
    with_factor<S>(factors, block * x_.columns * 16, [&](auto factor, const auto* a) {
      if (count == 1) {
        shrink_row<decltype(factor)>(a, x, sums);
      } else {
        shrink_rows<decltype(factor)>(a, x, sums);
      }
    });
    if (factors.scale == nullptr) return;
    const float* from = factors.scale + block * 16;
    const F scale = rows == 16 ? S::load(from) : S::load_first(from, rows);
    for (int i = 0; i < count; ++i) sums[i] = S::mul(sums[i], scale);
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
    pass<Factor, kTile>(w, places, x_.columns / kTile, sums);
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
      pass_rows<Factor, kTile>(a + chain * 16, places, count, chains[chain]);
    }
    for (int i = 0; i < kTile; ++i) {
      sums[i] = S::add(S::add(chains[0][i], chains[1][i]), S::add(chains[2][i], chains[3][i]));
    }
  }

  int64_t x_stride() const { return round_up(x_.columns, 16); }

  ENGINEWRIGHT_ONCE void expand_x(int64_t row, float* x) const {
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

  // delta = bias + B shrunk, for some columns of all rows.
  void expand(Range columns, const Shrunk& shrunk) const {
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      const int64_t matrix = change.matrix_of(group.expert);
      if (matrix < 0) continue;
      for_tiles(group, [&](const int32_t* rows, int count) {
        for (AdapterPiece piece : change.pieces) {
          piece.b = piece.b.at(matrix, piece.count, piece.rank);
          const int64_t begin = columns.begin - piece.begin, end = columns.end - piece.begin;
          const int64_t last = ((end < piece.count ? end : piece.count) + 15) / 16;
          for (int64_t block = begin > 0 ? begin / 16 : 0; block < last; block += kTile) {
            const int64_t blocks = last - block < kTile ? last - block : kTile;
            with_factor<S>(piece.b, block * piece.rank * 16, [&](auto factor, const auto* b) {
              expand_tile<decltype(factor)>({change, piece, columns}, rows, count, block, blocks, b, shrunk);
            });
          }
        }
      });
    }
  }

  // delta = bias + row of the adapter x, for those of some columns whose rows of the weight are replaced.
  ENGINEWRIGHT_ONCE void replace(Range columns, float* x) const {
    for (const AdapterGroup& group : groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      const Range own{change.replaced.first_from(columns.begin), change.replaced.first_from(columns.end)};
      for (int64_t row = 0, count = 1; own.begin < own.end && row < group.count; row += count) {
        count = group.count - row >= kTile ? kTile : 1;
        replace_tile(change, own, group.rows + row, static_cast<int>(count), x);
      }
    }
  }

  // The same for 1 or kTile rows, and a range of the replaced rows of the weight.
  ENGINEWRIGHT_ONCE void replace_tile(const SiteAdapter& change, Range own, const int32_t* rows, int count,
                                      float* x) const {
    const ReplacedRows& replaced = change.replaced;
    for (int i = 0; i < count; ++i) expand_x(rows[i], x + i * x_stride());
    for (int64_t begin = own.begin / 16 * 16; begin < own.end; begin += 16) {
      const int64_t left = replaced.count - begin;
      F sums[kTile];
      products(replaced.rows, begin / 16, left < 16 ? left : 16, count, x, sums);
      float values[kTile * 16];
      for (int i = 0; i < count; ++i) S::store(values + i * 16, sums[i]);
      for (int64_t n = begin < own.begin ? own.begin : begin; n < begin + 16 && n < own.end; ++n) {
        const int32_t column = replaced.ids[n];
        const float bias = change.bias == nullptr ? 0.0f : change.bias[column];
        float* delta = delta_.as<float>() + column;
        for (int i = 0; i < count; ++i) delta[rows[i] * delta_.stride] = values[i * 16 + n - begin] + bias;
      }
    }
  }

  // What an adapter adds to some columns of a site.
  struct Part {
    const SiteAdapter& change;
    const AdapterPiece& piece;
    Range columns;  // the thread's own
  };

  // Up to kTile blocks from `block` on, of one row or of kTile rows. b: B from that block on. Each sum is
  // one chain over the ranks.
  template <class Factor>
  void expand_tile(const Part& part, const int32_t* rows, int count, int64_t block, int64_t blocks,
                   const typename Factor::Element* b, const Shrunk& shrunk) const {
    const int64_t rank = part.piece.rank;
    const float* x[kTile];
    for (int i = 0; i < kTile; ++i) x[i] = shrunk.at(rows + (i < count ? i : 0)) + part.piece.first_rank;
    F sums[kTile];
    if (count == 1) {
      const typename Factor::Element* w[kTile];
      for (int64_t n = 0; n < kTile; ++n) {
        w[n] = b + (n < blocks ? n : 0) * rank * 16;
        sums[n] = S::zero();
      }
      prefetch(b + kAhead, kTile * rank * 16);
      pass<Factor, 1>(w, x, rank, sums);
      for (int64_t n = 0; n < blocks; ++n) store(part, rows[0], block + n, sums[n]);
      return;
    }
    for (int64_t n = 0; n < blocks; ++n) {
      for (int i = 0; i < kTile; ++i) sums[i] = S::zero();
      pass_rows<Factor, 1>(b + n * rank * 16, x, rank, sums);
      for (int i = 0; i < kTile; ++i) store(part, rows[i], block + n, sums[i]);
    }
  }

  // delta of a row and a block of a piece = bias + scale * sum.
  ENGINEWRIGHT_INLINE void store(const Part& part, int64_t row, int64_t block, F sum) const {
    const int64_t left = part.piece.count - block * 16, count = left < 16 ? left : 16;
    const int64_t begin = part.piece.begin + block * 16;
    const auto load = [&](const float* from) {
      return count == 16 ? S::load(from) : S::load_first(from, count);
    };
    if (part.piece.b.scale != nullptr) sum = S::mul(sum, load(part.piece.b.scale + block * 16));
    if (part.change.bias != nullptr) sum = S::add(sum, load(part.change.bias + begin));
    float* delta = delta_.as<float>() + row * delta_.stride + begin;
    if (begin < part.columns.begin || part.columns.end < begin + count) {
      store_own(delta, begin, count, sum, part.columns);
    } else if (count == 16) {
      S::store(delta, sum);
    } else {
      S::store_first(delta, sum, count);
    }
  }
  // Stores those of `count` columns from `begin` on which are this thread's own.
  ENGINEWRIGHT_ONCE static void store_own(float* delta, int64_t begin, int64_t count, F sum, Range columns) {
    float values[16];
    S::store(values, sum);
    for (int64_t i = 0; i < count; ++i) {
      if (columns.begin <= begin + i && begin + i < columns.end) delta[i] = values[i];
    }
  }

  const Operand x_, shrunk_, delta_;
  Adapters* const adapters_;
  const int64_t site_, experts_;    // experts_: 0 if the site is no layer of experts
  int64_t top_ = 1;                 // rows of a token
  const bool logit_rows_, gated_;   // gated: columns n and N/2 + n are multiplied by one thread
  const float* x_scale_ = nullptr;  // null: x is float
  int64_t x_scale_stride_ = 0, group_ = 0;
};

}  // namespace
}  // namespace enginewright
