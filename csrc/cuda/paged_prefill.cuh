// Attention of sequences with many rows (paged_attention.cuh): a block has 64 rows, a warp 16 of them and all
// positions, split by split.
//
// Registers of a lane at head_dim 128, on paper: scores 64 (then 32 of p), o 64, q 32, a split's o 16. Keys
// of a split are copied while the one before multiplies values, and values while it multiplies keys: 64 KB of
// shared memory, so that an H100 holds three blocks and an A100 two. Each warp reads all keys and values from
// shared memory for its 16 rows, which takes about as long as tensor cores work on them: what mma.sync leaves
// of a Hopper's speed, wgmma would have (unmeasured).
#pragma once

#include "paged_attention.cuh"

namespace enginewright {

constexpr int PREFILL_ROWS = ATTENTION_WARPS * TILE_ROWS;

// Grid: at least as many blocks as all sequences have tiles of 64 rows; KV heads. Later tiles see more, and
// begin first.
template <PagedAttention S>
KERNEL(ATTENTION_THREADS)
paged_prefill(const Sizes* sizes, const bf16* q, const unsigned char* keys, const unsigned char* values,
              const int32_t* query_start, const int32_t* kv_len, const int32_t* block_table,
              typename Attention<S>::Out* out) {
  using A = Attention<S>;
  Step step{query_start, kv_len, block_table, sizes->kv_blocks};
  auto tiles = [&](int i) {
    int rows = step.tokens(i) * A::GROUP;
    return rows > A::FEW ? ceil_div(rows, PREFILL_ROWS) : 0;
  };
  int index = block_x(), kv_head = block_y(), found = find_sequence(index, sizes->sequences, tiles);
  if (found < 0) return;
  Sequence sequence = step.sequence(found);
  int first = (tiles(found) - 1 - index) * PREFILL_ROWS, end = first + PREFILL_ROWS;
  if (int rows = sequence.tokens * A::GROUP; rows < end) end = rows;
  typename A::Range range{A::oldest(A::position(sequence, first)), A::position(sequence, end - 1)};
  int split = A::first_split(sequence, first), last = A::last_split(sequence, end - 1);

  typename A::Shared shared(shared_memory<unsigned char>());
  auto copy_keys = [&](int of, int block) {
    A::copy(shared.keys, shared.key_scales, keys, block, kv_head, of, range);
  };
  auto copy_values = [&](int of, int block) {
    A::copy(shared.values, shared.value_scales, values, block, kv_head, of, range);
  };
  int block = A::block_of(sequence, split, range);
  copy_keys(split, block);
  commit_copies();
  copy_values(split, block);
  commit_copies();

  int own = first + warp() * TILE_ROWS;
  typename A::Rows rows(sequence, own);
  Words4* queries = reinterpret_cast<Words4*>(shared_memory<unsigned char>() + A::SHARED_BYTES) +
                    thread_index();  // [STEPS][threads]
  for (int i = 0; i < A::STEPS; ++i)
    queries[i * ATTENTION_THREADS] = A::queries(q, sequence, kv_head, rows, i);
  typename A::Range any{shuffle(rows.seen[0].low, 0), shuffle(rows.seen[1].high, WARP - 1)};
  typename A::Range all{shuffle(rows.seen[1].low, WARP - 1), shuffle(rows.seen[0].high, 0)};
  float o[A::COLUMN_GROUPS][2][4] = {}, most[2] = {-INF, -INF}, sums[2] = {0.0f, 0.0f};

  for (; split <= last; ++split) {
    int begin = split * A::SPLIT, behind = begin + A::SPLIT;
    bool sees = begin <= any.high && behind > any.low, whole = begin >= all.low && behind <= all.high + 1;
    block = split < last ? A::block_of(sequence, split + 1, range) : 0;
    float s[A::SPLIT / 8][4];
    wait_copies<1>();
    sync_threads();  // everybody's keys are there
    if (sees) {
      A::multiply_keys(s, [&](int i) { return queries[i * ATTENTION_THREADS]; }, shared.keys, 0);
      A::adjust(s, rows, begin, whole, shared.key_scales);
    }
    sync_threads();  // and read
    if (split < last) copy_keys(split + 1, block);
    commit_copies();
    wait_copies<1>();
    sync_threads();  // the values, too
    if (sees) {
      float of_split[2], sum[2];
      A::maxima(of_split, s);
      A::weigh(s, sum, of_split, shared.value_scales);
      uint32_t p[A::SPLIT / 16][4];
      UNROLL
      for (int i = 0; i < A::SPLIT / 16; ++i)
        for (int j = 0; j < 4; ++j)
          p[i][j] = pack_bf16(s[2 * i + j / 2][j % 2 * 2], s[2 * i + j / 2][j % 2 * 2 + 1]);
      Fold folds[2];
      for (int i = 0; i < 2; ++i) {
        folds[i] = fold_of(most[i], of_split[i] * A::FACTOR);
        most[i] = folds[i].maximum;
        sums[i] = folded(sums[i], sum[i], folds[i]);
      }
      auto weights = [&](uint32_t (&a)[4], int i) {
        for (int j = 0; j < 4; ++j) a[j] = p[i][j];
      };
      UNROLL
      for (int group = 0; group < A::COLUMN_GROUPS; group += 2) {
        float next[2][2][4] = {};
        A::template multiply_values<1>(next, weights, shared.values, group);
        for (int j = 0; j < 2; ++j)
          for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 4; ++i)
              o[group + j][h][i] = folded(o[group + j][h][i], next[j][h][i], folds[i / 2]);
      }
    }
    sync_threads();
    if (split < last) copy_values(split + 1, block);
    commit_copies();
  }

  UNROLL
  for (int i = 0; i < 2; ++i)
    if (int row = own + lane() / 4 + 8 * i; row < end) {
      float inverse = divide(1.0f, sums[i]);
      UNROLL
      for (int group = 0; group < A::COLUMN_GROUPS; ++group)
        A::for_pairs(o[group], group, i, [&](int column, float x, float y) {
          A::write(out, sequence, kv_head, row, column, x * inverse, y * inverse);
        });
    }
  A::write_padding(out, sequence, kv_head, first, end);
}

}  // namespace enginewright
