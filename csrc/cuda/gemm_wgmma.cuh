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
// weights in 256, and what is copied is written in 256 (int8) to 384 (bf16). With groups, whose sums stand
// apart, a tile has 64 tokens, and one warpgroup's products run while the other one scales. Of E4M3, with or
// without groups, it is 256 x 128 again, 512 clocks a chunk; B is read in 256, weights in 128, copies are
// written in 192. At full speed of BF16 or E4M3 a tile of this size asks the L2 cache for 11.6 TB/s in all,
// more than it has: blocks that share what they read (clusters) would ask for less. All unmeasured.
#pragma once

#include "gemm_large.cuh"
#include "wgmma.cuh"

namespace enginewright {

template <Gemm S>
struct GemmWgmma {
  using Of = Shape<S>;
  static constexpr int STAGE_BYTES =
      ceil_div(GemmLarge<S>::STAGE_BYTES, 1024) * 1024;           // so that x is aligned
  static constexpr int STEPS = Of::X_ROW_BYTES / 32;              // of wgmma, in a chunk
  static constexpr int TURN = S.format == Format::fp8a8 ? 2 : 1;  // chunks from a barrier to the next
  static constexpr int TURNS = ceil_div(Of::CHUNKS, TURN), STAGES = S.stages / TURN;
  static constexpr int RUN_STEPS = S.group % (TURN * CHUNK) == 0 ? TURN * STEPS : STEPS / Of::RUNS;
  static_assert(S.shared_bytes == S.stages * STAGE_BYTES && GemmLarge<S>::X_AT % 1024 == 0);
  static_assert(S.stages % TURN == 0 && STAGES >= 3);
  static_assert(S.feature_warps % 4 == 0 && S.token_warps == 1 && S.units == 1 && STEPS % 2 == 0);
};

template <Gemm S>
using WarpSums = sum_t<S>[2][S.tiles][4];  // of the halves of a warp's unit

// What comes of K, in turns, through stages in shared memory. A last turn may lack a chunk: its x is zeros.
template <Gemm S>
class Turns {
  using Of = Shape<S>;
  using K = GemmLarge<S>;
  using W = GemmWgmma<S>;

 public:
  DEVICE Turns(const CopyWeights<S>& weights, const uint8_t* x, const float* x_scale, int first_token,
               int tokens)
      : weights_(weights),
        x_(x, first_token, tokens),
        x_scale_(x_scale),
        first_token_(first_token),
        tokens_(tokens) {
    for (int i = 0; i < W::STAGES - 2; ++i) copy(i);
  }

  // Everyone's copies of a turn are there, and all products of the last turn but one are done: its stages are
  // filled again.
  DEVICE void arrive(int turn) const {
    wait_copies<W::STAGES - 3>();
    fence_copies();
    sync_threads();
    copy(turn + W::STAGES - 2);
  }
  // Of chunk `i` of a turn.
  DEVICE SharedWeights<S> weights(int turn, int i = 0) const { return {stage(turn, i), warp()}; }
  DEVICE const uint8_t* x(int turn, int i = 0) const { return stage(turn, i) + K::X_AT; }
  DEVICE const float* x_scales(int turn, int i = 0) const {
    return reinterpret_cast<const float*>(stage(turn, i) + K::X_SCALES_AT);
  }

 private:
  DEVICE uint8_t* stage(int turn, int i) const {
    int at = static_cast<uint32_t>(turn) % W::STAGES * W::TURN + i;
    return shared_memory<uint8_t>() + at * W::STAGE_BYTES;
  }
  DEVICE void copy(int turn) const {
    if (turn < W::TURNS) {
      UNROLL
      for (int i = 0; i < W::TURN; ++i) {
        int chunk = turn * W::TURN + i;
        bool there = Of::CHUNKS % W::TURN == 0 || chunk < Of::CHUNKS;
        int from = there ? chunk : Of::CHUNKS - 1;
        uint8_t* to = stage(turn, i);
        weights_.copy(to, from);
        x_.copy(to + K::X_AT, from, there);
        if (i * W::STEPS % W::RUN_STEPS != 0) continue;
        weights_.copy_scales(to, from);
        if constexpr (S.x_groups())
          copy_x_scales<S, 1>(reinterpret_cast<float*>(to + K::X_SCALES_AT), x_scale_, first_token_, tokens_,
                              from);
      }
    }
    commit_copies();
  }

  CopyWeights<S> weights_;
  CopyX<S, 1, swizzled<Of::X_ROW_BYTES>> x_;
  const float* x_scale_;
  int first_token_, tokens_;
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
  if constexpr (S.format == Format::w8a8)
    wgmma_int8(d, a, b, add);
  else
    wgmma_bf16(d, a, b, add);
}

// total += weights x, a step after the other.
template <Gemm S>
DEVICE void add_steps(WarpSums<S>& total, const Turns<S>& turns) {
  using Of = Shape<S>;
  using W = GemmWgmma<S>;
  uint32_t a[2][2][4];
  [[maybe_unused]] part_t<S> part[2][S.tiles][4];
  turns.arrive(0);
  step_fragments<S>(a[0], turns.weights(0), 0);
  for (int chunk = 0; chunk < Of::CHUNKS; ++chunk) {
    UNROLL
    for (int step = 0; step < W::STEPS; ++step) {
      uint64_t b = wgmma_b<Of::X_ROW_BYTES>(turns.x(chunk), step * 32);
      wgmma_fence();
      UNROLL
      for (int half = 0; half < 2; ++half) {
        if constexpr (S.grouped())
          begin_product<S>(part[half], a[step % 2][half], b, step % W::RUN_STEPS != 0);
        else
          begin_product<S>(total[half], a[step % 2][half], b, true);
      }
      wgmma_commit();
      // Meanwhile, the next step: as soon as the one before this has read its weights.
      wgmma_wait<1>();
      hold(a[(step + 1) % 2]);
      if (step + 1 == W::STEPS) turns.arrive(chunk + 1);
      step_fragments<S>(a[(step + 1) % 2], turns.weights(chunk + (step + 1) / W::STEPS),
                        (step + 1) % W::STEPS);
      if constexpr (S.grouped()) {
        if ((step + 1) % W::RUN_STEPS != 0) continue;
        wgmma_wait<0>();
        hold(part[0]);
        hold(part[1]);
        UNROLL
        for (int tile = 0; tile < S.tiles; ++tile) {
          const RunScales scales =
              run_scales<S>(0, tile, step / W::RUN_STEPS, turns.weights(chunk), turns.x_scales(chunk));
          UNROLL
          for (int half = 0; half < 2; ++half) add_run<S>(total[half][tile], part[half][tile], half, scales);
        }
      }
    }
  }
  wgmma_wait<0>();
  hold(a[1]);
  hold(total[0]);
  hold(total[1]);
}

// The same for E4M3, in runs (see Shape), which are a turn where groups allow it. A is loaded for a turn at
// once; sums come in pieces, a run of half the unit with 64 tokens. While a piece is computed, the one before
// is added; with groups, whose scales need registers, while the other warpgroup's is. A turn ends with all of
// them done: of sums in flight around a loop the assembler does not see which ones a wait is for, and makes
// every product wait.
template <Gemm S>
DEVICE void add_pieces(WarpSums<S>& total, const Turns<S>& turns) {
  using Of = Shape<S>;
  using W = GemmWgmma<S>;
  constexpr int STEPS = W::TURN * W::STEPS, TILES = 8, PARTS = S.grouped() ? 1 : 2;
  constexpr int RUN_STEPS = W::RUN_STEPS, RUNS = STEPS / RUN_STEPS;
  constexpr int IN_RUN = S.tiles / TILES, PIECES = 2 * RUNS * IN_RUN;  // of a run of a half; of a turn
  static_assert(S.tiles % TILES == 0);
  uint32_t a[STEPS][2][4];
  float part[PARTS][TILES][4];
  auto begin = [&](int turn, int piece) {
    wgmma_fence();
    UNROLL
    for (int i = 0; i < RUN_STEPS; ++i) {
      int step = piece / IN_RUN % RUNS * RUN_STEPS + i;
      const uint8_t* x = turns.x(turn, step / W::STEPS) + piece % IN_RUN * TILES * 8 * Of::X_ROW_BYTES;
      wgmma_e4m3(part[piece % PARTS], a[step][piece / IN_RUN / RUNS],
                 wgmma_b<Of::X_ROW_BYTES>(x, step % W::STEPS * 32), i > 0);
    }
    wgmma_commit();
  };
  auto add = [&](int turn, int piece) {
    int half = piece / IN_RUN / RUNS, step = piece / IN_RUN % RUNS * RUN_STEPS, chunk = step / W::STEPS;
    UNROLL
    for (int i = 0; i < TILES; ++i) {
      int tile = piece % IN_RUN * TILES + i;
      const RunScales scales = run_scales<S>(0, tile, step % W::STEPS / RUN_STEPS, turns.weights(turn, chunk),
                                             turns.x_scales(turn, chunk));
      add_run<S>(total[half][tile], part[piece % PARTS][i], half, scales);
    }
  };
  turns.arrive(0);
  for (int turn = 0; turn < W::TURNS; ++turn) {
    UNROLL
    for (int step = 0; step < STEPS; ++step)
      step_fragments<S>(a[step], turns.weights(turn, step / W::STEPS), step % W::STEPS);
    UNROLL
    for (int piece = 0; piece < PIECES; ++piece) {
      begin(turn, piece);
      // Not with the last piece, where the assembler moves sums after the next wait.
      if (piece == PIECES / 2) turns.arrive(turn + 1);
      if (piece < PARTS - 1) continue;
      wgmma_wait<PARTS - 1>();
      hold(part[(piece + 1) % PARTS]);
      add(turn, piece + 1 - PARTS);
    }
    if constexpr (PARTS == 2) {
      wgmma_wait<0>();
      hold(part[(PIECES - 1) % PARTS]);
      add(turn, PIECES - 1);
    }
  }
}

template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, 1)
gemm_wgmma(const Sizes* sizes, const uint8_t* x, const uint8_t* weight, const float* x_scale,
           const uint8_t* scale, const uint8_t* zero, const float* bias, stored_t<S.type>* out,
           const uint8_t* adapters, const int32_t* slots, const float* delta) {
  int tokens = (*sizes)[S.rows];
  auto [first_token, first_feature] = Tile<S>::of_block();
  if (first_token >= tokens) return;

  const CopyWeights<S> weights(first_feature / 16, weight, scale, zero);
  const Turns<S> turns(weights, x, x_scale, first_token, tokens);
  WarpSums<S> total[1] = {};
  if constexpr (S.format == Format::fp8a8)
    add_pieces<S>(total[0], turns);
  else
    add_steps<S>(total[0], turns);
  const Tile<S> tile = Tile<S>::of_block();  // again, as tokens: no registers were left to keep them
  finish_tile<S>({x_scale, reinterpret_cast<const float*>(scale), bias, out, {adapters, slots, delta}}, total,
                 tile.first_token, tile.first_feature + warp() * 32, (*sizes)[S.rows]);
}

}  // namespace enginewright
