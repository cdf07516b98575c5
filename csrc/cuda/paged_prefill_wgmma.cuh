// Attention of sequences with many rows on Hopper, for pages of bf16: paged_prefill with wgmma, since
// mma.sync reaches about 60 % of its tensor cores' speed. Products and e^s overlap as in FlashAttention-3
// (https://arxiv.org/abs/2407.08608).
//
// A block has 128 rows in two warpgroups, and takes positions in tiles of 128. A warpgroup begins the scores
// of a tile, and after them o += p v of the tile before; while that runs, it makes p of the scores, whose
// fragments D become fragments A. The second warpgroup is half a turn after the first one, so that tensor
// cores always have what one of them has begun:
//
//   first   | scores 1, values 0, maxima | e^s 1                      | scores 2, values 1, maxima | ...
//   second  | e^s 0                      | scores 1, values 0, maxima | e^s 1                      | ...
//
// A row keeps one maximum and one sum from tile to tile, and o is scaled as the maximum grows. These are
// other sums than those of paged_decode's splits, so it is not for batch-invariant engines.
//
// K and V lie as slabs of 64 columns, a row of 128 bytes for each position, swizzled; both are B, V
// transposed. What a turn takes, keys of a tile and values of the one before, is a stage. There are three:
// the next but one is copied while the warpgroups are at two.
//
// Registers of a lane at head_dim 128: scores 64, o 64, p 32, queries 32, 232 in all. On paper, a turn of
// both warpgroups is 2048 clocks of tensor cores, 1024 of e^s (16 a clock), and in shared memory 1024 for B
// and 512 for what is copied: 64 KB, out of the L2 cache. At head_dim 64, e^s takes as long as the products.
// Unmeasured.
#pragma once

#include "paged_attention.cuh"
#include "wgmma.cuh"

namespace enginewright {

template <PagedAttention S>
struct PrefillWgmma {
  using A = Attention<S>;
  static constexpr int THREADS = 256, WARPS = THREADS / WARP, ROWS = WARPS * TILE_ROWS;
  static constexpr int POSITIONS = A::SPLIT, OWN = POSITIONS / WARPS;  // of a tile; that a warp copies
  static constexpr int SLAB_BYTES = POSITIONS * 128, TILE_BYTES = A::DIM / 64 * SLAB_BYTES;
  static constexpr int STAGES = 3, STAGE_BYTES = 2 * TILE_BYTES;  // keys, and after them values
  static_assert(S.kv.type == Type::bf16 && (A::DIM == 64 || A::DIM == 128) && S.kv.block_size % OWN == 0);

  // A warp copies its positions of keys, or values: zeros for what no row sees.
  static DEVICE void copy(unsigned char* to, const unsigned char* pool, int block, int kv_head, int tile,
                          const typename A::Span& rows) {
    constexpr int AT_ONCE = WARP / A::CHUNKS;  // rows
    int own = warp() * OWN, row = lane() / A::CHUNKS, chunk = lane() % A::CHUNKS;
    int first = tile * POSITIONS + own, at = chunk / 8 * SLAB_BYTES + swizzled<128>(own + row, chunk % 8);
    const unsigned char* from = kv_tile(S.kv, pool, block, kv_head) +
                                static_cast<uint32_t>(first) % S.kv.block_size * A::ROW_BYTES + lane() * 16;
    UNROLL
    for (int i = 0; i < OWN; i += AT_ONCE)
      copy_async(to + i * 128 + (at ^ i % 8 * 16), from + i * A::ROW_BYTES,  // swizzled(own + row + i, ...)
                 rows.any_sees(first + row + i, first + row + i + 1));
  }

  template <int PENDING>
  static DEVICE void wait_for_copies() {
    wait_copies<PENDING>();
    fence_copies();
  }

  // s = q k, and o += p v, begun.
  static DEVICE void begin_scores(float (&s)[POSITIONS / 8][4], const uint32_t (&queries)[A::STEPS][4],
                                  const unsigned char* stage) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < A::STEPS; ++k)
      wgmma_bf16(s, queries[k], wgmma_b<128>(stage + k / 4 * SLAB_BYTES, k % 4 * 32), k > 0);
    wgmma_commit();
  }
  static DEVICE void begin_values(float (&o)[A::DIM / 8][4], const uint32_t (&p)[POSITIONS / 16][4],
                                  const unsigned char* stage) {
    wgmma_fence();
    UNROLL
    for (int k = 0; k < POSITIONS / 16; ++k)
      wgmma_bf16_transposed(o, p[k], wgmma_b_transposed<POSITIONS>(stage + TILE_BYTES, 16 * k), true);
    wgmma_commit();
  }
};

// Grid: at least as many blocks as all sequences have tiles of 128 rows; KV heads.
template <PagedAttention S>
KERNEL_OCCUPANCY(PrefillWgmma<S>::THREADS, 1)
paged_prefill_wgmma(const Sizes* sizes, const bf16* q, const unsigned char* keys, const unsigned char* values,
                    const int32_t* query_start, const int32_t* kv_len, const int32_t* block_table,
                    typename Attention<S>::Out* out, const float* sinks) {
  using A = Attention<S>;
  using W = PrefillWgmma<S>;
  Step step{query_start, kv_len, block_table, (*sizes)[S.table_width]};
  const typename A::template Tile<W::ROWS> tile(step, sizes->sequences());
  if (tile.sequence < 0) return;
  int first = tile.first, kv_head = block_y();
  Sequence sequence = step.sequence(tile.sequence);
  auto span = A::span_of(sequence, first, tile.end(sequence));
  int begin = span.first_split(), count = span.last_split() + 1 - begin;  // of tiles of positions

  // Stage i: keys of tile i, values of the one before. The table is read a stage ahead.
  auto stage_of = [&](int i) {
    return shared_memory<unsigned char>() + static_cast<uint32_t>(i) % W::STAGES * W::STAGE_BYTES;
  };
  auto block_of = [&](int i) {
    int position = (begin + i) * W::POSITIONS + warp() * W::OWN;
    return span.any_sees(position, position + W::OWN)
               ? sequence.blocks[static_cast<uint32_t>(position) / S.kv.block_size]
               : 0;
  };
  int block = block_of(0), block_before = 0;
  auto copy = [&](int i) {
    if (i < count) W::copy(stage_of(i), keys, block, kv_head, begin + i, span);
    if (i > 0 && i <= count)
      W::copy(stage_of(i) + W::TILE_BYTES, values, block_before, kv_head, begin + i - 1, span);
    commit_copies();
    block_before = block;
    block = block_of(i + 1);
  };
  // A barrier is before each half of a turn. Where the first warpgroup begins stage i + 1, everyone's copies
  // of it are there. In the half before, stage i - 1 has been read, and stage i + 2 is copied in its place:
  // by the second warpgroup when it has begun stage i, by the first one after its e^s. (These branches also
  // keep the assembler from moving a barrier ahead of the maxima, and the wait for o ahead of e^s.)
  bool second = warp() >= W::WARPS / 2;
  int own = first + warp() * TILE_ROWS;
  const typename A::Rows rows(sequence, own);
  const auto own_span = rows.span();
  uint32_t queries[A::STEPS][4], p[W::POSITIONS / 16][4];
  float s[W::POSITIONS / 8][4], o[A::DIM / 8][4] = {}, row_max[2] = {-INF, -INF}, sums[2] = {};
  copy(0);
  copy(1);
  UNROLL
  for (int k = 0; k < A::STEPS; ++k) {
    Words4 a = A::queries(q, sequence, kv_head, rows, k);
    queries[k][0] = a.x, queries[k][1] = a.y, queries[k][2] = a.z, queries[k][3] = a.w;
  }
  W::template wait_for_copies<1>();
  if (second) sync_threads();
  sync_threads();
  W::begin_scores(s, queries, stage_of(0));
  if (second) copy(2);
  wgmma_wait<0>();
  for (int i = 0;; ++i) {
    hold(s);
    int position = (begin + i) * W::POSITIONS;
    A::adjust(s, rows, position, own_span.all_see(position, position + W::POSITIONS), nullptr);
    float of_tile[2];
    A::maxima(of_tile, s);
    if (second) W::template wait_for_copies<1>();
    sync_threads();
    float keep[2];
    UNROLL
    for (int row = 0; row < 2; ++row) {
      Fold fold = fold_of(row_max[row], of_tile[row] * A::FACTOR);
      float from = fold.maximum == -INF ? 0.0f : fold.maximum, sum = 0.0f;
      keep[row] = fold.keep;
      row_max[row] = fold.maximum;
      UNROLL
      for (auto& four : s)
        for (int j = 2 * row; j < 2 * row + 2; ++j)
          sum += four[j] = exp2_fast(fma(four[j], A::FACTOR, -from));
      sums[row] = fma(sums[row], keep[row], sum);
    }
    hold(s);
    if (!second) {
      W::template wait_for_copies<0>();
      copy(i + 2);
    }
    wgmma_wait<0>();
    hold(o);
    hold(p);
    UNROLL
    for (auto& four : o)
      for (int j = 0; j < 4; ++j) four[j] *= keep[j / 2];
    UNROLL
    for (int k = 0; k < W::POSITIONS / 16; ++k)
      for (int j = 0; j < 4; ++j)
        p[k][j] = pack_bf16(s[2 * k + j / 2][j % 2 * 2], s[2 * k + j / 2][j % 2 * 2 + 1]);
    sync_threads();
    if (i + 1 == count) break;
    W::begin_scores(s, queries, stage_of(i + 1));
    W::begin_values(o, p, stage_of(i + 1));
    if (second) copy(i + 3);
    wgmma_wait<1>();
  }
  W::begin_values(o, p, stage_of(count));
  if (!second) sync_threads();
  wgmma_wait<0>();
  hold(o);
  hold(p);

  sequence = step.sequence(tile.sequence);  // as before; the loop has no registers for what it does not need
  int end = tile.end(sequence);
  UNROLL
  for (int row = 0; row < 2; ++row) {
    float sum = A::over_columns(sums[row], [](float a, float b) { return a + b; });
    if (int at = own + lane() / 4 + 8 * row; at < end) {
      float inverse = A::inverse_of(sum, row_max[row], sinks, kv_head, at);
      UNROLL
      for (int j = 0; j < A::DIM / 8; ++j)
        A::write(out, sequence, kv_head, at, 8 * j + 2 * (lane() % 4), o[j][2 * row] * inverse,
                 o[j][2 * row + 1] * inverse);
    }
  }
  if (!second) A::write_padding(out, sequence, kv_head, first, end);
}

}  // namespace enginewright
