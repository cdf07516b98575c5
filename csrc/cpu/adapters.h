// The adapters (LoRA, https://arxiv.org/abs/2106.09685) that an executor has loaded, and which rows of a step
// have which one.
//
// A site is a linear layer of the plan, whose weight has `rows` rows and `columns` columns. A slot holds one
// adapter. What a row of the step with this adapter gets, before the epilogue of the site's GEMM, is
//
//   product * gain + bias of the layer + bias of the adapter + sum over pieces of B (A x)
//
// A layer of experts is a site, too: its weight is a matrix for each expert, and so are A and B for those
// that an adapter changes. A row of it is a token's copy for one of its experts (experts.h). And a layer with
// a matrix for each head (head_gemm.h) is one whose experts are heads: each row has all of them, side by
// side, and either A or B may be one matrix that they share.
//
// A table of embeddings is a site, too, whose rows are looked up by tokens: A has a column for each token,
// and B a row for each column of the table.
//
// An adapter may also have rows of its own in place of some of a weight's: a token's row of a table, or a
// row of a linear layer, such as the head. There the gain must be 0, so that the row's product is all that is
// left.
//
// Factors are bf16, or int8 with a scale of each row: the same for all that is read with it. They are written
// by the caller between steps; a slot that no row of a step has may be written at any
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernel.h"

namespace enginewright {

// A factor as r16_columns.
struct FactorMatrix {
  const std::byte* data = nullptr;
  const float* scale = nullptr;  // f32 [rows], and data is i8; null: data is bf16
  bool is_shared = false;        // it is every one of several matrices

  int64_t element_bytes() const { return scale == nullptr ? 2 : 1; }
  // The matrix with this index, of several [rows, columns] that follow each other.
  FactorMatrix at(int64_t index, int64_t rows, int64_t columns) const {
    if (is_shared) return *this;
    const int64_t numbers = index * ((rows + 15) / 16 * 16) * columns;
    return {data + numbers * element_bytes(), scale == nullptr ? nullptr : scale + index * rows};
  }
};

// Outputs [begin, begin + count) of a site, to which B adds. B reads rows [first_rank, first_rank +
// rank) of A x.
struct AdapterPiece {
  int64_t begin, count, rank, first_rank;
  FactorMatrix b;  // [count, rank]; null if rank is 0
};

// Rows of a site's weight that an adapter has rows of its own for, ascending.
struct ReplacedRows {
  int64_t count = 0;
  const int32_t* ids = nullptr;  // [count], rows of the weight
  FactorMatrix rows;             // [count, columns of the site]; null if count is 0

  // Index of the first of them that is at least `id`.
  int64_t first_from(int64_t id) const {
    int64_t low = 0, high = count;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (ids[middle] < id ? low : high) = ids[middle] < id ? middle + 1 : middle;
    }
    return low;
  }
};

// What an adapter changes of a site. Of one of experts A and B are several matrices, one after the other, for
// the experts that it changes; the ranks and rows of pieces are the same for all of them.
struct SiteAdapter {
  int64_t rank = 0;                  // rows of A, a multiple of 16
  FactorMatrix a;                    // [rank, inputs of the site]; null if rank is 0
  std::vector<AdapterPiece> pieces;  // ascending, together all outputs of the site; empty: B adds nothing
  const float* bias = nullptr;       // f32 [rows of the site]; null: 0
  const float* gain = nullptr;       // the same; null: 1
  std::vector<int32_t> matrices;     // of each expert: index of its matrices; -1: it is not changed
  ReplacedRows replaced;             // of a site without experts

  // Index of an expert's matrices; -1: nothing is changed. A site without experts has those of expert 0.
  int64_t matrix_of(int64_t expert) const {
    if (pieces.empty()) return -1;
    return matrices.empty() ? 0 : matrices[static_cast<size_t>(expert)];
  }
};

struct AdapterSite {
  int64_t rows, columns;  // of each matrix of the weight
  int64_t experts;        // matrices, of experts or of heads; 0: it has one
  bool is_table = false;  // it is a table of embeddings

  // Columns of A, and rows of B.
  int64_t inputs() const { return is_table ? rows : columns; }
  int64_t outputs() const { return is_table ? columns : rows; }
};

// Rows of a step with one adapter, and with one expert where a layer has experts: count of them, from `rows`
// on.
struct AdapterGroup {
  int32_t slot, expert;
  const int32_t* rows;
  int64_t count;
};

// The rows of a step, by their adapters.
class AdapterRows {
 public:
  AdapterRows(int64_t max_rows, int64_t num_slots);
  // Groups `count` rows, whose slots `slot_of(row)` gives; -1: none. Allocates nothing.
  template <class SlotOf>
  void group(int64_t count, const SlotOf& slot_of) {
    groups_.clear();
    next_.assign(next_.size(), 0);
    for (int64_t row = 0; row < count; ++row) {
      slots_[static_cast<size_t>(row)] = slot_of(row);
      if (slots_[static_cast<size_t>(row)] >= 0)
        ++next_[static_cast<size_t>(slots_[static_cast<size_t>(row)])];
    }
    arrange(count);
  }
  const std::vector<AdapterGroup>& groups() const { return groups_; }
  const int32_t* slots() const { return slots_.data(); }

 private:
  void arrange(int64_t count);

  std::vector<int32_t> slots_;  // of each row
  std::vector<int32_t> order_;  // rows, by their slots
  std::vector<int64_t> next_;   // of each slot: how many rows, then where its next one goes
  std::vector<AdapterGroup> groups_;
};

// The rows of a layer of experts, by their experts and adapters.
class ExpertRows {
 public:
  ExpertRows(int64_t max_rows, int64_t num_slots);
  // Groups the copies of `tokens` tokens, whose slots are given. places: [tokens, top], row of each copy,
  // with a stride; starts: first row of each of `experts` experts, and the end. Allocates nothing.
  void group(const int32_t* slots, const int32_t* places, int64_t stride, int64_t tokens, int64_t top,
             const int32_t* starts, int64_t experts);
  const std::vector<AdapterGroup>& groups() const { return groups_; }
  const int32_t* slots() const { return slots_.data(); }
  int64_t max_rows() const { return static_cast<int64_t>(slots_.size()); }

 private:
  // Appends the groups of an expert, whose rows have `place` and the next places in order_. Returns that
  // after them.
  int64_t group_expert(int32_t expert, int32_t begin, int32_t end, int64_t place);

  std::vector<int32_t> slots_;  // of each row
  std::vector<int32_t> order_;  // rows with an adapter, by their experts and slots
  std::vector<int64_t> next_;   // of each slot: how many rows of the expert, then where its next one goes
  std::vector<AdapterGroup> groups_;
};

class Adapters {
 public:
  // max_rank: rows of A at most, a multiple of 16. max_top: experts of a token at most; 0: no layer has any.
  Adapters(std::vector<AdapterSite> sites, int64_t num_slots, int64_t max_rank, int64_t max_tokens,
           int64_t max_logit_rows, int64_t max_top);

  int64_t max_rank() const { return max_rank_; }
  const AdapterSite& site(int64_t index) const;  // std::invalid_argument if there is none
  int64_t num_sites() const { return static_cast<int64_t>(sites_.size()); }

  // Loads an adapter: entry i of `changes` is what it changes of site i. Pieces may leave gaps.
  // std::invalid_argument if something does not fit.
  void load(int64_t slot, std::vector<SiteAdapter> changes);
  void unload(int64_t slot);

  // Before each step, on one thread. slots: of each token, -1 if it has no adapter. logit_rows: tokens with
  // logits. std::invalid_argument if there is no such adapter.
  void begin_step(const int32_t* slots, int64_t tokens, const int32_t* logit_rows, int64_t num_logit_rows);

  // Whether an adapter of this step changes a site, or any site with several matrices.
  bool changes(int64_t site) const { return changed_[static_cast<size_t>(site)] != 0; }
  bool changes_matrices() const { return changes_matrices_; }
  const AdapterRows& rows(bool are_logit_rows) const { return are_logit_rows ? of_logit_rows_ : of_tokens_; }
  // The rows of the layer of experts that runs: a kernel groups them before its products.
  ExpertRows& expert_rows() { return of_experts_; }
  const ExpertRows& expert_rows() const { return of_experts_; }
  const SiteAdapter& at(int64_t site, int32_t slot) const {
    return loaded_[static_cast<size_t>(slot)][static_cast<size_t>(site)];
  }

 private:
  void check_slot(int64_t slot) const;

  const std::vector<AdapterSite> sites_;
  const int64_t max_rank_;
  std::vector<std::vector<SiteAdapter>> loaded_;  // of each slot, by site; empty: nothing
  std::vector<std::vector<size_t>> changed_by_;   // of each slot: sites that its adapter changes
  std::vector<uint8_t> changed_;                  // of each site: 1 if an adapter of this step changes it
  bool changes_matrices_ = false;
  AdapterRows of_tokens_, of_logit_rows_;
  ExpertRows of_experts_;
};

}  // namespace enginewright
