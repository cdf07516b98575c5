#include "state_slots.h"

#include "operands.h"

namespace enginewright {

StateSlots::StateSlots(int64_t layers, int64_t num_slots, const std::vector<StateTensorSpec>& tensors)
    : layers_(layers), places_("recurrent state", "slot", num_slots, [&] {
        require(layers > 0 && num_slots > 0 && !tensors.empty(), "a recurrent state has no size");
        for (const StateTensorSpec& spec : tensors) {
          const std::string the = "the state's tensor '" + spec.name + "' ";
          require(spec.dtype == DType::f32, the + "holds f32, not " + name_of(spec.dtype));
          require(spec.elements > 0, the + "has no size");
          tensors_.push_back({spec, layer_bytes_});
          layer_bytes_ = checked_add(layer_bytes_, checked_mul(spec.elements, bytes_of(spec.dtype)));
        }
        return checked_mul(layer_bytes_, layers);
      }()) {}

StateTensor StateSlots::tensor(int64_t layer, const std::string& name) const {
  require(0 <= layer && layer < layers_, "the recurrent state has no layer " + std::to_string(layer));
  for (const Tensor& tensor : tensors_) {
    if (tensor.spec.name != name) continue;
    std::byte* data = places_.data() + layer * layer_bytes_ + tensor.offset_bytes;
    return {data, tensor.spec.dtype, places_.count(), tensor.spec.elements, places_.place_bytes()};
  }
  throw std::invalid_argument("the recurrent state has no tensor '" + name + "'");
}

}  // namespace enginewright
