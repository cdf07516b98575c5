// Products of a warpgroup: 4 warps, the first of them a multiple of 4. Hopper's own instructions (PTX
// ISA 9.0, 9.7.15), for code of sm_90a alone.
//
// d += a b, of 64 x K and K x 8 · TILES. Each warp gives 16 rows of A and gets those of D, as fragments of
// device.cuh: wgmma is mma.sync with a B that is TILES times as wide, and lies in shared memory. It is begun
// by all four warps together, and done when wgmma_wait says so. Until then nobody touches d, a or B, but
// products of the same shape may be added to the same d. Of what begins it, in order:
//   - writes to B, and fence_copies() by the thread that wrote, before the barrier that says that they are
//   done;
//   - wgmma_fence() after the last write to a or d;
//   - products; wgmma_commit(), which makes a group of them.
// Compilers know none of this: hold() keeps what is in registers where it is written.
//
// B is K-major: a row of ROW_BYTES for each of its columns, in shared memory aligned to 8 rows. 16 bytes of a
// row are at swizzled(): bits 4 ... 6 of an address (4 and 5 in rows of 64 bytes) are mixed with bits 7 ... 9
// (7 and 8).
//
// B of wgmma_bf16_transposed is MN-major: a row of 128 bytes for each k, 64 columns of it, at swizzled(),
// too; the next 64 columns are rows after all of these.
#pragma once

#include "device.cuh"

#ifdef ENGINEWRIGHT_EMULATED
#include "emulated_wgmma.h"
#else

namespace enginewright {

// What was copied into shared memory is there for wgmma, too: for each thread's own copies, when it has
// waited.
DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
DEVICE void wgmma_wait() {  // all groups but the last PENDING are done
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int COUNT>
DEVICE void hold(uint32_t (&registers)[COUNT][4]) {
  UNROLL
  for (auto& four : registers)
    asm volatile("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3])::"memory");
}
template <int COUNT>
DEVICE void hold(int32_t (&registers)[COUNT][4]) {
  UNROLL
  for (auto& four : registers)
    asm volatile("" : "+r"(four[0]), "+r"(four[1]), "+r"(four[2]), "+r"(four[3])::"memory");
}
template <int COUNT>
DEVICE void hold(float (&registers)[COUNT][4]) {
  UNROLL
  for (auto& four : registers)
    asm volatile("" : "+f"(four[0]), "+f"(four[1]), "+f"(four[2]), "+f"(four[3])::"memory");
}

DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

#define D4(type, d) type(d[0]), type(d[1]), type(d[2]), type(d[3])
#define D32(type, d, at)                                                                               \
  D4(type, d[at]), D4(type, d[at + 1]), D4(type, d[at + 2]), D4(type, d[at + 3]), D4(type, d[at + 4]), \
      D4(type, d[at + 5]), D4(type, d[at + 6]), D4(type, d[at + 7])
#define NAMES32                                                                                          \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES64                                                                                            \
  NAMES32                                                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define OF_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int32_t>(add))
// add: or d = a b. b: wgmma_b, or wgmma_b_transposed.
#define WGMMA(function, sum, type, kind, more)                                                       \
  template <int TILES>                                                                               \
  DEVICE void function(sum(&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {            \
    static_assert(TILES == 8 || TILES == 16);                                                        \
    if constexpr (TILES == 8)                                                                        \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64" kind  \
                   " {" NAMES32 "}, {%32, %33, %34, %35}, %36, p" more ";}"                          \
                   : D32(type, d, 0)                                                                 \
                   : OF_A);                                                                          \
    else                                                                                             \
      asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128" kind \
                   " {" NAMES64 "}, {%64, %65, %66, %67}, %68, p" more ";}"                          \
                   : D32(type, d, 0), D32(type, d, 8)                                                \
                   : OF_A);                                                                          \
  }
WGMMA(wgmma_bf16, float, "+f", "k16.f32.bf16.bf16", ", 1, 1, 0")
WGMMA(wgmma_bf16_transposed, float, "+f", "k16.f32.bf16.bf16", ", 1, 1, 1")
WGMMA(wgmma_int8, int32_t, "+r", "k32.s32.s8.s8", "")
WGMMA(wgmma_e4m3, float, "+f", "k32.f32.e4m3.e4m3", ", 1, 1")
#undef WGMMA
#undef OF_A
#undef NAMES64
#undef NAMES32
#undef D32
#undef D4

}  // namespace enginewright
#endif

namespace enginewright {

// Where 16 bytes of a row of B are.
template <int ROW_BYTES>
DEVICE int swizzled(int row, int granule) {
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 128);
  return row * ROW_BYTES + (granule ^ (row * ROW_BYTES / 128 & (ROW_BYTES / 16 - 1))) * 16;
}

// B by its descriptor, from row 0 and byte `k` of a row on: a multiple of 32, what a product takes.
template <int ROW_BYTES>
DEVICE uint64_t wgmma_b(const void* rows, int k) {
  constexpr uint64_t SWIZZLE = ROW_BYTES == 128 ? 1 : 2, EIGHT_ROWS = 8 * ROW_BYTES;
  return SWIZZLE << 62 | EIGHT_ROWS / 16 << 32 | uint64_t{1} << 16 |
         ((shared_address(rows) + k) & 0x3ffff) >> 4;
}

// B of wgmma_bf16_transposed, from row `k` of ROWS on: a multiple of 16. What PTX calls leading dimension is
// from 64 columns to the next ones, its stride from 8 rows to the next ones (as CUTLASS has it in
// mma_traits_sm90_gmma.hpp, too, for Major::MN and B128).
template <int ROWS>
DEVICE uint64_t wgmma_b_transposed(const void* rows, int k) {
  constexpr uint64_t SWIZZLE = 1, COLUMNS = ROWS * 128, EIGHT_ROWS = 8 * 128;
  return SWIZZLE << 62 | EIGHT_ROWS / 16 << 32 | COLUMNS / 16 << 16 |
         ((shared_address(rows) + k * 128) & 0x3ffff) >> 4;
}

}  // namespace enginewright
