#include "places.h"

#include <cstring>

#include "operands.h"

namespace enginewright {

Places::Places(std::string owner, std::string place, int64_t count, int64_t place_bytes)
    : owner_(std::move(owner)),
      place_(std::move(place)),
      count_(count),
      place_bytes_(place_bytes),
      memory_(checked_mul(count, place_bytes)) {}

std::byte* Places::at(int64_t place) const {
  require(0 <= place && place < count_, "the " + owner_ + " has no " + place_ + " " + std::to_string(place));
  return memory_.data() + place * place_bytes_;
}

void Places::scrub(const std::vector<int64_t>& places) {
  for (const int64_t place : places) at(place);  // all are checked before one is written
  for (const int64_t place : places) std::memset(at(place), 0, static_cast<size_t>(place_bytes_));
}

void Places::copy(const std::vector<std::pair<int64_t, int64_t>>& places) {
  for (const auto& [from, to] : places) {
    at(from);
    at(to);
    require(from != to, "a " + place_ + " is copied onto itself");
  }
  for (const auto& [from, to] : places) std::memcpy(at(to), at(from), static_cast<size_t>(place_bytes_));
}

}  // namespace enginewright
