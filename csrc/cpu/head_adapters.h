// What adapters add to products of each head with its own weight (head_gemm.h; adapters.h has the
// mathematics).
//
//   head_adapter_delta@1  x: bf16 [M, heads * K], K and N multiples of 16; adapters; delta: f32 [M, heads *
//   N]
//
// delta has B (A x) of each head of the rows that have an adapter which changes the site; its other rows mean
// nothing. Four rows of one adapter pass a head's factors together, and others alone. Products of A are four
// chains of FMAs over K, which are added in one order, and those of B one chain over the ranks: a row's bits
// depend on nothing but the row and its adapter.
#pragma once

#include "adapter_factors.h"
#include "adapters.h"
#include "operands.h"
#include "rows.h"

namespace enginewright {
namespace {

template <class S>
class HeadAdapterDelta final : public Kernel {
 public:
  using F = typename S::F;
  HeadAdapterDelta(const Operands& operands, const Attributes& attributes)
      : x_(matrix(operands, "x", DType::bf16)),
        delta_(matrix(operands, "delta", DType::f32)),
        adapters_(adapters_of(operands, "adapters")),
        site_(operand(operands, "adapters").site),
        heads_(adapters_->site(site_).experts),
        columns_(adapters_->site(site_).columns),
        rows_(adapters_->site(site_).rows),
        logit_rows_(x_.rows.factors[kLogitRows] != 0) {
    require_known(operands, attributes, {"x", "adapters", "delta"}, {});
    require(heads_ > 0, "'adapters' are of no layer of heads");
    require(columns_ % 16 == 0 && rows_ % 16 == 0, "a head's rows and columns must be multiples of 16");
    require(x_.rows == (logit_rows_ ? Linear{0, {0, 0, 1}} : Linear{0, {1}}),
            "'x' must have a row for each token, or for each row of logits");
    static_assert(kTokens == 0 && kLogitRows == 2);
    require_columns(x_, heads_ * columns_);
    require_columns(delta_, heads_ * rows_);
    require_same_rows(x_, delta_);
  }

  bool is_idle() const override { return !adapters_->changes(site_); }
  int64_t scratch_bytes() const override { return kRows * (columns_ + adapters_->max_rank()) * 4; }
  void add_checks(StepChecks& checks) const override { checks.adapters = adapters_; }

  Work work(const Sizes&) const override {
    Work work;
    for (const AdapterGroup& group : adapters_->rows(logit_rows_).groups()) {
      const SiteAdapter& change = adapters_->at(site_, group.slot);
      int64_t numbers = change.rank * columns_;
      work.weight_bytes += numbers * change.a.element_bytes() * (change.a.is_shared ? 1 : heads_);
      for (const AdapterPiece& piece : change.pieces) {
        const int64_t own = piece.count * piece.rank;
        numbers += own;
        work.weight_bytes += own * piece.b.element_bytes() * (piece.b.is_shared ? 1 : heads_);
      }
      work.fp32_ops += 2 * numbers * heads_ * group.count;
      work.activation_bytes += group.count * heads_ * (columns_ * 2 + rows_ * 4);
    }
    return work;
  }

  void run(const Sizes&, Worker& worker) const override {
    const std::vector<AdapterGroup>& groups = adapters_->rows(logit_rows_).groups();
    int64_t total = 0;
    for (const AdapterGroup& group : groups) total += tiles_of(group.count) * heads_;
    const Range mine = share(total, worker);
    int64_t begin = 0;
    for (const AdapterGroup& group : groups) {
      const int64_t count = tiles_of(group.count) * heads_, full = group.count / kRows;
      const int64_t first = mine.begin > begin ? mine.begin - begin : 0;
      const int64_t last = mine.end - begin < count ? mine.end - begin : count;
      for (int64_t item = first; item < last; ++item) {
        const int64_t tile = item / heads_, head = item % heads_;
        const int32_t* rows = group.rows + (tile < full ? tile * kRows : full * (kRows - 1) + tile);
        const SiteAdapter& change = adapters_->at(site_, group.slot);
        if (change.matrix_of(head) < 0) continue;
        auto* scratch = reinterpret_cast<float*>(worker.scratch);
        tile < full ? add<kRows>(change, head, rows, scratch) : add<1>(change, head, rows, scratch);
      }
      begin += count;
    }
  }

 private:
  static constexpr int kRows = 4, kChains = 4, kBlocks = 4;

  static int64_t tiles_of(int64_t rows) { return rows / kRows + rows % kRows; }

  template <int M>
  void add(const SiteAdapter& change, int64_t head, const int32_t* rows, float* x) const {
    const int64_t matrix = change.matrix_of(head), max_rank = adapters_->max_rank();
    float* const shrunk = x + kRows * columns_;
    for (int m = 0; m < M; ++m) {
      const RowReader<S> reader(x_, rows[m]);
      for (int64_t k = 0; k < columns_; k += 16)
        S::store(x + m * columns_ + k, reader.at(head * columns_ + k));
    }
    const FactorMatrix a = change.a.at(matrix, change.rank, columns_);
    if (change.rank > 0) {
      with_factor<S>(a, 0, [&](auto factor, const auto* numbers) {
        for (int64_t rank = 0; rank < change.rank; rank += 16) {
          F sums[M];
          shrink<M, decltype(factor)>(numbers + rank * columns_, x, sums);
          for (int m = 0; m < M; ++m) {
            if (a.scale != nullptr) sums[m] = S::mul(sums[m], S::load(a.scale + rank));
            S::store(shrunk + m * max_rank + rank, sums[m]);
          }
        }
      });
    }
    for (const AdapterPiece& piece : change.pieces) {
      const FactorMatrix b = piece.b.at(matrix, piece.count, piece.rank);
      float* const delta = delta_.as<float>() + head * rows_ + piece.begin;
      with_factor<S>(b, 0, [&](auto factor, const auto* numbers) {
        for (int64_t block = 0; block * 16 < piece.count; block += kBlocks) {
          expand<M, decltype(factor)>(piece, numbers, b.scale, shrunk + piece.first_rank, block, rows, delta);
        }
      });
    }
  }

  // 16 ranks of each row's A x.
  template <int M, class Factor>
  ENGINEWRIGHT_INLINE void shrink(const typename Factor::Element* a, const float* x, F (&result)[M]) const {
    F sums[kChains][M];
    ENGINEWRIGHT_UNROLL
    for (int c = 0; c < kChains; ++c) {
      ENGINEWRIGHT_UNROLL
      for (int m = 0; m < M; ++m) sums[c][m] = S::zero();
    }
    for (int64_t k = 0; k < columns_; k += kChains) {
      ENGINEWRIGHT_UNROLL
      for (int c = 0; c < kChains; ++c) {
        const F w = Factor::load(a + (k + c) * 16);
        ENGINEWRIGHT_UNROLL
        for (int m = 0; m < M; ++m) sums[c][m] = S::fma(S::set1(x[m * columns_ + k + c]), w, sums[c][m]);
      }
    }
    for (int m = 0; m < M; ++m) {
      result[m] = S::add(S::add(sums[0][m], sums[1][m]), S::add(sums[2][m], sums[3][m]));
    }
  }

  // delta of the rows, in kBlocks blocks of a piece from `block` on.
  template <int M, class Factor>
  ENGINEWRIGHT_INLINE void expand(const AdapterPiece& piece, const typename Factor::Element* b,
                                  const float* scale, const float* shrunk, int64_t block, const int32_t* rows,
                                  float* delta) const {
    const int64_t left = (piece.count + 15) / 16 - block, max_rank = adapters_->max_rank();
    const typename Factor::Element* w[kBlocks];
    F sums[kBlocks][M];
    for (int64_t n = 0; n < kBlocks; ++n) {
      w[n] = b + (block + (n < left ? n : 0)) * piece.rank * 16;
      for (int m = 0; m < M; ++m) sums[n][m] = S::zero();
    }
    for (int64_t rank = 0; rank < piece.rank; ++rank) {
      ENGINEWRIGHT_UNROLL
      for (int n = 0; n < kBlocks; ++n) {
        const F factor = Factor::load(w[n] + rank * 16);
        ENGINEWRIGHT_UNROLL
        for (int m = 0; m < M; ++m) {
          sums[n][m] = S::fma(S::set1(shrunk[m * max_rank + rank]), factor, sums[n][m]);
        }
      }
    }
    for (int64_t n = 0; n < kBlocks && n < left; ++n) {
      const int64_t begin = (block + n) * 16, rest = piece.count - begin, count = rest < 16 ? rest : 16;
      for (int m = 0; m < M; ++m) {
        F sum = sums[n][m];
        if (scale != nullptr) {
          sum = S::mul(sum, count == 16 ? S::load(scale + begin) : S::load_first(scale + begin, count));
        }
        float* to = delta + rows[m] * delta_.stride + begin;
        count == 16 ? S::store(to, sum) : S::store_first(to, sum, count);
      }
    }
  }

  const Operand x_, delta_;
  Adapters* const adapters_;
  const int64_t site_, heads_, columns_, rows_;
  const bool logit_rows_;
};

}  // namespace
}  // namespace enginewright
