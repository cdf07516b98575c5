// Attention of all heads to one latent vector a position, whose first columns are the values
// (plugins/attention/latent_paged_attention.py; arXiv:2405.04434). Prompts and decoding are one kernel.
//
// Queries are rows: row r of a sequence is head r % heads of token r / heads, so that all rows share what is
// read of a position. A block has 32 rows. Positions come in tiles of 32, a block of the plane (kv.cuh), and
// 8 tiles, aligned to absolute 0, are a split; with s = q · latent scale, -infinity where a row does not see,
// and m = max s up to a tile,
//
//   p = e^(s - m),  sum = Σ bf16(p),  o = Σ bf16(p) latent[: value_dim]
//
// are kept of a split, scaled again when m grows, and splits are folded in ascending order: fold_of. What a
// row does not see adds exact zeros. So a row's bits depend on nothing but its own sequence, whichever block
// adds what.
//
// A work item is 32 rows, and either one split of their sequence or all that they see, as in paged_decode:
// sequences of more splits than a bound are taken apart, if they have no more tiles of rows than one token
// has, and latent_combine folds what their splits give. So one long sequence keeps all multiprocessors busy,
// and prompts and many sequences write no partial results.
//
// Each of 8 warps multiplies the queries of 16 rows with a quarter of a tile's columns, every fourth 16 of
// them, which leaves a query's fragments in registers (36 of a lane where the plane has 576 columns): what
// the quarters give is added up in shared memory, in order, where 8 lanes a row make p of it. Then each warp
// has all rows and every eighth 16 columns of the values: 64 registers for o of a split of 512 columns, and
// as many for what splits give together. Two tiles of 36 KB, and 22 KB for scores and p, fit into every GPU:
// one is on its way while the other is multiplied.
//
// On paper (unmeasured) 32 rows and a tile are 1090 cycles of an A100's tensor cores, and 1500 of its shared
// memory: 290 to write the tile, 580 to read it as keys, once for each 16 rows, 290 as values once for all,
// and the rest for scores and p.
#pragma once

#include "kv.cuh"
#include "paged_attention.cuh"
#include "paged_step.cuh"
#include "splits.cuh"

namespace enginewright {

// Strides are elements from one row to the next. padded: columns of out that are written, zeros after heads
// * value_dim. partials: how many splits of sequences are kept apart, in addition to those of the longest
// one.
struct LatentAttention {
  Kv kv;
  int heads, value_dim, q_stride, out_stride, padded;
  Type out_type;
  float scale;
  int partials, partial_stride;
  // Positions of dims: columns of the block table, and how often the longest sequence has 256 positions.
  int table_width, splits;
};

constexpr int LATENT_THREADS = 256, LATENT_ROWS = 32, LATENT_TILE = 32, LATENT_SPLIT_TILES = 8,
              LATENT_COMBINED_ROWS = 2;

template <LatentAttention S>
struct Latent {
  static constexpr int WARPS = LATENT_THREADS / WARP, QUARTERS = 4;
  static constexpr int CHUNKS = S.kv.number_bytes() / 16, ROW_BYTES = CHUNKS * 16;
  static constexpr int TILE_BYTES = LATENT_TILE * ROW_BYTES;
  static constexpr int STEPS = S.kv.head_dim_pad / 16, OWN_STEPS = ceil_div(STEPS, QUARTERS);
  static constexpr int GROUPS = ceil_div(S.value_dim, 16), OWN_GROUPS = ceil_div(GROUPS, WARPS);
  static constexpr int COLUMNS = GROUPS * 16;                       // of o
  static constexpr int ROW_TILES = ceil_div(S.heads, LATENT_ROWS);  // of sequences that are taken apart
  static constexpr float FACTOR = S.scale * LOG2E;
  using Out = stored_t<S.out_type>;
  using Partial = enginewright::Partial<LATENT_ROWS, COLUMNS>;
  static_assert(S.kv.type == Type::bf16 && S.kv.heads == 1 && S.kv.block_size == LATENT_TILE);

  // Each quarter's scores lie apart, in rows that eight lanes write, or read, without meeting in a bank.
  static constexpr int SCORE_STRIDE = LATENT_TILE + 8, P_CHUNKS = LATENT_TILE * 2 / 16;
  struct Shared {
    unsigned char* tiles;  // [2][LATENT_TILE][CHUNKS]
    float* scores;         // [QUARTERS][LATENT_ROWS][SCORE_STRIDE]
    unsigned char* p;      // [LATENT_ROWS][P_CHUNKS]
    // Of each row: what o is multiplied by before a tile is added; what the total and o are, after a split;
    // and what the total is, in the end.
    float *grow, *keep, *take, *inverse;
    explicit DEVICE Shared(unsigned char* bytes)
        : tiles(bytes),
          scores(reinterpret_cast<float*>(bytes + 2 * TILE_BYTES)),
          p(reinterpret_cast<unsigned char*>(scores + QUARTERS * LATENT_ROWS * SCORE_STRIDE)),
          grow(reinterpret_cast<float*>(p + LATENT_ROWS * P_CHUNKS * 16)),
          keep(grow + LATENT_ROWS),
          take(keep + LATENT_ROWS),
          inverse(take + LATENT_ROWS) {}
    DEVICE unsigned char* tile(int index) const { return tiles + index % 2 * TILE_BYTES; }
  };

  // A lane's part of o: columns 16 (warp + 8 j) ..., rows 16 h ..., in two fragments of 8 columns.
  using Values = float[OWN_GROUPS][2][2][4];

  // Rows of a sequence, those after the last one are like it.
  struct Rows {
    const Sequence& sequence;
    int first;
    DEVICE int last() const { return sequence.tokens * S.heads - 1; }
    DEVICE int row(int i) const { return first + i < last() ? first + i : last(); }
    DEVICE int position(int i) const { return sequence.length - sequence.tokens + row(i) / S.heads; }
    DEVICE int count() const { return last() + 1 - first < LATENT_ROWS ? last() + 1 - first : LATENT_ROWS; }
  };

  static DEVICE int tiles_of(const Step& step, int i) {
    return ceil_div(step.tokens(i) * S.heads, LATENT_ROWS);
  }
  // Of sequence i; none if it is not taken apart, whatever it has.
  static DEVICE int splits_of(const Step& step, int i) {
    int tiles = tiles_of(step, i);
    return 0 < tiles && tiles <= ROW_TILES ? ceil_div(step.kv_len[i], LATENT_TILE * LATENT_SPLIT_TILES) : 0;
  }
  static DEVICE int room(const Sizes& sizes) { return S.partials + sizes[S.splits]; }
  static DEVICE Partial partial_of(float* partials, int slot, int row_tile) {
    return Partial(partials + int64_t{slot} * S.partial_stride + row_tile * Partial::FLOATS);
  }

  // block: a tile of the plane begins to arrive, zeros for positions that no row sees.
  static DEVICE void begin_copy(unsigned char* to, const unsigned char* plane, int block, int tile,
                                int newest) {
    const unsigned char* from = kv_tile(S.kv, plane, block, 0);
    NO_UNROLL
    for (int i = thread_index(); i < LATENT_TILE * CHUNKS; i += LATENT_THREADS)
      copy_async(to + chunk_at<CHUNKS>(i / CHUNKS, i % CHUNKS), from + i * 16,
                 tile * LATENT_TILE + i / CHUNKS <= newest);
  }

  // The warp's quarter of the queries, fragments A.
  static DEVICE void read_queries(uint32_t (&queries)[OWN_STEPS][4], const bf16* q, const Rows& rows) {
    int quarter = warp() % QUARTERS, half = warp() / QUARTERS;
    UNROLL
    for (int i = 0; i < 2; ++i) {
      int row = rows.row(16 * half + lane() / 4 + 8 * i);
      const bf16* from =
          q + int64_t{rows.sequence.first_token + row / S.heads} * S.q_stride + row % S.heads * S.kv.head_dim;
      UNROLL
      for (int j = 0; j < OWN_STEPS; ++j)
        for (int k = 0; k < 2; ++k) {
          int column = 16 * (quarter + j * QUARTERS) + 2 * (lane() % 4) + 8 * k;
          queries[j][i + 2 * k] =
              column < S.kv.head_dim ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
        }
    }
  }

  // The warp's quarter of the scores of its 16 rows and a tile's positions.
  static DEVICE void multiply_keys(float* scores, const uint32_t (&queries)[OWN_STEPS][4],
                                   const unsigned char* tile) {
    int quarter = warp() % QUARTERS, half = warp() / QUARTERS;
    int position = lane() / 16 * 8 + lane() % 8;
    const unsigned char* from =
        tile + position * ROW_BYTES + chunk_offset(2 * quarter, key_of<CHUNKS>(position) ^ (lane() / 8 % 2));
    float s[LATENT_TILE / 8][4] = {};
    UNROLL
    for (int j = 0; j < OWN_STEPS; ++j) {
      if (STEPS % QUARTERS && quarter + j * QUARTERS >= STEPS) break;
      UNROLL
      for (int n = 0; n < LATENT_TILE / 8; n += 2) {
        uint32_t r[4];
        load_matrices(r, from, 8 * n * ROW_BYTES + j * 128);  // 8 chunks, which QUARTERS steps are
        mma_bf16(s[n], queries[j], {r[0], r[1]});
        mma_bf16(s[n + 1], queries[j], {r[2], r[3]});
      }
    }
    scores += (quarter * LATENT_ROWS + 16 * half + lane() / 4) * SCORE_STRIDE + 2 * (lane() % 4);
    UNROLL
    for (int n = 0; n < LATENT_TILE / 8; ++n)
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<Words2*>(scores + 8 * i * SCORE_STRIDE + 8 * n) = {bits_of_float(s[n][2 * i]),
                                                                             bits_of_float(s[n][2 * i + 1])};
  }

  // Eight lanes a row, which have four positions each of a tile.
  struct Softmax {
    int row, begin;  // begin: the lane's first position in a tile
    float row_max = -INF, sum = 0.0f, total_max = -INF, total_sum = 0.0f;
    DEVICE Softmax() : row(thread_index() / 8), begin(thread_index() % 8 * 4) {}

    template <class Operation>
    static DEVICE float over_row(float x, Operation operation) {
      for (int mask = 4; mask > 0; mask /= 2) x = operation(x, shuffle_xor(x, mask));
      return x;
    }

    // seen: positions of the tile that the row sees. ends_split: the tile is the last one of a split.
    DEVICE void take(const Shared& shared, int seen, bool ends_split) {
      float s[4] = {}, tile_max = -INF;
      UNROLL
      for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        Words4 words = load16(shared.scores + (quarter * LATENT_ROWS + row) * SCORE_STRIDE + begin);
        uint32_t bits[4] = {words.x, words.y, words.z, words.w};
        for (int i = 0; i < 4; ++i) s[i] += float_of_bits(bits[i]);
      }
      for (int i = 0; i < 4; ++i) {
        if (begin + i >= seen) s[i] = -INF;
        tile_max = fmaxf(tile_max, s[i]);
      }
      tile_max = over_row(tile_max, [](float a, float b) { return fmaxf(a, b); });
      Fold fold = fold_of(row_max, tile_max * FACTOR);
      row_max = fold.maximum;
      float from = row_max == -INF ? 0.0f : row_max;
      uint32_t pairs[2];
      for (int i = 0; i < 2; ++i)
        pairs[i] =
            pack_bf16(exp2_fast(fma(s[2 * i], FACTOR, -from)), exp2_fast(fma(s[2 * i + 1], FACTOR, -from)));
      float tile_sum = low_bf16(pairs[0]) + high_bf16(pairs[0]) + (low_bf16(pairs[1]) + high_bf16(pairs[1]));
      tile_sum = over_row(tile_sum, [](float a, float b) { return a + b; });
      sum = fma(sum, fold.keep, tile_sum);
      *reinterpret_cast<Words2*>(shared.p + chunk_at<P_CHUNKS>(row, begin / 8) + begin % 8 * 2) = {pairs[0],
                                                                                                   pairs[1]};
      if (begin == 0) shared.grow[row] = fold.keep;
      if (!ends_split) return;
      Fold total = fold_of(total_max, row_max);
      total_max = total.maximum;
      total_sum = folded(total_sum, sum, total);
      row_max = -INF;
      sum = 0.0f;
      if (begin == 0) {
        shared.keep[row] = total.keep;
        shared.take[row] = total.take;
        shared.inverse[row] = divide(1.0f, total_sum);
      }
    }
  };

  // use(j, half, n, i) of each of a lane's Values.
  template <class Use>
  static DEVICE void each(Use use) {
    UNROLL
    for (int j = 0; j < OWN_GROUPS; ++j)
      for (int half = 0; half < 2; ++half)
        for (int n = 0; n < 2; ++n)
          for (int i = 0; i < 4; ++i) use(j, half, n, i);
  }

  // What the lane's four rows, of both halves g and g + 8, have of `of_rows`.
  struct OwnRows {
    float of[4];
    explicit DEVICE OwnRows(const float* of_rows) {
      for (int i = 0; i < 4; ++i) of[i] = of_rows[lane() / 4 + 8 * i];
    }
  };

  // o += p latent, of all rows and the warp's columns.
  static DEVICE void multiply_values(Values& o, const Shared& shared, const unsigned char* tile) {
    int position = lane() % 16;
    const unsigned char* from = tile + position * ROW_BYTES;
    int key = key_of<CHUNKS>(position) ^ (lane() / 16);
    UNROLL
    for (int step = 0; step < LATENT_TILE / 16; ++step) {
      uint32_t p[2][4];
      for (int half = 0; half < 2; ++half)
        load_matrices(p[half],
                      shared.p + chunk_at<P_CHUNKS>(16 * half + lane() % 16, 2 * step + lane() / 16));
      UNROLL
      for (int j = 0; j < OWN_GROUPS; ++j) {
        int group = warp() + j * WARPS;
        if (GROUPS % WARPS && group >= GROUPS) break;
        uint32_t r[4];
        load_matrices_transposed(r, from, 16 * step * ROW_BYTES + chunk_offset(2 * group, key));
        for (int half = 0; half < 2; ++half) {
          mma_bf16(o[j][half][0], p[half], {r[0], r[1]});
          mma_bf16(o[j][half][1], p[half], {r[2], r[3]});
        }
      }
    }
  }

  // block: splits from `split` to `last` of some rows, folded. softmax: what it has of each row in the end.
  static DEVICE void attend(Values& total, Softmax& softmax, const bf16* q, const unsigned char* plane,
                            const Rows& rows, int split, int last) {
    const Shared shared(shared_memory<unsigned char>());
    int newest = rows.position(LATENT_ROWS - 1), position = rows.position(softmax.row);
    int tile = split * LATENT_SPLIT_TILES, end = (last + 1) * LATENT_SPLIT_TILES;
    if (newest / LATENT_TILE < end) end = newest / LATENT_TILE + 1;
    const int32_t* blocks = rows.sequence.blocks;
    sync_threads();  // what another item left is read
    begin_copy(shared.tile(tile), plane, blocks[tile], tile, newest);
    commit_copies();
    uint32_t queries[OWN_STEPS][4];
    read_queries(queries, q, rows);

    Values o = {};
    for (; tile < end; ++tile) {
      int block = tile + 1 < end ? blocks[tile + 1] : 0;
      wait_copies<0>();
      sync_threads();  // everybody's copies are there, and the tile before is read
      if (tile + 1 < end) begin_copy(shared.tile(tile + 1), plane, block, tile + 1, newest);
      commit_copies();
      bool ends_split = tile + 1 == end || (tile + 1) % LATENT_SPLIT_TILES == 0;
      multiply_keys(shared.scores, queries, shared.tile(tile));
      sync_threads();  // all scores are there
      softmax.take(shared, position - tile * LATENT_TILE + 1, ends_split);
      sync_threads();  // p is there
      const OwnRows grow(shared.grow);
      each([&](int j, int half, int n, int i) { o[j][half][n][i] *= grow.of[2 * half + i / 2]; });
      multiply_values(o, shared, shared.tile(tile));
      if (ends_split) {
        const OwnRows keep(shared.keep), take(shared.take);
        each([&](int j, int half, int n, int i) {
          float &x = total[j][half][n][i], &y = o[j][half][n][i];
          int row = 2 * half + i / 2;
          x = fma(x, keep.of[row], y * take.of[row]);
          y = 0.0f;
        });
      }
    }
  }

  // use(row, column, first, second) of what the lane has, rows below `count`.
  template <class Use>
  static DEVICE void for_pairs(const Values& total, int count, Use use) {
    UNROLL
    for (int j = 0; j < OWN_GROUPS; ++j)
      for (int i = 0; i < 4; ++i) {
        int row = lane() / 4 + 8 * i, group = warp() + j * WARPS;
        if (row < count && group < GROUPS)
          for (int n = 0; n < 2; ++n) {
            const float (&o)[4] = total[j][i / 2][n];
            use(row, 16 * group + 8 * n + 2 * (lane() % 4), o[i % 2 * 2], o[i % 2 * 2 + 1]);
          }
      }
  }

  // A row's result, and zeros after the last head's.
  static DEVICE Out* out_of(Out* out, const Sequence& sequence, int row) {
    return out + int64_t{sequence.first_token + row / S.heads} * S.out_stride + row % S.heads * S.value_dim;
  }
  static DEVICE void write(Out* to, int column, float first, float second) {
    if (column >= S.value_dim) return;
    if constexpr (S.out_type == Type::bf16) {
      *reinterpret_cast<uint32_t*>(to + column) = pack_bf16(first, second);
    } else {
      to[column] = first;
      to[column + 1] = second;
    }
  }
  static DEVICE void write_padding([[maybe_unused]] Out* to, [[maybe_unused]] int row,
                                   [[maybe_unused]] int index, [[maybe_unused]] int threads) {
    constexpr int PADDING = S.padded - S.heads * S.value_dim;
    if constexpr (PADDING > 0)
      if (row % S.heads == S.heads - 1)
        for (int i = index; i < PADDING; i += threads) to[S.value_dim + i] = from_float<Out>(0.0f);
  }
};

// Grid: as many blocks as run at once.
template <LatentAttention S>
KERNEL_OCCUPANCY(LATENT_THREADS, 1)
latent_attention(const Sizes* sizes, const bf16* q, const unsigned char* plane, const int32_t* query_start,
                 const int32_t* kv_len, const int32_t* block_table, typename Latent<S>::Out* out,
                 float* partials) {
  using L = Latent<S>;
  Step step{query_start, kv_len, block_table, (*sizes)[S.table_width]};
  auto splits_of = [&](int i) { return L::splits_of(step, i); };
  int bound = bound_of(L::room(*sizes), sizes->sequences(), splits_of);
  auto items_apart = [&](int i) { return splits_of(i) > bound ? splits_of(i) * L::ROW_TILES : 0; };
  auto items_in_whole = [&](int i) { return splits_of(i) > bound ? 0 : L::tiles_of(step, i); };
  for (int item = block_x();; item += grid_x()) {
    auto [found, index, before, apart] = find_item(item, sizes->sequences(), items_in_whole, items_apart);
    if (found < 0) return;
    Sequence sequence = step.sequence(found);
    // Later rows see more, and begin first.
    int row_tile = apart ? index % L::ROW_TILES : L::tiles_of(step, found) - 1 - index;
    typename L::Rows rows{sequence, row_tile * LATENT_ROWS};
    int split = apart ? index / L::ROW_TILES : 0;
    int last = apart ? split : rows.position(LATENT_ROWS - 1) / (LATENT_TILE * LATENT_SPLIT_TILES);

    typename L::Values total = {};
    typename L::Softmax softmax;
    L::attend(total, softmax, q, plane, rows, split, last);
    if (apart) {
      auto to = L::partial_of(partials, before / L::ROW_TILES + split, row_tile);
      L::for_pairs(total, rows.count(), [&](int row, int column, float x, float y) {
        *reinterpret_cast<Words2*>(to.o + row * L::COLUMNS + column) = {bits_of_float(x), bits_of_float(y)};
      });
      if (softmax.begin == 0) {
        to.maxima[softmax.row] = softmax.total_max;
        to.sums[softmax.row] = softmax.total_sum;
      }
    } else {
      const float* inverse = typename L::Shared(shared_memory<unsigned char>()).inverse;
      L::for_pairs(total, rows.count(), [&](int row, int column, float x, float y) {
        L::write(L::out_of(out, sequence, rows.first + row), column, x * inverse[row], y * inverse[row]);
      });
      if (softmax.row < rows.count()) {
        int row = rows.first + softmax.row;
        L::write_padding(L::out_of(out, sequence, row), row, thread_index() % 8, 8);
      }
    }
  }
}

// What splits gave of sequences that were taken apart becomes one: a block has LATENT_COMBINED_ROWS rows.
// Grid: as many blocks as run at once.
template <LatentAttention S>
KERNEL(LATENT_THREADS)
latent_combine(const Sizes* sizes, const int32_t* query_start, const int32_t* kv_len,
               typename Latent<S>::Out* out, float* partials) {
  using L = Latent<S>;
  constexpr int QUADS = L::COLUMNS / 4, ITEMS = L::ROW_TILES * LATENT_ROWS / LATENT_COMBINED_ROWS;
  Step step{query_start, kv_len, nullptr, 0};
  auto splits_of = [&](int i) { return L::splits_of(step, i); };
  int bound = bound_of(L::room(*sizes), sizes->sequences(), splits_of);
  auto items_of = [&](int i) { return splits_of(i) > bound ? ITEMS : 0; };
  auto slots_of = [&](int i) { return splits_of(i) > bound ? splits_of(i) : 0; };
  for (int item = block_x();; item += grid_x()) {
    int index = item, found = find_sequence(index, sizes->sequences(), items_of);
    if (found < 0) return;
    Sequence sequence = step.sequence(found);
    int slot = sum_below(found, slots_of), rows = sequence.tokens * S.heads;
    for (int i = thread_index(); i < LATENT_COMBINED_ROWS * QUADS; i += LATENT_THREADS) {
      int row = index * LATENT_COMBINED_ROWS + i / QUADS, column = i % QUADS * 4;
      if (row >= rows) break;
      float o[4], row_max, sum;
      L::partial_of(partials, slot, row / LATENT_ROWS)
          .fold(o, row_max, sum, S.partial_stride, splits_of(found), row % LATENT_ROWS, column);
      float inverse = divide(1.0f, sum);
      auto* to = L::out_of(out, sequence, row);
      for (int c = 0; c < 4; c += 2) L::write(to, column + c, o[c] * inverse, o[c + 1] * inverse);
      L::write_padding(to, row, i % QUADS, QUADS);
    }
  }
}

}  // namespace enginewright
