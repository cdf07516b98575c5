// A product by csrc/cuda/wgmma.cuh, for its tests: out[128][columns] = a[128][ROW_BYTES]
// b[columns][ROW_BYTES]ᵀ, or b[ROW_BYTES / 2][columns] where it is transposed, a half by each of two
// warpgroups.
#pragma once

#include "wgmma.cuh"

namespace enginewright {

enum class Kind { bf16, bf16_transposed, int8, e4m3 };
// Faults of a kernel, all but the last one between the start of a product and its wait.
enum class Fault { none, writes_a, writes_b, writes_d, reads_d, lanes_differ, warps_differ };

template <Kind KIND>
struct NumberOf {
  using type = float;
};
template <>
struct NumberOf<Kind::int8> {
  using type = int32_t;
};

template <Kind KIND, int TILES, int ROW_BYTES, Fault FAULT>
KERNEL(256)
wgmma_product(const uint8_t* a, const uint8_t* b, typename NumberOf<KIND>::type* out) {
  using Sum = typename NumberOf<KIND>::type;
  constexpr int COLUMNS = TILES * 8, STEPS = ROW_BYTES / 32;
  uint8_t* shared = shared_memory<uint8_t>();
  for (int i = thread_index(); i < COLUMNS * ROW_BYTES / 16; i += 256) {
    constexpr int IN_ROW = KIND == Kind::bf16_transposed ? TILES : ROW_BYTES / 16;
    int row = i / IN_ROW, granule = i % IN_ROW;
    if constexpr (KIND == Kind::bf16_transposed)
      copy_async(shared + granule / 8 * ROW_BYTES * 64 + swizzled<128>(row, granule % 8), b + i * 16);
    else
      copy_async(shared + swizzled<ROW_BYTES>(row, granule), b + i * 16);
  }
  commit_copies();
  wait_copies<0>();
  fence_copies();
  sync_threads();
  int g = lane() / 4, t = lane() % 4;
  Sum d[TILES][4] = {};
  uint32_t fragments[2][1][4];
  UNROLL
  for (int step = 0; step < STEPS; ++step) {
    uint32_t (&fragment)[4] = fragments[step % 2][0];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const uint8_t* from = a + (warp() * 16 + i % 2 * 8 + g) * ROW_BYTES + step * 32 + i / 2 * 16 + 4 * t;
      fragment[i] = *reinterpret_cast<const uint32_t*>(from);
    }
    bool other =
        (FAULT == Fault::lanes_differ && lane() == 5) || (FAULT == Fault::warps_differ && warp() == 5);
    uint64_t matrix = wgmma_b<ROW_BYTES>(shared, other ? 0 : step * 32);
    wgmma_fence();
    if constexpr (KIND == Kind::bf16_transposed)
      wgmma_bf16_transposed(d, fragment, wgmma_b_transposed<ROW_BYTES / 2>(shared, step * 16), step > 0);
    else if constexpr (KIND == Kind::bf16)
      wgmma_bf16(d, fragment, matrix, step > 0);
    else if constexpr (KIND == Kind::int8)
      wgmma_int8(d, fragment, matrix, step > 0);
    else
      wgmma_e4m3(d, fragment, matrix, step > 0);
    wgmma_commit();
    if (FAULT == Fault::writes_a && step == 1 && warp() == 7) fragment[2] += 1;
    if (FAULT == Fault::writes_b && step == 1 && thread_index() == 37) shared[3 * ROW_BYTES + 5] += 1;
    if (FAULT == Fault::writes_d && step == 1 && warp() == 2) d[1][1] = 3;
    if (FAULT == Fault::reads_d && step == 1 && warp() == 3) out[128 * COLUMNS] = d[0][0];  // after the sums
    wgmma_wait<1>();
    hold(fragments[1 - step % 2]);
  }
  wgmma_wait<0>();
  hold(fragments[1 - STEPS % 2]);
  hold(d);
  UNROLL
  for (int tile = 0; tile < TILES; ++tile) {
    UNROLL
    for (int i = 0; i < 4; ++i)
      out[(warp() * 16 + i / 2 * 8 + g) * COLUMNS + tile * 8 + 2 * t + i % 2] = d[tile][i];
  }
}

}  // namespace enginewright
