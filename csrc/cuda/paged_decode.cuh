// Flash-decoding (paged_attention.cuh): attention of sequences with few rows, a tile of 16 at a time, whose
// splits are shared out over the GPU (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
//
// A work item is a row tile, a KV head and either one split of a sequence or all that it sees. Sequences of
// more splits than a bound are taken apart, the smallest bound for which `partials` hold what their splits
// give; the last block of such a sequence to finish folds them in ascending order. So one long sequence keeps
// all multiprocessors busy, and many sequences write no partial results. Blocks find their items in the
// lengths in GPU memory: a launch that was captured for a batch is right for any lengths.
//
// All four warps work on one split: each multiplies the keys of a quarter of its positions, then the values
// of a quarter of the columns; maxima and p go through shared memory. Of head_dim 128 in bf16 a block has 32
// to 64 KB on their way, and a multiprocessor two blocks: an H200 takes 36 B/ns of memory a multiprocessor,
// which at 1 µs of latency is 36 KB. A split is about 1000 cycles of one block's work, and 3200 of memory's
// (on paper, unmeasured). Every multiprocessor runs its blocks two or four at once, or where it has less
// shared memory, in turns of equally many: items are dealt out in advance, evenly.
#pragma once

#include "paged_attention.cuh"

namespace enginewright {

template <PagedAttention S>
struct Decode : Attention<S> {
  using A = Attention<S>;
  using A::SPLIT, A::TILES, A::DIM, A::GROUP, A::COLUMN_GROUPS;
  using typename A::Out, typename A::Rows, typename A::Shared;
  static constexpr int ROW_TILES = A::FEW / TILE_ROWS;
  static constexpr int BLOCKS = DIM > 64 ? 2 : 4;                              // of a multiprocessor
  static constexpr int OWN_GROUPS = ceil_div(COLUMN_GROUPS, ATTENTION_WARPS);  // of columns, a warp's
  static constexpr int P_CHUNKS = SPLIT * 2 / 16;                              // a row of p

  // After the keys and values: p, and each warp's maxima and sums.
  struct Exchange {
    unsigned char* p;      // [TILE_ROWS][P_CHUNKS]
    float *maxima, *sums;  // [warps][TILE_ROWS]
    int* last;
    explicit DEVICE Exchange(unsigned char* bytes)
        : p(bytes + A::SHARED_BYTES),
          maxima(reinterpret_cast<float*>(p + TILE_ROWS * P_CHUNKS * 16)),
          sums(maxima + ATTENTION_WARPS * TILE_ROWS),
          last(reinterpret_cast<int*>(sums + ATTENTION_WARPS * TILE_ROWS)) {}
  };

  // A fold of splits: columns 16 (warp + 4 j) ..., and maxima and sums, which all warps have.
  struct Total {
    float o[OWN_GROUPS][2][4] = {}, row_max[2] = {-INF, -INF}, sums[2] = {0.0f, 0.0f};
  };

  // What a sequence's splits give, apart.
  using Partial = enginewright::Partial<TILE_ROWS, DIM>;
  static DEVICE Partial partial_of(float* partials, int slot, int kv_head, int row_tile) {
    return Partial(partials + int64_t{slot} * S.partial_stride +
                   (kv_head * ROW_TILES + row_tile) * Partial::FLOATS);
  }

  // Of sequence i; none if it is paged_prefill's.
  static DEVICE int splits_of(const Step& step, int i) {
    int rows = step.tokens(i) * GROUP;
    if (rows > A::FEW) return 0;
    auto span = A::span_of(step.sequence(i), 0, rows);
    return span.last_split() - span.first_split() + 1;
  }

  // block: splits `split` to `last` of 16 rows, folded.
  static DEVICE void attend(Total& total, const bf16* q, const unsigned char* keys,
                            const unsigned char* values, const Sequence& sequence, int kv_head, int row_tile,
                            int split, int last) {
    Shared shared(shared_memory<unsigned char>());
    Exchange exchange(shared_memory<unsigned char>());
    Rows rows(sequence, row_tile * TILE_ROWS);
    auto span = rows.span();
    typename A::Copy copy{keys, values, kv_head, span};
    int block = A::block_of(sequence, split, span);
    copy.begin_keys(shared, block, split);
    copy.begin_values(shared, block, split);
    Words4 queries[A::STEPS];
    UNROLL
    for (int i = 0; i < A::STEPS; ++i) queries[i] = A::queries(q, sequence, kv_head, rows, i);

    int own = warp() * A::QUARTER, row = lane() / 4;
    for (; split <= last; ++split) {
      int begin = split * SPLIT + own;
      bool whole = span.all_see(begin, begin + A::QUARTER);
      block = split < last ? A::block_of(sequence, split + 1, span) : 0;
      float s[TILES][4], row_max[2], sums[2];
      copy.end_keys(shared);
      sync_warp();  // the warp's keys are there
      A::multiply_keys(s, [&](int i) { return queries[i]; }, shared.keys, own);
      A::adjust(s, rows, begin, whole, shared.key_scales + own);
      A::maxima(row_max, s);
      for (int i = 0; i < 2; ++i)
        if (lane() % 4 == 0) exchange.maxima[warp() * TILE_ROWS + row + 8 * i] = row_max[i];
      sync_threads();  // everybody's maxima
      for (int i = 0; i < 2; ++i)
        for (int w = 0; w < ATTENTION_WARPS; ++w)
          row_max[i] = fmaxf(row_max[i], exchange.maxima[w * TILE_ROWS + row + 8 * i]);
      uint32_t p[TILES / 2][4];
      A::weigh(p, sums, s, row_max, shared.value_scales + own);
      for (int i = 0; i < 2; ++i)
        if (lane() % 4 == 0) exchange.sums[warp() * TILE_ROWS + row + 8 * i] = sums[i];
      for (int step = 0; step < TILES / 2; ++step)
        for (int i = 0; i < 4; ++i)
          *reinterpret_cast<uint32_t*>(
              exchange.p + chunk_at<P_CHUNKS>(row + i % 2 * 8, own / 8 + 2 * step + i / 2) + lane() % 4 * 4) =
              p[step][i];
      copy.end_values(shared);
      sync_threads();  // p, sums and values; and the warp's keys are read
      if (split < last) copy.begin_keys(shared, block, split + 1);
      Fold folds[2];
      for (int i = 0; i < 2; ++i) {
        float sum = 0.0f;
        for (int w = 0; w < ATTENTION_WARPS; ++w) sum += exchange.sums[w * TILE_ROWS + row + 8 * i];
        folds[i] = fold_of(total.row_max[i], row_max[i] * A::FACTOR);
        total.row_max[i] = folds[i].maximum;
        total.sums[i] = folded(total.sums[i], sum, folds[i]);
      }
      auto weights = [&](uint32_t (&a)[4], int step) {
        load_matrices(a, exchange.p + chunk_at<P_CHUNKS>(lane() % 16, 2 * step + lane() / 16));
      };
      float next[OWN_GROUPS][2][4] = {};
      A::template multiply_values<ATTENTION_WARPS>(next, weights, shared.values, warp());
      UNROLL
      for (int j = 0; j < OWN_GROUPS; ++j)
        for (int h = 0; h < 2; ++h)
          for (int i = 0; i < 4; ++i)
            total.o[j][h][i] = folded(total.o[j][h][i], next[j][h][i], folds[i / 2]);
      sync_threads();  // all is read
      if (split < last) copy.begin_values(shared, block, split + 1);
    }
  }

  // use(row, column, first, second) of what the lane has, rows below `rows`.
  template <class Use>
  static DEVICE void for_pairs(const Total& total, int rows, Use use) {
    UNROLL
    for (int j = 0; j < OWN_GROUPS; ++j)
      for (int i = 0; i < 2; ++i) {
        int row = lane() / 4 + 8 * i, group = warp() + j * ATTENTION_WARPS;
        if (row < rows && group < COLUMN_GROUPS)
          A::for_pairs(total.o[j], group, i,
                       [&](int column, float x, float y) { use(row, i, column, x, y); });
      }
  }

  static DEVICE void write_partial(const Partial& to, const Total& total, int rows) {
    for_pairs(total, rows, [&](int row, int, int column, float x, float y) {
      *reinterpret_cast<Words2*>(to.o + row * DIM + column) = {bits_of_float(x), bits_of_float(y)};
    });
    for (int i = 0; i < 2; ++i)
      if (int row = lane() / 4 + 8 * i; warp() == 0 && lane() % 4 == 0 && row < rows) {
        to.maxima[row] = total.row_max[i];
        to.sums[row] = total.sums[i];
      }
  }

  // block: whether all `count` of it have been here by now.
  static DEVICE bool is_last(int32_t* counter, int count) {
    int* last = Exchange(shared_memory<unsigned char>()).last;
    sync_threads();
    if (thread_index() == 0) {
      fence();
      *last = atomic_add(counter, 1) == count - 1;
      if (*last) *counter = 0;  // for the next launch
      fence();
    }
    sync_threads();
    return *last;
  }

  // block: folds the partial results of a sequence, from `slot` on, and writes its output.
  static DEVICE void combine(Out* out, const float* sinks, float* partials, int slot, int count,
                             const Sequence& sequence, int kv_head, int row_tile, int rows) {
    for (int i = thread_index(); i < rows * (DIM / 4); i += ATTENTION_THREADS) {
      int row = i / (DIM / 4), column = i % (DIM / 4) * 4;
      float o[4], row_max, sum;
      partial_of(partials, slot, kv_head, row_tile)
          .fold(o, row_max, sum, S.partial_stride, count, row, column);
      float inverse = A::inverse_of(sum, row_max, sinks, kv_head, row_tile * TILE_ROWS + row);
      for (int c = 0; c < 4; c += 2)
        A::write(out, sequence, kv_head, row_tile * TILE_ROWS + row, column + c, o[c] * inverse,
                 o[c + 1] * inverse);
    }
  }
};

// Grid: as many blocks as run at once.
template <PagedAttention S>
KERNEL_OCCUPANCY(ATTENTION_THREADS, Decode<S>::BLOCKS)
paged_decode(const Sizes* sizes, const bf16* q, const unsigned char* keys, const unsigned char* values,
             const int32_t* query_start, const int32_t* kv_len, const int32_t* block_table,
             typename Attention<S>::Out* out, const float* sinks, float* partials, int32_t* counters) {
  using D = Decode<S>;
  constexpr int ITEMS = S.kv.heads * D::ROW_TILES;  // of a sequence, or a split
  Step step{query_start, kv_len, block_table, (*sizes)[S.table_width]};
  int bound = bound_of(S.partials + S.partials_per_kv_split * (*sizes)[S.splits], sizes->sequences(),
                       [&](int i) { return D::splits_of(step, i); });
  auto items_in_whole = [&](int i) {
    int splits = D::splits_of(step, i);
    return 0 < splits && splits <= bound ? ITEMS : 0;
  };
  auto items_apart = [&](int i) {
    int splits = D::splits_of(step, i);
    return splits > bound ? splits * ITEMS : 0;
  };
  for (int item = block_x();; item += grid_x()) {
    auto [found, index, before, apart] = find_item(item, sizes->sequences(), items_in_whole, items_apart);
    if (found < 0) return;
    int slot = before / ITEMS, kv_head = index % S.kv.heads, row_tile = index / S.kv.heads % D::ROW_TILES;
    Sequence sequence = step.sequence(found);
    int first_row = row_tile * TILE_ROWS, rows = sequence.tokens * D::GROUP - first_row;
    if (rows <= 0) continue;
    if (rows > TILE_ROWS) rows = TILE_ROWS;
    int split = index / ITEMS, count = D::splits_of(step, found);
    int first = D::span_of(sequence, 0, sequence.tokens * D::GROUP).first_split();

    typename D::Total total;
    D::attend(total, q, keys, values, sequence, kv_head, row_tile, apart ? first + split : first,
              first + (apart ? split : count - 1));
    if (!apart) {
      float inverse[2];
      for (int i = 0; i < 2; ++i)
        inverse[i] =
            D::inverse_of(total.sums[i], total.row_max[i], sinks, kv_head, first_row + lane() / 4 + 8 * i);
      D::for_pairs(total, rows, [&](int row, int i, int column, float x, float y) {
        D::write(out, sequence, kv_head, first_row + row, column, x * inverse[i], y * inverse[i]);
      });
    } else {
      D::write_partial(D::partial_of(partials, slot + split, kv_head, row_tile), total, rows);
      if (!D::is_last(counters + found * S.counter_stride + kv_head * D::ROW_TILES + row_tile, count))
        continue;
      D::combine(out, sinks, partials, slot, count, sequence, kv_head, row_tile, rows);
    }
    D::write_padding(out, sequence, kv_head, first_row, first_row + rows);
  }
}

}  // namespace enginewright
