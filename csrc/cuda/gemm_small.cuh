// GEMM for few tokens, 8 · tiles at most: every weight comes from memory once.
//
// A block of threads has feature_warps units of 32 features and one of `splits` parts of K, of which its
// k_warps take chunks of 64 by turns, `turns` each in a step. A lane copies those 16 bytes of weights into
// shared memory that it will read itself: no bank is met twice, and nobody else waits for them. x is shared
// by the units. As many stages as shared memory has room for keep 30 … 50 KB of a block in flight, two blocks
// on each multiprocessor; 4.8 TB/s at 0.7 µs want 26 KB of each (H200; on paper, unmeasured). At that speed a
// multiprocessor must issue, of 4 instructions a clock, 0.5 for bf16, 2 for 8 bits, 3.2 for w4a16, and more
// than it can for mxfp4a16 (counted in the code for 8 tokens; 1.75 GHz).
//
// The order of sums depends on the shape of the weight alone, never on tokens or tiles: chunks of a warp in
// ascending order, then k_warps, then splits. The block that is the last one to finish its part adds the
// splits; `counters`, [blocks in x], are zeros again afterwards.
#pragma once

#include "gemm_products.cuh"

namespace enginewright {

template <Gemm S>
struct GemmSmall {
  using Of = Shape<S>;
  static constexpr int WARPS = S.feature_warps * S.k_warps;
  static constexpr int STEP_CHUNKS = S.k_warps * S.turns, STEPS = ceil_div(Of::CHUNKS, STEP_CHUNKS);
  static constexpr int SPLIT_STEPS = ceil_div(STEPS, S.splits);

  // Blocks of a multiprocessor that its registers must do for; more tokens, or many scales, want more of
  // them.
  static constexpr int RESIDENT = S.tiles == 1 || (S.tiles == 2 && Of::RUN != 32) ? 2 : 1;

  // Of a stage in shared memory, in order.
  static constexpr int SCALES = 4 * Of::GROUP_SCALE_BYTES;  // bytes of a lane's
  static constexpr int WEIGHT_BYTES = WARPS * S.turns * Of::LOADS * WARP * 16;
  static constexpr int SCALE_BYTES = S.weight_groups() ? WARPS * S.turns * Of::RUNS * WARP * SCALES : 0;
  static constexpr int ZERO_BYTES = S.zeros ? WARPS * S.turns * Of::RUNS * WARP * 4 : 0;
  static constexpr int X_BYTES = STEP_CHUNKS * Of::TOKENS * Of::X_ROW_BYTES;
  static constexpr int X_SCALE_BYTES = S.x_groups() ? STEP_CHUNKS * Of::TOKENS * Of::RUNS * 4 : 0;
  static constexpr int X_AT = WEIGHT_BYTES + SCALE_BYTES + ZERO_BYTES;
  static constexpr int STAGE_BYTES = X_AT + X_BYTES + X_SCALE_BYTES;

  static constexpr int SUM_STRIDE = Of::FEATURES + 4;  // a quarter of a warp stores to different banks
  static constexpr int SUM_BYTES = S.k_warps * Of::TOKENS * SUM_STRIDE * 4;
  static_assert(S.k_warps == 2);  // as Order in gemm_large.cuh has it
  static_assert(S.stages >= 2 && S.shared_bytes >= S.stages * STAGE_BYTES && S.shared_bytes >= SUM_BYTES);

  static constexpr int OUTPUTS = Of::FEATURES / (S.gated() ? 2 : 1);  // of a block
  static constexpr int PARTIAL_STRIDE = ceil_div(S.blocks(), 2 * S.feature_warps) * Of::FEATURES;
};

// A warp's part of the stages: the weights of its unit.
template <Gemm S>
class Private {
  using Of = Shape<S>;
  using K = GemmSmall<S>;

 public:
  DEVICE Private(int unit, const uint8_t* weight, const uint8_t* scale, const uint8_t* zero) {
    int g = lane() / 4, t = lane() % 4, row = g % 4 * 4;
    int block = 2 * unit + g / 4;
    if (block >= S.blocks()) block = S.blocks() - 1;  // features that are not there: any that are
    lines_ = weight + block * Of::BLOCK_BYTES + t * LINE_BYTES + row * 4;
    int64_t first = int64_t{block} * Of::GROUPS * 16 + row;
    scales_ = scale + first * Of::GROUP_SCALE_BYTES;
    zeros_ = zero + first;
    at_ = warp() * S.turns * Of::LOADS * WARP + lane();
    at_of_run_ = warp() * S.turns * Of::RUNS * WARP + lane();
  }

  DEVICE void copy(uint8_t* stage, int turn, int chunk) const {
    if (Of::CHUNKS % K::STEP_CHUNKS && chunk >= Of::CHUNKS) return;
    const uint8_t* from = lines_ + int64_t{chunk} * Of::LINES * LINE_BYTES;
    UNROLL
    for (int i = 0; i < Of::LOADS; ++i) copy_async(weights_in(stage, turn, i), from + 4 * i * LINE_BYTES);
    UNROLL
    for (int run = 0; run < Of::RUNS; ++run) {
      int64_t group = Of::group_of(chunk, run);
      if constexpr (S.weight_groups())
        copy_async<K::SCALES>(scales_in(stage, turn, run), scales_ + group * 4 * K::SCALES);
      if constexpr (S.zeros) copy_async<4>(zeros_in(stage, turn, run), zeros_ + group * 16);
    }
  }

  // What multiply_chunk takes, of a stage that has been waited for.
  struct Weights {
    const Private& mine;
    uint8_t* stage;
    int turn;
    DEVICE Words4 load(int, int index) const { return load16(mine.weights_in(stage, turn, index)); }
    DEVICE const uint8_t* scales(int, int run) const { return mine.scales_in(stage, turn, run); }
    DEVICE uint32_t zeros(int, int run) const {
      return S.zeros ? *reinterpret_cast<const uint32_t*>(mine.zeros_in(stage, turn, run)) : 0x08080808u;
    }
  };

 private:
  DEVICE uint8_t* weights_in(uint8_t* stage, int turn, int index) const {
    return stage + (at_ + (turn * Of::LOADS + index) * WARP) * 16;
  }
  DEVICE uint8_t* scales_in(uint8_t* stage, int turn, int run) const {
    return stage + K::WEIGHT_BYTES + (at_of_run_ + (turn * Of::RUNS + run) * WARP) * K::SCALES;
  }
  DEVICE uint8_t* zeros_in(uint8_t* stage, int turn, int run) const {
    return stage + K::WEIGHT_BYTES + K::SCALE_BYTES + (at_of_run_ + (turn * Of::RUNS + run) * WARP) * 4;
  }

  const uint8_t *lines_, *scales_, *zeros_;
  int at_, at_of_run_;  // this lane's first load in a stage, and first run
};

// Sums of `count` parts, four features of a token at once, by all threads of the block: put(token, output,
// feature, sums of its features (gates), of the features 16 after (ups)). part, stride: from one part, or
// token, to the next.
template <Gemm S, class Put>
DEVICE void add_parts(const sum_t<S>* from, int64_t part, int count, int64_t stride, int tokens, Put put) {
  constexpr int QUADS = GemmSmall<S>::OUTPUTS / 4;
  for (int item = thread_index(); item < tokens * QUADS; item += Shape<S>::THREADS) {
    int token = item / QUADS, quad = item % QUADS;
    int feature = S.gated() ? quad / 4 * 32 + quad % 4 * 4 : quad * 4;
    sum_t<S> total[2][4] = {};
    for (int i = 0; i < count; ++i) {
      UNROLL
      for (int half = 0; half < (S.gated() ? 2 : 1); ++half) {
        Words4 words = load16(from + i * part + token * stride + feature + 16 * half);
        total[half][0] += __builtin_bit_cast(sum_t<S>, words.x);
        total[half][1] += __builtin_bit_cast(sum_t<S>, words.y);
        total[half][2] += __builtin_bit_cast(sum_t<S>, words.z);
        total[half][3] += __builtin_bit_cast(sum_t<S>, words.w);
      }
    }
    put(token, quad * 4, feature, total);
  }
}

// Grid: blocks in x have the features, blocks in y the splits. partial: [splits][tokens of all tiles]
// [PARTIAL_STRIDE]. Shared memory: the stages, and in their place sums, [k_warps][tokens of all
// tiles][SUM_STRIDE].
template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, GemmSmall<S>::RESIDENT)
gemm_small(const Sizes* sizes, const uint8_t* x, const uint8_t* weight, const float* x_scale,
           const uint8_t* scale, const uint8_t* zero, const float* bias, stored_t<S.type>* out,
           float* partial, int32_t* counters, const uint8_t* adapters, const int32_t* slots,
           const float* delta) {
  using Of = Shape<S>;
  using K = GemmSmall<S>;
  using Sum = sum_t<S>;
  uint8_t* shared = shared_memory<uint8_t>();
  int tokens = (*sizes)[S.rows];
  int feature_warp = warp() / S.k_warps, k_warp = warp() % S.k_warps;
  int begin = block_y() * K::SPLIT_STEPS;
  int end = begin + K::SPLIT_STEPS < K::STEPS ? begin + K::SPLIT_STEPS : K::STEPS;

  const Private<S> mine(block_x() * S.feature_warps + feature_warp, weight, scale, zero);
  const CopyX<S, K::STEP_CHUNKS> ours(x, 0, tokens);
  auto copy = [&](int step, uint8_t* stage) {
    if (step < end) {
      UNROLL
      for (int turn = 0; turn < S.turns; ++turn)
        mine.copy(stage, turn, step * K::STEP_CHUNKS + turn * S.k_warps + k_warp);
      ours.copy(stage + K::X_AT, step * K::STEP_CHUNKS);
      if constexpr (S.x_groups())
        copy_x_scales<S, K::STEP_CHUNKS>(reinterpret_cast<float*>(stage + K::X_AT + K::X_BYTES), x_scale, 0,
                                         tokens, step * K::STEP_CHUNKS);
    }
    commit_copies();
  };
  for (int i = 0; i < S.stages - 1; ++i) copy(begin + i, shared + i * K::STAGE_BYTES);

  Sum total[1][2][S.tiles][4] = {};
  Stages<S, K::STAGE_BYTES> stages(shared);
  for (int step = begin; step < end; ++step, stages.next()) {
    wait_copies<S.stages - 2>();
    sync_threads();  // everyone's copies are there, and nobody reads the stage before any more
    copy(step + S.stages - 1, stages.before());
    uint8_t* stage = stages.now();
    UNROLL_BY(S.tiles <= 2 ? 2 : 1)
    for (int turn = 0; turn < S.turns; ++turn) {
      int of_step = turn * S.k_warps + k_warp;
      if (Of::CHUNKS % K::STEP_CHUNKS && step * K::STEP_CHUNKS + of_step >= Of::CHUNKS) break;
      const typename Private<S>::Weights weights{mine, stage, turn};
      const auto* x_scales = reinterpret_cast<const float*>(stage + K::X_AT + K::X_BYTES);
      multiply_chunk<S>(total, weights, stage + K::X_AT + of_step * Of::TOKENS * Of::X_ROW_BYTES,
                        x_scales + of_step * Of::TOKENS * Of::RUNS);
    }
  }

  // [k_warps][tokens][SUM_STRIDE], in the place of the stages.
  sync_threads();
  Sum* sums = reinterpret_cast<Sum*>(shared);
  int g = lane() / 4, t = lane() % 4;
  UNROLL
  for (int tile = 0; tile < S.tiles; ++tile) {
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto& d = total[0];
      Sum* to =
          sums + (k_warp * Of::TOKENS + tile * 8 + 2 * t + i) * K::SUM_STRIDE + feature_warp * 32 + g * 4;
      const Sum quad[4] = {d[0][tile][i], d[0][tile][2 + i], d[1][tile][i], d[1][tile][2 + i]};
      store16(to, words_of(quad));
    }
  }
  sync_threads();

  Finish<S> finish{x_scale, reinterpret_cast<const float*>(scale), bias, out, {adapters, slots, delta}};
  auto put = [&](int token, int output, int, const Sum(&total)[2][4]) {
    finish.put(token, block_x() * K::OUTPUTS + output, total[0], total[1]);
  };
  constexpr int64_t WARP_PART = Of::TOKENS * K::SUM_STRIDE,
                    SPLIT_PART = Of::TOKENS * int64_t{K::PARTIAL_STRIDE};
  if constexpr (S.splits == 1) {
    add_parts<S>(sums, WARP_PART, S.k_warps, K::SUM_STRIDE, tokens, put);
  } else {
    Sum* parts = reinterpret_cast<Sum*>(partial) + block_x() * Of::FEATURES;
    auto keep = [&](int token, int, int feature, const Sum(&total)[2][4]) {
      Sum* to = parts + block_y() * SPLIT_PART + int64_t{token} * K::PARTIAL_STRIDE + feature;
      store16(to, words_of(total[0]));
      if constexpr (S.gated()) store16(to + 16, words_of(total[1]));
    };
    add_parts<S>(sums, WARP_PART, S.k_warps, K::SUM_STRIDE, tokens, keep);
    sync_threads();
    int32_t* before = reinterpret_cast<int32_t*>(shared);  // blocks that have kept theirs before this one
    if (thread_index() == 0) {
      fence();
      *before = atomic_add(counters + block_x(), 1);
      if (*before == S.splits - 1) counters[block_x()] = 0;
      fence();
    }
    sync_threads();
    if (*before == S.splits - 1) add_parts<S>(parts, SPLIT_PART, S.splits, K::PARTIAL_STRIDE, tokens, put);
  }
}

}  // namespace enginewright
