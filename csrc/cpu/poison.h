// Memory that nobody may touch, for AddressSanitizer (`make sanitize`); in other builds this does nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ENGINEWRIGHT_ASAN
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define ENGINEWRIGHT_ASAN
#endif

#if defined(ENGINEWRIGHT_ASAN)
extern "C" void __asan_poison_memory_region(const volatile void* p, size_t bytes);
extern "C" void __asan_unpoison_memory_region(const volatile void* p, size_t bytes);
#endif

namespace enginewright {

#if defined(ENGINEWRIGHT_ASAN)
constexpr int64_t kGuardBytes = 4096;  // before and after what Memory gives
inline void poison(const void* p, int64_t bytes) {
  __asan_poison_memory_region(p, static_cast<size_t>(bytes));
}
inline void unpoison(const void* p, int64_t bytes) {
  __asan_unpoison_memory_region(p, static_cast<size_t>(bytes));
}
#else
constexpr int64_t kGuardBytes = 0;
inline void poison(const void*, int64_t) {}
inline void unpoison(const void*, int64_t) {}
#endif

}  // namespace enginewright
