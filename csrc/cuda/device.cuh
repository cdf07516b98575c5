// What CUDA kernels are written with: the GPU's instructions that C++ has no name for, one function each.
//
// Kernels include this header and no other one, so NVRTC compiles them without any toolkit's headers; with
// ENGINEWRIGHT_EMULATED, g++ compiles the same sources and emulated.h takes the place of what is below, one
// fiber a thread. wgmma.cuh has what only Hopper has.
//
// A kernel is a `template <...> __global__ void` in namespace enginewright whose template arguments are the
// model's constants. Its blocks have one dimension, a multiple of 32 threads. Functions that say "warp" are
// called by all 32 lanes of a warp together. All shared memory is dynamic: shared_memory(). Sizes that vary
// from step to step are read from device memory (Sizes), so that launches can be replayed as a graph.
//
// Fragments, as PTX defines them (ISA 9.0, 9.7.14.5), with g = lane / 4 and t = lane % 4. A register holds
// two bf16 (lower k in the lower half) or four bytes. Of a 16 x 16 bf16 A (16 x 32 bytes): a[0] row g,
// columns 2t (4t) ...; a[1] row g + 8, the same columns; a[2] row g, columns 2t + 8 (4t + 16) ...; a[3] row g
// + 8. Of B, 16 x 8 (32 x 8): b[0] rows 2t (4t) ... of column g, b[1] rows 2t + 8 (4t + 16) .... Of the sums
// D, 16 x 8: d[0], d[1] row g, columns 2t, 2t + 1; d[2], d[3] row g + 8.
#pragma once

#ifdef ENGINEWRIGHT_EMULATED
#include "emulated.h"
#else

using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

#define DEVICE __device__ __forceinline__
#define COLD __device__ __noinline__  // a function that is big, and seldom called or in many places
#define KERNEL(threads) __global__ void __launch_bounds__(threads)
#define KERNEL_OCCUPANCY(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define UNROLL _Pragma("unroll")       // for loops whose counter indexes registers
#define NO_UNROLL _Pragma("unroll 1")  // for loops of much code, or whose turns would share registers
#define PRAGMA(text) _Pragma(#text)
#define UNROLL_BY(count) PRAGMA(unroll(count))  // of a constant expression

namespace enginewright {

constexpr int SM = __CUDA_ARCH__ / 10;  // 80, 86, 89, 90, 100, 120
constexpr uint32_t ALL_LANES = 0xffffffffu;

DEVICE int thread_index() { return threadIdx.x; }
// The block's, read where it is written: what follows from it need not be kept in registers.
DEVICE int block_x() {
  int x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
DEVICE int block_y() {
  int y;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  return y;
}
DEVICE int block_z() { return blockIdx.z; }
DEVICE int grid_x() { return gridDim.x; }
DEVICE int grid_y() { return gridDim.y; }
DEVICE int grid_z() { return gridDim.z; }

// The block's dynamic shared memory, aligned for wgmma. What it holds at first is unknown.
template <class T>
DEVICE T* shared_memory() {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  return reinterpret_cast<T*>(shared_bytes);
}

DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
// warp: the compiler moves no work from after it before it, where that would take too many registers.
DEVICE void keep_order() { __syncwarp(); }

// warp: `value` of another lane. T has 4 bytes.
template <class T>
DEVICE T shuffle(T value, int from) {
  return __shfl_sync(ALL_LANES, value, from);
}
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(ALL_LANES, value, mask);
}
template <class T>
DEVICE T shuffle_up(T value, int distance) {  // a lane below `distance` keeps its own
  return __shfl_up_sync(ALL_LANES, value, distance);
}
// warp: a bit for each lane.
DEVICE uint32_t ballot(bool value) { return __ballot_sync(ALL_LANES, value); }

// 16 bytes (or 8, or 4) from global into shared memory, zeros if not `there`: begun, and done when
// wait_copies says so for the thread that began it; for others, a barrier later. Both addresses are aligned
// to BYTES. `global` is not read if not `there`, wherever it is then.
template <int BYTES = 16>
DEVICE void copy_async(void* shared, const void* global, bool there = true) {
  uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  int count = there ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global), "r"(count)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global), "n"(BYTES),
                 "r"(count)
                 : "memory");
}
DEVICE void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}  // what was begun is one group
template <int PENDING>
DEVICE void wait_copies() {  // all groups but the last PENDING are done
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// warp: four 8 x 8 matrices of 16-bit elements out of shared memory. Lane l gives the address of row l % 8 of
// matrix l / 8, 16-byte aligned, in two parts: what a loop keeps, and bytes after it. r[i]: of matrix i,
// elements 2t and 2t + 1 of row g; transposed, of column g.
DEVICE void load_matrices(uint32_t (&r)[4], const void* row, int offset = 0) {
  uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row)) + offset;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}
DEVICE void load_matrices_transposed(uint32_t (&r)[4], const void* row, int offset = 0) {
  uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(row)) + offset;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(from)
               : "memory");
}

// warp: d += a b, fragments as above. Volatile, so that none is moved to where lanes have parted.
DEVICE void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_int8(int32_t (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {  // SM >= 89
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

DEVICE float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
DEVICE uint32_t bits_of_float(float value) { return __float_as_uint(value); }

// Two floats as bf16, rounded to nearest even; `low` in the lower half.
DEVICE uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
// a * b + c of two bf16 each, rounded once.
DEVICE uint32_t fma_bf16(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Two E4M3, in the lower or the upper half of a word, as two f16: exact.
DEVICE uint32_t f16_of_e4m3(uint32_t word, bool upper) {  // SM >= 89
  uint32_t low, high;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h;}"
      : "=r"(low), "=r"(high)
      : "r"(word));
  return upper ? high : low;
}

DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float exp2_fast(float x) {  // within 2 units in the last place; 0 for -infinity
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2_fast(float x) { return __log2f(x); }
DEVICE float inverse_sqrt(float x) { return __frsqrt_rn(x); }
DEVICE float square_root(float x) { return __fsqrt_rn(x); }
DEVICE float divide(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float round_half_even(float x) { return rintf(x); }
DEVICE float tanh_of(float x) { return tanhf(x); }
DEVICE float erfc_of(float x) { return erfcf(x); }
DEVICE float log_of(float x) { return logf(x); }
DEVICE double log_of(double x) { return log(x); }  // slow: for one number, not for each
DEVICE float cos_of(float x) { return cosf(x); }
DEVICE float sin_of(float x) { return sinf(x); }
DEVICE float absolute(float x) { return fabsf(x); }
DEVICE uint32_t multiply_high(uint32_t a, uint32_t b) { return __umulhi(a, b); }
DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) { return __umul64hi(a, b); }
DEVICE int popc(uint32_t bits) { return __popc(bits); }
DEVICE int first_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }  // -1 if there is none

// Two bytes each of a and b by the selector's nibbles (0 ... 3 of a, 4 ... 7 of b), lowest first.
DEVICE uint32_t byte_perm(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

// (a & mask) | bits, as one instruction even where both are constants.
DEVICE uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}

struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  uint32_t x, y;
};

// 16 bytes that the launch reads once and that nobody writes meanwhile (weights).
DEVICE Words4 load_once(const void* address) {
  Words4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}
// 16 bytes, aligned so.
DEVICE Words4 load16(const void* address) { return *static_cast<const Words4*>(address); }
DEVICE void store16(void* address, Words4 words) { *static_cast<Words4*>(address) = words; }

DEVICE int32_t atomic_add(int32_t* address, int32_t value) {
  return atomicAdd(address, value);
}  // gives what was there
DEVICE uint32_t atomic_add(uint32_t* address, uint32_t value) { return atomicAdd(address, value); }
DEVICE uint32_t atomic_max(uint32_t* address, uint32_t value) { return atomicMax(address, value); }
// A thread that sees what this one writes (or adds atomically) afterwards also sees what it wrote before.
DEVICE void fence() { __threadfence(); }

}  // namespace enginewright
#endif

namespace enginewright {

// The sizes of a step, by the positions of the plan's dims (enginewright/plan.py). Every plan has the first
// three; a kernel is specialized to the positions of others.
struct Sizes {
  static constexpr int MOST_DIMS = 8;
  int32_t counts[MOST_DIMS];

  DEVICE int operator[](int dim) const { return counts[dim]; }
  DEVICE int tokens() const { return counts[0]; }
  DEVICE int sequences() const { return counts[1]; }
  DEVICE int logit_rows() const { return counts[2]; }
};

struct bf16 {
  uint16_t bits;
};

constexpr int WARP = 32;
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);
constexpr float LOG2E = 1.4426950408889634f;

DEVICE int lane() { return thread_index() % WARP; }
DEVICE int warp() { return thread_index() / WARP; }

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return float_of_bits(static_cast<uint32_t>(x.bits) << 16); }
DEVICE float low_bf16(uint32_t pair) { return float_of_bits(pair << 16); }
DEVICE float high_bf16(uint32_t pair) { return float_of_bits(pair & 0xffff0000u); }

template <class T>
DEVICE T from_float(float x);  // dtype.cuh has it for FP8
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
  return {static_cast<uint16_t>(pack_bf16(x, 0.0f))};
}

// Rounded to nearest even: |x| <= 127.
template <>
DEVICE int8_t from_float<int8_t>(float x) {
  return static_cast<int8_t>(static_cast<int32_t>(round_half_even(x)));
}

// warp: every lane has the result; the order of operations is fixed.
DEVICE float warp_sum(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}
DEVICE float warp_max(float x) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
  return x;
}

constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace enginewright
