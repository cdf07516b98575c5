// Attention of sequences with many rows (paged_attention.cuh): a block has 64 rows, a warp 16 of them and all
// positions, split by split.
//
// Registers of a lane at head_dim 128: scores 64 (then 32 of p), o 64, a split's o 16; with what is fetched
// ahead, 240 in all. Fragments of queries are each lane's own 16 bytes a step in shared memory, keys and
// values a split of each: 80 KB, so that a multiprocessor holds two blocks. Keys are copied while the split
// before multiplies values, and values while it multiplies keys. Each warp reads all keys and values from
// shared memory for its 16 rows, which on paper takes as long as tensor cores work on them on an A100, and
// longer on an H100, whose speed wgmma alone would reach. That decoding gives the same bits costs a multiply
// and an add of o for each split of 128, next to some 250 mma of them (unmeasured).
//
// Beyond head_dim 256 queries are read from global memory for each split, which leaves room for keys
// and values, and o is more than a lane has registers for (unmeasured).
#pragma once

#include "paged_attention.cuh"

namespace enginewright {

constexpr int PREFILL_ROWS = ATTENTION_WARPS * TILE_ROWS;

// Grid: at least as many blocks as all sequences have tiles of 64 rows; KV heads. Later tiles see more, and
// begin first.
template <PagedAttention S>
KERNEL_OCCUPANCY(ATTENTION_THREADS, 1)
paged_prefill(const Sizes* sizes, const bf16* q, const unsigned char* keys, const unsigned char* values,
              const int32_t* query_start, const int32_t* kv_len, const int32_t* block_table,
              typename Attention<S>::Out* out, const float* sinks) {
  using A = Attention<S>;
  constexpr int AT_ONCE = A::DIM > 128 ? 1 : 2;  // groups of columns of values
  Step step{query_start, kv_len, block_table, (*sizes)[S.table_width]};
  const typename A::template Tile<PREFILL_ROWS> tile(step, sizes->sequences());
  if (tile.sequence < 0) return;
  int first = tile.first, kv_head = block_y();
  Sequence sequence = step.sequence(tile.sequence);
  auto span = A::span_of(sequence, first, tile.end(sequence));
  int split = span.first_split(), last = span.last_split();

  typename A::Shared shared(shared_memory<unsigned char>());
  typename A::Copy copy{keys, values, kv_head, span};
  int block = A::block_of(sequence, split, span);
  copy.begin_keys(shared, block, split);
  copy.begin_values(shared, block, split);

  int own = first + warp() * TILE_ROWS;
  typename A::Rows rows(sequence, own);
  Words4* queries = reinterpret_cast<Words4*>(shared_memory<unsigned char>() + A::SHARED_BYTES) +
                    thread_index();  // [STEPS][threads]
  if constexpr (A::KEEPS_QUERIES)
    for (int i = 0; i < A::STEPS; ++i)
      queries[i * ATTENTION_THREADS] = A::queries(q, sequence, kv_head, rows, i);
  auto query = [&](int i) {
    if constexpr (A::KEEPS_QUERIES) return queries[i * ATTENTION_THREADS];
    return A::queries(q, sequence, kv_head, rows, i);
  };
  auto own_span = rows.span();
  float o[A::COLUMN_GROUPS][2][4] = {}, row_max[2] = {-INF, -INF}, sums[2] = {0.0f, 0.0f};

  for (; split <= last; ++split) {
    int begin = split * A::SPLIT, end = begin + A::SPLIT;
    bool sees = own_span.any_sees(begin, end), whole = own_span.all_see(begin, end);
    block = split < last ? A::block_of(sequence, split + 1, span) : 0;
    uint32_t p[A::SPLIT / 16][4];
    float of_split[2], sum[2];
    copy.end_keys(shared);
    sync_threads();  // everybody's keys are there
    if (sees) {
      float s[A::SPLIT / 8][4];
      A::multiply_keys(s, query, shared.keys, 0);
      A::adjust(s, rows, begin, whole, shared.key_scales);
      A::maxima(of_split, s);
      A::weigh(p, sum, s, of_split, shared.value_scales);
    }
    copy.end_values(shared);
    sync_threads();  // keys are read, and everybody's values are there
    if (split < last) copy.begin_keys(shared, block, split + 1);
    if (sees) {
      Fold folds[2];
      for (int i = 0; i < 2; ++i) {
        folds[i] = fold_of(row_max[i], of_split[i] * A::FACTOR);
        row_max[i] = folds[i].maximum;
        sums[i] = folded(sums[i], sum[i], folds[i]);
      }
      auto weights = [&](uint32_t (&a)[4], int i) {
        for (int j = 0; j < 4; ++j) a[j] = p[i][j];
      };
      UNROLL
      for (int group = 0; group < A::COLUMN_GROUPS; group += AT_ONCE) {
        float next[AT_ONCE][2][4] = {};
        A::template multiply_values<1>(next, weights, shared.values, group);
        for (int j = 0; j < AT_ONCE; ++j)
          for (int h = 0; h < 2; ++h)
            for (int i = 0; i < 4; ++i)
              o[group + j][h][i] = folded(o[group + j][h][i], next[j][h][i], folds[i / 2]);
        if constexpr (A::DIM > 128) keep_order();
      }
    }
    sync_threads();  // values are read
    if (split < last) copy.begin_values(shared, block, split + 1);
  }

  sequence = step.sequence(tile.sequence);  // as before; the loop has no registers for what it does not need
  int end = tile.end(sequence);
  UNROLL
  for (int i = 0; i < 2; ++i)
    if (int row = own + lane() / 4 + 8 * i; row < end) {
      float inverse = A::inverse_of(sums[i], row_max[i], sinks, kv_head, row);
      UNROLL
      for (int group = 0; group < A::COLUMN_GROUPS; ++group)
        A::for_pairs(o[group], group, i, [&](int column, float x, float y) {
          A::write(out, sequence, kv_head, row, column, x * inverse, y * inverse);
        });
    }
  A::write_padding(out, sequence, kv_head, first, end);
}

}  // namespace enginewright
