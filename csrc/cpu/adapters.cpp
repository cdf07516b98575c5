#include "adapters.h"

#include <algorithm>
#include <utility>

#include "operands.h"

namespace enginewright {

namespace {

constexpr int64_t kMaxSlots = 1 << 16;

// Pieces with what is between them, without ranks, so that they are all rows. Checked.
std::vector<AdapterPiece> without_gaps(const SiteAdapter& change, const AdapterSite& site) {
  std::vector<AdapterPiece> all;
  int64_t row = 0;
  for (const AdapterPiece& piece : change.pieces) {
    require(piece.begin >= row && 0 < piece.count && piece.count <= site.outputs() - piece.begin,
            "the pieces of an adapter overlap, or leave their layer");
    require(0 < piece.rank && 0 <= piece.first_rank && piece.rank <= change.rank - piece.first_rank,
            "a piece of an adapter has no such ranks");
    if (piece.begin > row) all.push_back({row, piece.begin - row, 0, 0, {}});
    all.push_back(piece);
    row = piece.begin + piece.count;
  }
  if (row < site.outputs()) all.push_back({row, site.outputs() - row, 0, 0, {}});
  return all;
}

void check_replaced(const ReplacedRows& replaced, const AdapterSite& site) {
  require(replaced.count == 0 || site.experts == 0, "adapters of experts replace no rows");
  int64_t next = 0;  // the least that the next row may be
  for (int64_t i = 0; i < replaced.count; ++i) {
    require(next <= replaced.ids[i] && replaced.ids[i] < site.rows,
            "the rows that an adapter replaces are not in order, or outside their layer");
    next = int64_t{replaced.ids[i]} + 1;
  }
}

}  // namespace

AdapterRows::AdapterRows(int64_t max_rows, int64_t num_slots)
    : slots_(static_cast<size_t>(max_rows)),
      order_(static_cast<size_t>(max_rows)),
      next_(static_cast<size_t>(num_slots)) {
  groups_.reserve(static_cast<size_t>(num_slots));
}

void AdapterRows::arrange(int64_t count) {
  int64_t begin = 0;
  for (size_t slot = 0; slot < next_.size(); ++slot) {
    const int64_t rows = next_[slot];
    if (rows > 0) groups_.push_back({static_cast<int32_t>(slot), 0, order_.data() + begin, rows});
    next_[slot] = begin;
    begin += rows;
  }
  for (int64_t row = 0; row < count; ++row) {
    const int32_t slot = slots_[static_cast<size_t>(row)];
    if (slot < 0) continue;
    order_[static_cast<size_t>(next_[static_cast<size_t>(slot)]++)] = static_cast<int32_t>(row);
  }
}

ExpertRows::ExpertRows(int64_t max_rows, int64_t num_slots)
    : slots_(static_cast<size_t>(max_rows)),
      order_(static_cast<size_t>(max_rows)),
      next_(static_cast<size_t>(num_slots)) {
  groups_.reserve(static_cast<size_t>(max_rows));
}

void ExpertRows::group(const int32_t* slots, const int32_t* places, int64_t stride, int64_t tokens,
                       int64_t top, const int32_t* starts, int64_t experts) {
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t* own = places + token * stride;
    for (int64_t i = 0; i < top; ++i) slots_[static_cast<size_t>(own[i])] = slots[token];
  }
  groups_.clear();
  int64_t place = 0;
  for (int64_t e = 0; e < experts; ++e) {
    place = group_expert(static_cast<int32_t>(e), starts[e], starts[e + 1], place);
  }
}

// The groups of an expert are in the order of their first rows, and rows in their own order.
int64_t ExpertRows::group_expert(int32_t expert, int32_t begin, int32_t end, int64_t place) {
  const size_t first = groups_.size();
  for (int32_t row = begin; row < end; ++row) {
    const int32_t slot = slots_[static_cast<size_t>(row)];
    if (slot < 0) continue;
    if (next_[static_cast<size_t>(slot)]++ == 0) groups_.push_back({slot, expert, nullptr, 0});
  }
  for (size_t i = first; i < groups_.size(); ++i) {
    AdapterGroup& group = groups_[i];
    int64_t& next = next_[static_cast<size_t>(group.slot)];
    group.count = next;
    group.rows = order_.data() + place;
    next = place;
    place += group.count;
  }
  for (int32_t row = begin; row < end; ++row) {
    const int32_t slot = slots_[static_cast<size_t>(row)];
    if (slot >= 0) order_[static_cast<size_t>(next_[static_cast<size_t>(slot)]++)] = row;
  }
  for (size_t i = first; i < groups_.size(); ++i) next_[static_cast<size_t>(groups_[i].slot)] = 0;
  return place;
}

Adapters::Adapters(std::vector<AdapterSite> sites, int64_t num_slots, int64_t max_rank, int64_t max_tokens,
                   int64_t max_logit_rows, int64_t max_top)
    : sites_(std::move(sites)),
      max_rank_(max_rank),
      loaded_((require(0 < num_slots && num_slots <= kMaxSlots, "there must be 1 to 65536 slots"),
               static_cast<size_t>(num_slots))),
      changed_by_(static_cast<size_t>(num_slots)),
      changed_(sites_.size()),
      of_tokens_(
          (require(0 < max_tokens && max_tokens < int64_t{1} << 31, "the number of tokens is out of range"),
           max_tokens),
          num_slots),
      of_logit_rows_((require(0 < max_logit_rows && max_logit_rows < int64_t{1} << 31,
                              "the number of rows of logits is out of range"),
                      max_logit_rows),
                     num_slots),
      of_experts_((require(0 <= max_top && max_top < int64_t{1} << 31 &&
                               max_top * std::max(max_tokens, max_logit_rows) < int64_t{1} << 31,
                           "there are more rows of experts than int32 counts"),
                   max_top * std::max(max_tokens, max_logit_rows)),
                  num_slots) {
  require(0 < max_rank && max_rank <= 1 << 20 && max_rank % 16 == 0, "the rank must be a multiple of 16");
  for (const AdapterSite& site : sites_) {
    require(
        0 < site.rows && site.rows < int64_t{1} << 31 && 0 < site.columns && site.columns < int64_t{1} << 31,
        "a site has no size");
    require(0 <= site.experts && site.experts < int64_t{1} << 20,
            "a site has an impossible number of experts");
    require(!site.is_table || site.experts == 0, "a table has no experts");
  }
}

const AdapterSite& Adapters::site(int64_t index) const {
  require(0 <= index && index < num_sites(), "there is no site " + std::to_string(index));
  return sites_[static_cast<size_t>(index)];
}

void Adapters::check_slot(int64_t slot) const {
  require(0 <= slot && slot < static_cast<int64_t>(loaded_.size()),
          "there is no slot " + std::to_string(slot));
}

void Adapters::load(int64_t slot, std::vector<SiteAdapter> changes) {
  check_slot(slot);
  require(changes.size() == sites_.size(), "an adapter has another number of sites");
  for (size_t i = 0; i < changes.size(); ++i) {
    SiteAdapter& change = changes[i];
    require(0 <= change.rank && change.rank <= max_rank_ && change.rank % 16 == 0,
            "an adapter has rank " + std::to_string(change.rank) + ", and at most " +
                std::to_string(max_rank_) + " is possible");
    const auto experts = static_cast<size_t>(sites_[i].experts);
    if (!change.pieces.empty()) {
      require(change.matrices.size() == experts, "an adapter changes another number of experts");
    }
    require(experts == 0 || (change.bias == nullptr && change.gain == nullptr),
            "adapters of experts have no bias and no gain");
    require(!sites_[i].is_table || (change.bias == nullptr && change.gain == nullptr),
            "adapters of tables have no bias and no gain");
    check_replaced(change.replaced, sites_[i]);
    const bool changes_site = !change.pieces.empty() || change.bias != nullptr || change.gain != nullptr ||
                              change.replaced.count > 0;
    if (changes_site) change.pieces = without_gaps(change, sites_[i]);
  }
  std::vector<size_t>& changed = changed_by_[static_cast<size_t>(slot)];
  changed.clear();
  for (size_t i = 0; i < changes.size(); ++i) {
    if (!changes[i].pieces.empty()) changed.push_back(i);
  }
  loaded_[static_cast<size_t>(slot)] = std::move(changes);
}

void Adapters::unload(int64_t slot) {
  check_slot(slot);
  loaded_[static_cast<size_t>(slot)].clear();
}

void Adapters::begin_step(const int32_t* slots, int64_t tokens, const int32_t* logit_rows,
                          int64_t num_logit_rows) {
  const int64_t num_slots = static_cast<int64_t>(loaded_.size());
  for (int64_t token = 0; token < tokens; ++token) {
    const int32_t slot = slots[token];
    if (slot == -1) continue;
    if (slot < 0 || slot >= num_slots || loaded_[static_cast<size_t>(slot)].empty()) {
      throw std::invalid_argument("token " + std::to_string(token) + " has the adapter of slot " +
                                  std::to_string(slot) + ", where none is loaded");
    }
  }
  of_tokens_.group(tokens, [&](int64_t token) { return slots[token]; });
  of_logit_rows_.group(num_logit_rows, [&](int64_t row) { return slots[logit_rows[row]]; });
  std::fill(changed_.begin(), changed_.end(), uint8_t{0});
  changes_matrices_ = false;
  for (const AdapterGroup& group : of_tokens_.groups()) {
    for (const size_t site : changed_by_[static_cast<size_t>(group.slot)]) {
      changed_[site] = 1;
      changes_matrices_ = changes_matrices_ || sites_[site].experts != 0;
    }
  }
}

}  // namespace enginewright
