// AMX tiles (Intel SDM vol. 1, ch. 18): their configuration, their instructions, and the products of two of
// them.
#pragma once

#include <cstdint>

#include "simd_portable.h"  // ENGINEWRIGHT_INLINE

namespace enginewright {
namespace {

// What LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The instructions; assembly since the intrinsics take no template arguments.
struct Amx {
  template <int T>
  static ENGINEWRIGHT_INLINE void load(const void* p, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T));
  }
  // The same for what will not be read again soon: it does not drive A out of L1.
  template <int T>
  static ENGINEWRIGHT_INLINE void load_once(const void* p, int64_t stride_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T));
  }
  template <int T>
  static ENGINEWRIGHT_INLINE void store(void* p, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
  }
  template <int T>
  static ENGINEWRIGHT_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  static ENGINEWRIGHT_INLINE void configure(const TileConfig& config) {
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static ENGINEWRIGHT_INLINE void release() { asm volatile("tilerelease"); }
  // Loads above name no memory: what was written to it before must be there.
  static ENGINEWRIGHT_INLINE void written() { asm volatile("" ::: "memory"); }
};

constexpr int64_t kTileBytes = 1024, kTileRowBytes = 64;

// What tiles hold. A tile's row is 64 bytes of K.
struct Bf16Product {
  using Sum = float;
  static constexpr int64_t kBytes = 2;
  template <int C, int A, int B>
  static ENGINEWRIGHT_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
struct I8Product {
  using Sum = int32_t;
  static constexpr int64_t kBytes = 1;
  template <int C, int A, int B>
  static ENGINEWRIGHT_INLINE void dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
// A without a sign.
struct U8Product {
  template <int C, int A, int B>
  static ENGINEWRIGHT_INLINE void dot() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace
}  // namespace enginewright
