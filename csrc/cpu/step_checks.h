// What must hold of a step's inputs before kernels may trust them.
//
// Always, of the inputs with these names: query_start rises from 0 to `tokens`, every sequence with at least
// one token; kv_len is at least a sequence's new tokens; positions are those after the context,
// kv_len - n … kv_len - 1 (only not negative where a plan has no sequences). Also checks what kernels ask
// for.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernel.h"

namespace enginewright {

constexpr int64_t kSplitPositions = 256;  // positions in one split of attention (docs/design.md)

class InputChecks {
 public:
  explicit InputChecks(const Operands& inputs);
  // Adds a kernel's checks, each once. std::invalid_argument if an operand cannot mean what the check says.
  void add(const Kernel& kernel);
  // std::invalid_argument with the first thing that does not hold. Groups the rows of adapters.
  void check(const Sizes& sizes) const;

 private:
  void check_sequences(const Sizes& sizes) const;
  void check_index(const IndexCheck& check, const Sizes& sizes) const;
  void check_block_table(const BlockTableCheck& check, const Sizes& sizes) const;

  const int32_t* query_start_ = nullptr;
  const int32_t* kv_len_ = nullptr;
  const int32_t* positions_ = nullptr;
  const int32_t* adapter_slots_ = nullptr;
  const int32_t* logit_rows_ = nullptr;
  StepChecks checks_;
};

}  // namespace enginewright
