// The slots of a recurrent state: all tensors of all its layers (kernel.h: StateTensor).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernel.h"
#include "places.h"

namespace enginewright {

// RecurrentState.tensors in enginewright/plan.py.
struct StateTensorSpec {
  std::string name;
  int64_t elements;
  DType dtype;
};

class StateSlots {
 public:
  // std::invalid_argument for sizes that are no sizes; std::bad_alloc.
  StateSlots(int64_t layers, int64_t num_slots, const std::vector<StateTensorSpec>& tensors);

  Places& places() { return places_; }
  // layer: index in the group. std::invalid_argument for a tensor that is not there.
  StateTensor tensor(int64_t layer, const std::string& name) const;

 private:
  struct Tensor {
    StateTensorSpec spec;
    int64_t offset_bytes;  // in a layer's part of a slot
  };

  const int64_t layers_;
  int64_t layer_bytes_ = 0;  // of a layer in a slot
  std::vector<Tensor> tensors_;
  Places places_;  // [num_slots][layers][tensors]
};

}  // namespace enginewright
