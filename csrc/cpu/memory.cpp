#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <stdexcept>

#include "poison.h"

namespace enginewright {

namespace {
constexpr int64_t kMostBytes = int64_t{1} << 62;
}

Memory::Memory(int64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, static_cast<size_t>(mapped_bytes()), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
  madvise(p, static_cast<size_t>(mapped_bytes()), MADV_HUGEPAGE);  // a wish; refused is fine
#endif
  data_ = static_cast<std::byte*>(p) + kGuardBytes;
  poison(p, mapped_bytes());
  unpoison(data_, bytes);
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  unpoison(data_ - kGuardBytes, mapped_bytes());  // whoever gets these addresses next
  munmap(data_ - kGuardBytes, static_cast<size_t>(mapped_bytes()));
}

int64_t Memory::mapped_bytes() const { return bytes_ + 2 * kGuardBytes; }

int64_t l1_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t said =
      sysconf(_SC_LEVEL1_DCACHE_SIZE);  // which asks the CPU, slowly in a virtual machine
  if (said > kLeastL1Bytes) return said;
#endif
  return kLeastL1Bytes;
}

int64_t checked_mul(int64_t a, int64_t b) {
  if (a < 0 || b < 0 || (b != 0 && a > kMostBytes / b)) throw std::invalid_argument("a size overflows");
  return a * b;
}

int64_t checked_add(int64_t a, int64_t b) {
  if (a < 0 || b < 0 || a > kMostBytes - b) throw std::invalid_argument("a size overflows");
  return a + b;
}

}  // namespace enginewright
