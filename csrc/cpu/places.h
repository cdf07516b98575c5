// The places of one cache group, all of the same size: blocks of tokens, or slots of a state.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace enginewright {

class Places {
 public:
  // owner, place: what messages call the group and one of its places. std::bad_alloc.
  Places(std::string owner, std::string place, int64_t count, int64_t place_bytes);

  int64_t count() const { return count_; }
  int64_t place_bytes() const { return place_bytes_; }
  int64_t bytes() const { return memory_.bytes(); }
  std::byte* data() const { return memory_.data(); }
  // Zeroes places (std::invalid_argument for one that is not there).
  void scrub(const std::vector<int64_t>& places);
  // Copies places, pair by pair: from the first to the second.
  void copy(const std::vector<std::pair<int64_t, int64_t>>& places);

 private:
  std::byte* at(int64_t place) const;  // std::invalid_argument

  const std::string owner_, place_;
  const int64_t count_, place_bytes_;
  Memory memory_;  // [count][place_bytes], committed as it is touched
};

}  // namespace enginewright
