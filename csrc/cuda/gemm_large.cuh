// GEMM for many tokens: tiles of features x tokens, for tensor cores.
//
// A block of threads has feature_warps · units · 32 features and token_warps · tiles · 8 tokens; a chunk of
// 64 of K of both is a stage in shared memory, weights as the raw lines of the file, which become bf16 where
// they are multiplied. Of 64 x 64 a warp (units 2, tiles 8), a step of 16 is 4 KB out of shared memory, 128
// clocks for the block's four warps, and as many clocks of tensor cores at a Hopper's full speed, which
// mma.sync does not reach (on paper, unmeasured). With sums that stand apart (Shape::RUN), it is 32 x 64.
//
// Each sum goes through K in ascending order, whatever the tile; gemm_small's are added up otherwise, so
// that bits differ between the two, but for w8a8 with a scale a token, whose sums are exact. With
// split_chunks they are added as gemm_small does: what a k_warp of it has, a split of it, and all are sums of
// their own, so that a warp has 32 x 32, or 32 x 64 where there is one split and no runs.
#pragma once

#include "gemm_products.cuh"

namespace enginewright {

template <Gemm S>
struct GemmLarge {
  using Of = Shape<S>;
  static constexpr int BLOCKS = Of::FEATURES / 16;  // of weights

  // Of a stage in shared memory, in order.
  static constexpr int SCALES = 16 * Of::GROUP_SCALE_BYTES;  // bytes of a block's
  static constexpr int WEIGHT_BYTES = BLOCKS * Of::LINES * LINE_BYTES;
  static constexpr int X_BYTES = Of::TOKENS * Of::X_ROW_BYTES;
  static constexpr int SCALE_BYTES = S.weight_groups() ? BLOCKS * Of::RUNS * SCALES : 0;
  static constexpr int ZERO_BYTES = S.zeros ? BLOCKS * Of::RUNS * 16 : 0;
  static constexpr int X_SCALE_BYTES = S.x_groups() ? Of::TOKENS * Of::RUNS * 4 : 0;
  static constexpr int X_AT = WEIGHT_BYTES;
  static constexpr int SCALES_AT = X_AT + X_BYTES;
  static constexpr int ZEROS_AT = SCALES_AT + SCALE_BYTES;
  static constexpr int X_SCALES_AT = ZEROS_AT + ZERO_BYTES;
  static constexpr int STAGE_BYTES = X_SCALES_AT + X_SCALE_BYTES;

  // 16 bytes of four rows in a line: the lines that lanes of a quarter of a warp read are in different banks.
  static DEVICE int place(int line, int rows) { return line * LINE_BYTES + (rows ^ (line & 2)) * 16; }
};

// A thread's part in copying a chunk of the block's weights, and the scales of its runs, into a stage.
template <Gemm S>
class CopyWeights {
  using Of = Shape<S>;
  using K = GemmLarge<S>;
  static constexpr int LINE_GRANULES = Of::LINES * 4;  // of a block
  static constexpr int APART = Of::THREADS / LINE_GRANULES, COPIES = ceil_div(K::BLOCKS, APART);
  static_assert(Of::THREADS % LINE_GRANULES == 0 && K::BLOCKS % APART == 0);

 public:
  DEVICE CopyWeights(int first_block, const uint8_t* weight, const uint8_t* scale, const uint8_t* zero)
      : scale_(scale), zero_(zero), first_block_(first_block) {
    int line = thread_index() / 4 % Of::LINES, rows = thread_index() % 4;
    block_ = thread_index() / LINE_GRANULES;
    from_ = weight + (first_block + block_) * Of::BLOCK_BYTES + line * LINE_BYTES + rows * 16;
    to_ = block_ * Of::LINES * LINE_BYTES + K::place(line, rows);
  }

  DEVICE void copy(uint8_t* stage, int chunk) const {
    const uint8_t* from = from_ + int64_t{chunk} * Of::LINES * LINE_BYTES;
    UNROLL
    for (int i = 0; i < COPIES; ++i)
      copy_async(stage + to_ + i * APART * Of::LINES * LINE_BYTES, from + i * APART * Of::BLOCK_BYTES,
                 exists(block_ + i * APART));
  }
  DEVICE void copy_scales(uint8_t* stage, int chunk) const {  // and zeros
    if constexpr (S.weight_groups()) {
      constexpr int GRANULES = K::SCALES / 16;
      shared_out<K::SCALE_BYTES / 16, Of::THREADS>([&](int i) {
        int64_t column =
            existing(i / GRANULES / Of::RUNS) * Of::GROUPS + Of::group_of(chunk, i / GRANULES % Of::RUNS);
        copy_async(stage + K::SCALES_AT + i * 16, scale_ + column * K::SCALES + i % GRANULES * 16);
      });
    }
    if constexpr (S.zeros) {
      shared_out<K::ZERO_BYTES / 16, Of::THREADS>([&](int i) {
        int64_t column = existing(i / Of::RUNS) * Of::GROUPS + Of::group_of(chunk, i % Of::RUNS);
        copy_async(stage + K::ZEROS_AT + i * 16, zero_ + column * 16);
      });
    }
  }

 private:
  DEVICE bool exists(int block) const {
    return S.blocks() % K::BLOCKS == 0 || first_block_ + block < S.blocks();
  }
  DEVICE int64_t existing(int block) const {  // for features that are not there, scales of any that are
    return exists(block) ? first_block_ + block : S.blocks() - 1;
  }

  const uint8_t *scale_, *zero_, *from_;
  int first_block_, block_, to_;
};

// What multiply_chunk takes of a stage, from a warp's first unit on.
template <Gemm S>
struct SharedWeights {
  using Of = Shape<S>;
  using K = GemmLarge<S>;
  const uint8_t* stage;
  int first_unit;

  DEVICE int block(int unit) const { return 2 * (first_unit + unit) + lane() / 16; }
  DEVICE int row() const { return lane() / 4 % 4 * 4; }
  DEVICE Words4 load(int unit, int index) const { return line(unit, 4 * index, lane() % 4); }
  DEVICE Words4 line(int unit, int first, int place) const {  // first: a multiple of 4
    return load16(stage + (block(unit) * Of::LINES + first) * LINE_BYTES + K::place(place, row() / 4));
  }
  DEVICE const uint8_t* scales(int unit, int run) const {
    int at = (block(unit) * Of::RUNS + run) * K::SCALES + row() * Of::GROUP_SCALE_BYTES;
    return stage + K::SCALES_AT + at;
  }
  DEVICE uint32_t zeros(int unit, int run) const {
    if constexpr (!S.zeros) return 0x08080808u;
    return *reinterpret_cast<const uint32_t*>(stage + K::ZEROS_AT + (block(unit) * Of::RUNS + run) * 16 +
                                              row());
  }
};

// A block's tile. Grid: tiles of tokens in x, of features in y. Blocks that follow one another have the same
// weights and TURN tiles of tokens, so that weights come from memory once and x stays in the cache.
template <Gemm S>
struct Tile {
  static constexpr int TURN = 16;
  int first_token, first_feature;

  static DEVICE Tile of_block() {
    int index = block_y() * grid_x() + block_x(), begin = index / (TURN * grid_y()) * TURN;
    int in_turn = grid_x() - begin < TURN ? grid_x() - begin : TURN;
    return {(begin + index % (TURN * grid_y()) % in_turn) * Shape<S>::TOKENS,
            index % (TURN * grid_y()) / in_turn * Shape<S>::FEATURES};
  }
};

// What becomes of a warp's sums. first_token, first_feature: the warp's.
template <Gemm S>
DEVICE void finish_tile(const Finish<S>& finish, const sum_t<S> (&total)[S.units][2][S.tiles][4],
                        int first_token, int first_feature, int tokens) {
  using Sum = sum_t<S>;
  int g = lane() / 4, t = lane() % 4;
  UNROLL
  for (int unit = 0; unit < S.units; ++unit) {
    int feature = first_feature + unit * 32;
    UNROLL
    for (int tile = 0; tile < S.tiles; ++tile) {
      int token = first_token + tile * 8 + 2 * t;
      const auto& d = total[unit];
      const Sum sums[2][4] = {{d[0][tile][0], d[0][tile][2], d[1][tile][0], d[1][tile][2]},
                              {d[0][tile][1], d[0][tile][3], d[1][tile][1], d[1][tile][3]}};
      if constexpr (S.gated()) {
        // Of two lanes, one has the gates of both tokens and one has the ups: each finishes a token.
        bool ups = g >= 4;
        Sum others[4];
        UNROLL
        for (int i = 0; i < 4; ++i) others[i] = shuffle_xor(ups ? sums[0][i] : sums[1][i], 16);
        Sum first[4], second[4];
        UNROLL
        for (int i = 0; i < 4; ++i) {
          first[i] = ups ? others[i] : sums[0][i];
          second[i] = ups ? sums[1][i] : others[i];
        }
        if (token + ups < tokens) finish.put(token + ups, feature / 2 + g % 4 * 4, first, second);
      } else {
        UNROLL
        for (int i = 0; i < 2; ++i)
          if (token + i < tokens) finish.put(token + i, feature + g * 4, sums[i], sums[i]);
      }
    }
  }
}

template <Gemm S>
using Sums = sum_t<S>[S.units][2][S.tiles][4];  // of a warp

template <Gemm S>
DEVICE void move_sums(Sums<S>& to, Sums<S>& from) {
  UNROLL
  for (int unit = 0; unit < S.units; ++unit) {
    UNROLL
    for (int half = 0; half < 2; ++half) {
      UNROLL
      for (int tile = 0; tile < S.tiles; ++tile) {
        UNROLL
        for (int i = 0; i < 4; ++i) {
          to[unit][half][tile][i] += from[unit][half][tile][i];
          from[unit][half][tile][i] = 0;
        }
      }
    }
  }
}

// Of K's chunks, which one comes `index`-th: they ascend, or are added as gemm_small does, of each split
// those of its first k_warp, then those of its second.
template <Gemm S>
struct Order {
  static constexpr int CHUNKS = Shape<S>::CHUNKS;
  int chunk;
  bool ends_warp = false, ends_split = false;

  static DEVICE Order of(int index) {
    if constexpr (S.split_chunks == 0) {
      return {index};
    } else {
      int begin = index / S.split_chunks * S.split_chunks, i = index - begin;
      int chunks = CHUNKS - begin < S.split_chunks ? CHUNKS - begin : S.split_chunks;
      int firsts = (chunks + 1) / 2;
      int chunk = begin + (i < firsts ? 2 * i : 2 * (i - firsts) + 1);
      return {chunk, i + 1 == firsts || i + 1 == chunks, i + 1 == chunks};
    }
  }
};

// The tile of a block, of rows up to `tokens`.
template <Gemm S>
DEVICE void multiply_tile(const uint8_t* x, const uint8_t* weight, const float* x_scale, const uint8_t* scale,
                          const uint8_t* zero, const float* bias, stored_t<S.type>* out, int first_token,
                          int tokens, int first_feature, const AdaptedRows& adapted = {}) {
  using Of = Shape<S>;
  using K = GemmLarge<S>;
  static_assert(S.shared_bytes == S.stages * K::STAGE_BYTES);
  uint8_t* shared = shared_memory<uint8_t>();
  int token_warp = warp() % S.token_warps * S.tiles * 8, unit_warp = warp() / S.token_warps * S.units;

  const CopyWeights<S> weights(first_feature / 16, weight, scale, zero);
  const CopyX<S, 1> tokens_of(x, first_token, tokens);
  auto copy = [&](int index, uint8_t* stage) {
    if (index < Of::CHUNKS) {
      int chunk = Order<S>::of(index).chunk;
      weights.copy(stage, chunk);
      weights.copy_scales(stage, chunk);
      tokens_of.copy(stage + K::X_AT, chunk);
      if constexpr (S.x_groups())
        copy_x_scales<S, 1>(reinterpret_cast<float*>(stage + K::X_SCALES_AT), x_scale, first_token, tokens,
                            chunk);
    }
    commit_copies();
  };
  for (int i = 0; i < S.stages - 1; ++i) copy(i, shared + i * K::STAGE_BYTES);

  Sums<S> total = {}, of_split = {}, of_warp = {};
  Stages<S, K::STAGE_BYTES> stages(shared);
  for (int i = 0; i < Of::CHUNKS; ++i, stages.next()) {
    wait_copies<S.stages - 2>();
    sync_threads();  // everyone's copies are there, and nobody reads the stage before any more
    copy(i + S.stages - 1, stages.before());
    const uint8_t* stage = stages.now();
    multiply_chunk<S>(S.split_chunks ? of_warp : total, SharedWeights<S>{stage, unit_warp},
                      stage + K::X_AT + token_warp * Of::X_ROW_BYTES,
                      reinterpret_cast<const float*>(stage + K::X_SCALES_AT) + token_warp);
    if constexpr (S.split_chunks != 0) {
      constexpr bool SPLITS = S.split_chunks < Of::CHUNKS;
      const Order<S> at = Order<S>::of(i);
      if (at.ends_warp) move_sums<S>(SPLITS ? of_split : total, of_warp);
      if (SPLITS && at.ends_split) move_sums<S>(total, of_split);
    }
  }

  finish_tile<S>({x_scale, reinterpret_cast<const float*>(scale), bias, out, adapted}, total,
                 first_token + token_warp, first_feature + unit_warp * 32, tokens);
}

template <Gemm S>
KERNEL_OCCUPANCY(Shape<S>::THREADS, 1)
gemm_large(const Sizes* sizes, const uint8_t* x, const uint8_t* weight, const float* x_scale,
           const uint8_t* scale, const uint8_t* zero, const float* bias, stored_t<S.type>* out,
           const uint8_t* adapters, const int32_t* slots, const float* delta) {
  int tokens = (*sizes)[S.rows];
  auto [first_token, first_feature] = Tile<S>::of_block();
  if (first_token >= tokens) return;
  multiply_tile<S>(x, weight, x_scale, scale, zero, bias, out, first_token, tokens, first_feature,
                   {adapters, slots, delta});
}

}  // namespace enginewright
