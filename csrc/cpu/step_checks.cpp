// clang-format off
#include "for_size.h"  // before all others
// clang-format on

#include "step_checks.h"

#include <algorithm>

#include "adapters.h"
#include "operands.h"

namespace enginewright {

namespace {

constexpr Linear kTokenRows{0, {1}}, kSequenceRows{0, {0, 1}}, kSequenceEnds{1, {0, 1}},
    kLogits{0, {0, 0, 1}};
static_assert(kTokens == 0 && kSequences == 1 && kLogitRows == 2);

const int32_t* find(const Operands& inputs, const std::string& name, const Linear& rows) {
  const auto found = inputs.find(name);
  if (found == inputs.end()) return nullptr;
  require(found->second.rows == rows && found->second.columns == 1,
          "the input '" + name + "' has another shape than is known of it");
  return found->second.as<int32_t>();
}

// require() would build its sentence also where it holds, and these run before every step.
[[noreturn]] void refuse(const std::string& sentence) { throw std::invalid_argument(sentence); }

std::string text(int64_t value) { return std::to_string(value); }

}  // namespace

InputChecks::InputChecks(const Operands& inputs)
    : query_start_(find(inputs, "query_start", kSequenceEnds)),
      kv_len_(find(inputs, "kv_len", kSequenceRows)),
      positions_(find(inputs, "positions", kTokenRows)),
      adapter_slots_(find(inputs, "adapter_slots", kTokenRows)),
      logit_rows_(find(inputs, "logit_rows", kLogits)) {}

void InputChecks::add(const Kernel& kernel) {
  StepChecks wanted;
  kernel.add_checks(wanted);
  for (const Operand& query_start : wanted.query_starts) {
    require(query_start_ != nullptr && query_start.as<int32_t>() == query_start_,
            "'" + query_start.label + "' must be the input 'query_start'");
  }
  for (const IndexCheck& check : wanted.indices) {
    require(check.values.kind == Operand::Kind::step && check.values.columns == 1,
            "'" + check.values.label + "' must be an input of one column");
    const auto same = [&](const IndexCheck& other) {
      return other.values.data == check.values.data && other.limit == check.limit;
    };
    const auto& known = checks_.indices;
    if (std::none_of(known.begin(), known.end(), same)) checks_.indices.push_back(check);
  }
  if (wanted.adapters != nullptr) {
    require(adapter_slots_ != nullptr && logit_rows_ != nullptr,
            "adapters need the inputs 'adapter_slots' and 'logit_rows'");
    require(checks_.adapters == nullptr || checks_.adapters == wanted.adapters,
            "there are two sets of adapters");
    checks_.adapters = wanted.adapters;
  }
  for (const BlockTableCheck& check : wanted.block_tables) {
    require(query_start_ != nullptr && check.query_start.as<int32_t>() == query_start_ &&
                kv_len_ != nullptr && check.kv_len.as<int32_t>() == kv_len_,
            "attention needs the inputs 'query_start' and 'kv_len'");
    require(check.block_table.kind == Operand::Kind::step && check.block_table.rows == kSequenceRows,
            "'" + check.block_table.label + "' must be an input with a row for each sequence");
    const auto same = [&](const BlockTableCheck& other) {
      return other.block_table.data == check.block_table.data && other.block_size == check.block_size &&
             other.num_blocks == check.num_blocks && other.window == check.window &&
             other.partials.rows == check.partials.rows;
    };
    const auto& known = checks_.block_tables;
    if (std::none_of(known.begin(), known.end(), same)) checks_.block_tables.push_back(check);
  }
}

void InputChecks::check(const Sizes& sizes) const {
  check_sequences(sizes);
  for (const IndexCheck& check : checks_.indices) check_index(check, sizes);
  for (const BlockTableCheck& check : checks_.block_tables) check_block_table(check, sizes);
  if (checks_.adapters == nullptr) return;
  for (int64_t i = 0; i < sizes[kLogitRows]; ++i) {
    if (logit_rows_[i] < 0 || logit_rows_[i] >= sizes[kTokens])
      refuse("logit_rows has a token that is not there");
  }
  checks_.adapters->begin_step(adapter_slots_, sizes[kTokens], logit_rows_, sizes[kLogitRows]);
}

void InputChecks::check_sequences(const Sizes& sizes) const {
  if (query_start_ != nullptr) {
    if (query_start_[0] != 0) refuse("query_start begins with " + text(query_start_[0]) + ", not 0");
    for (int64_t s = 0; s < sizes[kSequences]; ++s) {
      const int64_t tokens = int64_t{query_start_[s + 1]} - query_start_[s];
      if (tokens <= 0) refuse("query_start does not rise at sequence " + text(s));
      if (kv_len_ != nullptr && kv_len_[s] < tokens) {
        refuse("kv_len of sequence " + text(s) + " is less than its " + text(tokens) + " new tokens");
      }
    }
    const int32_t end = query_start_[sizes[kSequences]];
    if (end != sizes[kTokens])
      refuse("query_start ends with " + text(end) + ", not with the number of tokens");
  }
  if (positions_ == nullptr) return;
  if (query_start_ == nullptr || kv_len_ == nullptr) {
    for (int64_t t = 0; t < sizes[kTokens]; ++t) {
      if (positions_[t] < 0) refuse("the position of token " + text(t) + " is negative");
    }
    return;
  }
  for (int64_t s = 0; s < sizes[kSequences]; ++s) {
    for (int32_t t = query_start_[s]; t < query_start_[s + 1]; ++t) {
      if (positions_[t] != kv_len_[s] - (query_start_[s + 1] - t)) {
        refuse("token " + text(t) + " is not at the position that follows from kv_len");
      }
    }
  }
}

void InputChecks::check_index(const IndexCheck& check, const Sizes& sizes) const {
  const int64_t rows = check.values.rows.at(sizes), limit = check.limit.at(sizes);
  const int32_t* values = check.values.as<int32_t>();
  for (int64_t i = 0; i < rows; ++i) {
    if (0 <= values[i] && values[i] < limit) continue;
    refuse(check.values.label + "[" + text(i) + "] is " + text(values[i]) + ", outside 0 … " +
           text(limit - 1));
  }
}

void InputChecks::check_block_table(const BlockTableCheck& check, const Sizes& sizes) const {
  for (int64_t s = 0; s < sizes[kSequences]; ++s) {
    const int64_t kv_len = kv_len_[s], tokens = query_start_[s + 1] - query_start_[s];
    if (kv_len > check.block_table.width.at(sizes) * check.block_size) {
      refuse("sequence " + text(s) + " is longer than its block table");
    }
    if (kv_len > check.partials.rows.at(sizes) * kSplitPositions) {
      refuse("sequence " + text(s) + " has more splits than '" + check.partials.label + "' has rows");
    }
    const int64_t oldest = check.window > 0 ? std::max<int64_t>(0, kv_len - tokens - check.window + 1) : 0;
    const int32_t* blocks = check.block_table.as<int32_t>() + s * check.block_table.stride;
    for (int64_t b = oldest / check.block_size; b * check.block_size < kv_len; ++b) {
      if (0 <= blocks[b] && blocks[b] < check.num_blocks) continue;
      refuse(check.block_table.label + "[" + text(s) + ", " + text(b) + "] is " + text(blocks[b]) +
             ", outside 0 … " + text(check.num_blocks - 1));
    }
  }
}

}  // namespace enginewright
