#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <new>
#include <stdexcept>

#include "poison.h"

namespace enginewright {

namespace {
constexpr int64_t kMaxBytes = int64_t{1} << 62;
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
  unpoison(data_ - kGuardBytes, mapped_bytes());  // for the next owner of these addresses
  munmap(data_ - kGuardBytes, static_cast<size_t>(mapped_bytes()));
}

int64_t Memory::mapped_bytes() const { return bytes_ + 2 * kGuardBytes; }

int64_t l1_bytes() {
#ifdef _SC_LEVEL1_DCACHE_SIZE
  static const int64_t said =
      sysconf(_SC_LEVEL1_DCACHE_SIZE);  // which asks the CPU, slowly in a virtual machine
  if (said > kMinL1Bytes) return said;
#endif
  return kMinL1Bytes;
}

bool reads_one_stream() {
#if defined(__x86_64__)
  // Zen 5 (family 1Ah), on which weights of one token pass at 95 % of the roofline so, at 75 % in eight
  // streams.
  static const bool zen5 = [] {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx || !__get_cpuid(1, &a, &b, &c, &d))
      return false;
    const uint32_t base = a >> 8 & 0xf, extended = a >> 20 & 0xff;
    return base == 0xf && base + extended >= 0x1a;
  }();
  return zen5;
#else
  return false;
#endif
}

int64_t checked_mul(int64_t a, int64_t b) {
  if (a < 0 || b < 0 || (b != 0 && a > kMaxBytes / b)) throw std::invalid_argument("a size overflows");
  return a * b;
}

int64_t checked_add(int64_t a, int64_t b) {
  if (a < 0 || b < 0 || a > kMaxBytes - b) throw std::invalid_argument("a size overflows");
  return a + b;
}

}  // namespace enginewright
