// What kernels share that read and write a recurrent state: each sequence of a step has a slot of it, and its
// tokens are taken one after the other, so that results do not depend on how a prompt is cut.
#pragma once

#include "operands.h"

namespace enginewright {
namespace {

// Which tokens a sequence has in a step, and where its state is.
class StateSequences {
 public:
  StateSequences(const Operands& operands, const Operand& x, int64_t elements)
      : query_start_(step_input(operands, "query_start")),
        slots_(step_input(operands, "slots")),
        state_(state_tensor(operands, "state", elements)) {
    require(x.rows == Linear{0, {1}}, "'" + x.label + "' must have a row for each token");
    require(slots_.rows == Linear{0, {0, 1}} && slots_.columns == 1,
            "'slots' must have one number for each sequence");
  }

  void add_checks(StepChecks& checks) const {
    checks.query_starts.push_back(query_start_);
    checks.indices.push_back({slots_, Linear{state_.num_slots, {}}});
  }

  Range tokens(int64_t s) const {
    const int32_t* start = query_start_.as<const int32_t>() + s * query_start_.stride;
    return {start[0], start[query_start_.stride]};
  }
  float* state(int64_t s) const { return state_.of(slots_.as<const int32_t>()[s * slots_.stride]); }
  int64_t moved_bytes(const Sizes& sizes) const {  // every state is read and written
    return 2 * sizes[kSequences] * state_.bytes();
  }

 private:
  const Operand query_start_, slots_;
  const StateTensor state_;
};

}  // namespace
}  // namespace enginewright
