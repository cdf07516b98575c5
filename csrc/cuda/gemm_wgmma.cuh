// GEMM for many tokens on Hopper, whose mma.sync reaches about 60 % of its tensor cores' speed: gemm_large
// with wgmma.
//
// outᵀ = weight xᵀ. A warpgroup has 128 features, a unit of 2 blocks for each of its warps, and the block's
// tiles · 8 tokens. Weights go the way they go in gemm_large: raw lines in shared memory, then in registers
// as A, of which two are a unit's, expanded while the product before runs. x is B: rows of a chunk, swizzled,
// read by wgmma itself.
//
// Inside 32 bytes of x, wgmma takes numbers in order: lane t of four has bytes 4t ... and 16 + 4t .... So
// lanes that gemm_large gives a word each share one here, and take the numbers of theirs from it, where
// weights have fewer bits.
//
// On paper, of 256 x 128 (two warpgroups), a chunk is 1024 clocks of tensor cores; B is read in 512 of them,
// weights in 256, and what is copied is written in 256 (int8) to 384 (bf16). Unmeasured. With groups, whose
// sums stand apart, a tile has 64 tokens, and one warpgroup's products run while the other one scales.
#pragma once

#include "gemm_large.cuh"
#include "wgmma.cuh"

namespace enginewright {

template <Gemm S>
struct GemmWgmma {
  using Of = Shape<S>;
  static constexpr int STAGE_BYTES =
      ceil_div(GemmLarge<S>::STAGE_BYTES, 1024) * 1024;  // so that x is aligned
  static constexpr int STEPS = Of::X_ROW_BYTES / 32;     // of wgmma, in a chunk
  static constexpr int RUN_STEPS = STEPS / Of::RUNS;
  static_assert(S.shared_bytes == S.stages * STAGE_BYTES && GemmLarge<S>::X_AT % 1024 == 0 && S.stages >= 3);
  static_assert(S.format != Format::fp8a8, "its sums in runs are not implemented with wgmma");
  static_assert(S.feature_warps % 4 == 0 && S.token_warps == 1 && S.units == 1 && STEPS % 2 == 0);
};

// A of a step, both halves of the warp's unit.
template <Gemm S>
DEVICE void step_fragments(uint32_t (&a)[2][4], const SharedWeights<S>& weights, int step) {
  constexpr int LINES = Shape<S>::LINES / GemmWgmma<S>::STEPS / 2, SHARED_BY = 4 / LINES;  // lanes
  int t = lane() % 4;
  uint32_t zeros = weights.zeros(0, step / GemmWgmma<S>::RUN_STEPS);
  UNROLL
  for (int half = 0; half < 2; ++half) {
    Words4 words = weights.line(0, 0, (2 * step + half) * LINES + t / SHARED_BY);
    UNROLL
    for (int row = 0; row < 4; ++row)
      a[row / 2][row % 2 + 2 * half] = numbers_of<S>(word_of(words, row), t % 2, t / 2, zeros, row);
  }
}

// d (+)= a b, for a tile.
template <Gemm S>
DEVICE void begin_product(part_t<S> (&d)[S.tiles][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  if constexpr (S.x_codes())
    wgmma_int8(d, a, b, add);
  else
    wgmma_bf16(d, a, b, add);
}

template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, 1)
gemm_wgmma(const Sizes* sizes, const uint8_t* x, const uint8_t* weight, const float* x_scale,
           const uint8_t* scale, const uint8_t* zero, const float* bias, stored_t<S.type>* out) {
  using Of = Shape<S>;
  using K = GemmLarge<S>;
  using W = GemmWgmma<S>;
  uint8_t* shared = shared_memory<uint8_t>();
  int tokens = count_of(S.rows, *sizes);
  auto [first_token, first_feature] = Tile<S>::of_block();
  if (first_token >= tokens) return;

  const CopyWeights<S> weights_of(first_feature / 16, weight, scale, zero);
  const CopyX<S, 1, swizzled<Of::X_ROW_BYTES>> tokens_of(x, first_token, tokens);
  auto stage_of = [&](int chunk) {
    return shared + static_cast<uint32_t>(chunk) % S.stages * W::STAGE_BYTES;
  };
  auto copy = [&](int chunk) {
    if (chunk < Of::CHUNKS) {
      uint8_t* stage = stage_of(chunk);
      weights_of.copy(stage, chunk);
      tokens_of.copy(stage + K::X_AT, chunk);
      if constexpr (S.x_groups())
        copy_x_scales<S, 1>(reinterpret_cast<float*>(stage + K::X_SCALES_AT), x_scale, first_token, tokens,
                            chunk);
    }
    commit_copies();
  };
  // Everyone's copies of a chunk are there, and all products of the last chunk but one are done: its stage is
  // filled again.
  auto arrive = [&](int chunk) {
    wait_copies<S.stages - 3>();
    fence_copies();
    sync_threads();
    copy(chunk + S.stages - 2);
  };
  auto weights_in = [&](int chunk) { return SharedWeights<S>{stage_of(chunk), warp()}; };

  uint32_t a[2][2][4];
  sum_t<S> total[1][2][S.tiles][4] = {};
  [[maybe_unused]] part_t<S> part[2][S.tiles][4];
  for (int i = 0; i < S.stages - 2; ++i) copy(i);
  arrive(0);
  step_fragments<S>(a[0], weights_in(0), 0);
  for (int chunk = 0; chunk < Of::CHUNKS; ++chunk) {
    UNROLL
    for (int step = 0; step < W::STEPS; ++step) {
      uint64_t b = wgmma_b<Of::X_ROW_BYTES>(stage_of(chunk) + K::X_AT, step * 32);
      wgmma_fence();
      UNROLL
      for (int half = 0; half < 2; ++half) {
        if constexpr (S.grouped())
          begin_product<S>(part[half], a[step % 2][half], b, step % W::RUN_STEPS != 0);
        else
          begin_product<S>(total[0][half], a[step % 2][half], b, true);
      }
      wgmma_commit();
      // Meanwhile, the next step: as soon as the one before this has read its weights.
      wgmma_wait<1>();
      hold(a[(step + 1) % 2]);
      if (step + 1 == W::STEPS) arrive(chunk + 1);
      step_fragments<S>(a[(step + 1) % 2], weights_in(chunk + (step + 1) / W::STEPS), (step + 1) % W::STEPS);
      if constexpr (S.grouped()) {
        if ((step + 1) % W::RUN_STEPS != 0) continue;
        wgmma_wait<0>();
        hold(part[0]);
        hold(part[1]);
        UNROLL
        for (int tile = 0; tile < S.tiles; ++tile) {
          const RunScales scales =
              run_scales<S>(0, tile, step / W::RUN_STEPS, weights_in(chunk),
                            reinterpret_cast<const float*>(stage_of(chunk) + K::X_SCALES_AT));
          UNROLL
          for (int half = 0; half < 2; ++half)
            add_run<S>(total[0][half][tile], part[half][tile], half, scales);
        }
      }
    }
  }
  wgmma_wait<0>();
  hold(a[1]);
  hold(total[0][0]);
  hold(total[0][1]);
  finish_tile<S>({x_scale, reinterpret_cast<const float*>(scale), bias, out}, total, first_token,
                 first_feature + warp() * 32, tokens);
}

}  // namespace enginewright
