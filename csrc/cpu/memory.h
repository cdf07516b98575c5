// Zeroed memory from the system, page aligned and committed as it is touched; and how this machine reads it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace enginewright {

class Memory {
 public:
  explicit Memory(int64_t bytes);  // std::bad_alloc when the system refuses
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  int64_t mapped_bytes() const;

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Of a core's first cache of data: what the system says, at least kMinL1Bytes.
constexpr int64_t kMinL1Bytes = 32 << 10;
int64_t l1_bytes();
// Whether a core reads memory faster in one stream than in several at once.
bool reads_one_stream();

// a * b for sizes of memory: std::invalid_argument for a negative factor or a product above 2^62.
int64_t checked_mul(int64_t a, int64_t b);
int64_t checked_add(int64_t a, int64_t b);

}  // namespace enginewright
