// Causal attention of packed tokens to paged KV (plugins/attention/paged_attention.py;
// https://arxiv.org/abs/2309.06180): what paged_prefill.cuh and paged_decode.cuh have in common, which is all
// of the arithmetic.
//
// Queries are rows: of a sequence and a KV head, row r is token r / GROUP and the KV head's query head r %
// GROUP, so that the heads that share KV share what is read of it. Tensor cores take 16 rows. Positions come
// in splits, aligned to absolute 0; a split's result for a row is
//
//   s = q k scale, cap tanh(s / cap) if there is a cap, -infinity where the row does not see
//   m = max s,  p = e^(s - m),  sum = Σ p,  o = Σ bf16(p) v
//
// and the results of splits are folded in ascending order: fold_of. Codes widen to bf16 exactly; K's scales
// go on scores, V's on p before it is rounded. Numbers of 4 bits become bf16 in shared memory. A score is one
// chain over the columns, an element of o one chain over the split's positions, a sum four such chains, one
// for each quarter of a split; what a row does not see adds exact zeros. So a row's bits depend on nothing
// but its own sequence, and are the same in both kernels, though warps share the work in two ways.
//
// A sink, a logit of each head that belongs to no position, joins the sum when all splits are folded:
// inverse_of.
//
// A split is 128 positions, whose scores a warp holds as 64 registers a lane next to o (64 of head_dim 128);
// half as many where head_dim is beyond 128. The CPU's 256 would take a second
// level of sums.
#pragma once

#include "kv.cuh"
#include "paged_step.cuh"
#include "rows.cuh"
#include "splits.cuh"

namespace enginewright {

// Strides are elements from one row to the next. padded: columns of out that are written, zeros after heads
// * head_dim. window: positions a query sees, itself included; 0 is all. softcap: 0 is none. partials: how
// many splits of sequences paged_decode may keep apart, `partials` and so many for each 256 positions of the
// longest sequence.
struct PagedAttention {
  Kv kv;
  int heads, q_stride, out_stride, padded;
  Type out_type;
  int window;
  float scale, softcap;
  bool sinks;
  int partials, partials_per_kv_split, partial_stride, counter_stride;
  // Positions of dims: columns of the block table, and how often the longest sequence has 256 positions.
  int table_width, splits;
};

constexpr int ATTENTION_THREADS = 128, ATTENTION_WARPS = ATTENTION_THREADS / WARP, TILE_ROWS = 16;

// Tiles are rows of CHUNKS chunks of 16 bytes. A row has its chunks in another order, chunk ^ key, so that
// eight rows at one chunk, and eight chunks of a row, are in different banks. Keys repeat every eight rows.
template <int CHUNKS>
DEVICE int key_of(int row) {
  constexpr int POWER = CHUNKS & -CHUNKS, WIDTH = POWER > 8 ? 8 : POWER;
  return row % 8 / (8 / WIDTH);
}
// Bytes from a row's begin on; the loops' `chunk` then costs registers for no more than eight of them.
DEVICE int chunk_offset(int chunk, int key) { return chunk / 8 * 128 + (chunk % 8 ^ key) * 16; }
template <int CHUNKS>
DEVICE int chunk_at(int row, int chunk) {
  return row * CHUNKS * 16 + chunk_offset(chunk, key_of<CHUNKS>(row));
}

// Two of four codes as bf16, exactly.
template <Type TYPE, int LOW, int HIGH>
DEVICE uint32_t widened(uint32_t codes) {
  if constexpr (TYPE == Type::i8) {  // 128 + its low seven bits, less 128, or 256 of negative ones
    uint32_t spread = byte_perm(codes, 0, 0x4040 | LOW | HIGH << 8);
    return fma_bf16((spread & 0x00800080) | 0x43004300, 0xbf80bf80, (spread & 0x007f007f) | 0x43004300);
  } else {
    return bf16_of_fp8<stored_t<TYPE>>(byte_perm(codes, 0, 0x0404 | LOW << 4 | HIGH << 12));
  }
}

// Lanes have elements of 16 rows as the fragments of device.cuh: rows g and g + 8.
template <PagedAttention S>
struct Attention {
  static constexpr bool EXPANDS = S.kv.type == Type::u4;  // to bf16, in shared memory
  static constexpr bool CODES = S.kv.type != Type::bf16 && !EXPANDS;
  static constexpr int GROUP = S.heads / S.kv.heads, DIM = S.kv.head_dim_pad;
  static constexpr int SPLIT = DIM > 128 ? 64 : 128, QUARTER = SPLIT / 4, TILES = QUARTER / 8;
  static constexpr int CHUNKS = (EXPANDS ? DIM * 2 : S.kv.number_bytes()) / 16, ROW_BYTES = CHUNKS * 16,
                       TILE_BYTES = SPLIT * ROW_BYTES;
  static constexpr int SCALE_BYTES = CODES ? SPLIT * 4 : 0;
  static constexpr int STEPS = DIM / 16, COLUMN_GROUPS = DIM / 16;
  static constexpr bool KEEPS_QUERIES = DIM <= 256;  // paged_prefill's, in shared memory
  static_assert(S.kv.block_size % QUARTER == 0 && DIM % 32 == 0);

  // In shared memory: keys and values of a split, and their scales.
  static constexpr int SHARED_BYTES = 2 * (TILE_BYTES + SCALE_BYTES);
  struct Shared {
    unsigned char *keys, *values;
    float *key_scales, *value_scales;
    explicit DEVICE Shared(unsigned char* bytes)
        : keys(bytes),
          values(bytes + TILE_BYTES),
          key_scales(reinterpret_cast<float*>(bytes + 2 * TILE_BYTES)),
          value_scales(key_scales + SPLIT) {}
  };

  // Sequences with few rows are paged_decode's, others paged_prefill's.
  static constexpr int FEW = ceil_div(GROUP, TILE_ROWS) * TILE_ROWS;

  static DEVICE int position(const Sequence& sequence, int row) {
    return sequence.length - sequence.tokens + row / GROUP;
  }
  static DEVICE int oldest(int position) { return S.window ? position - S.window + 1 : 0; }  // that is seen

  // Rows at positions from `first` to `last`, and what they see of positions from `begin` to `end` - 1.
  struct Span {
    int first, last;
    DEVICE bool any_sees(int begin, int end) const { return end > oldest(first) && begin <= last; }
    DEVICE bool all_see(int begin, int end) const { return begin >= oldest(last) && end <= first + 1; }
    DEVICE int first_split() const { return oldest(first) > 0 ? oldest(first) / SPLIT : 0; }
    DEVICE int last_split() const { return last / SPLIT; }
  };
  static DEVICE Span span_of(const Sequence& sequence, int first_row, int end_row) {
    return {position(sequence, first_row), position(sequence, end_row - 1)};
  }

  // A lane's rows of a tile, and their positions; rows after the last one are like it.
  struct Rows {
    int row[2], position[2];
    DEVICE Rows(const Sequence& sequence, int first) {
      int last = sequence.tokens * GROUP - 1;
      for (int i = 0; i < 2; ++i) {
        int r = first + lane() / 4 + 8 * i;
        row[i] = r < last ? r : last;
        position[i] = Attention::position(sequence, row[i]);
      }
    }
    DEVICE Span span() const { return {shuffle(position[0], 0), shuffle(position[1], WARP - 1)}; }
  };

  // What a block of a kernel for many rows has: ROWS rows of a sequence, which is -1 if none are left. Later
  // rows see more, and come first.
  template <int ROWS>
  struct Tile {
    int sequence, first;
    DEVICE Tile(const Step& step, int sequences) {
      auto tiles = [&](int i) {
        int rows = step.tokens(i) * GROUP;
        return rows > FEW ? ceil_div(rows, ROWS) : 0;
      };
      int index = block_x();
      sequence = find_sequence(index, sequences, tiles);
      first = sequence < 0 ? 0 : (tiles(sequence) - 1 - index) * ROWS;
    }
    DEVICE int end(const Sequence& of) const {
      int end = first + ROWS, rows = of.tokens * GROUP;
      return rows < end ? rows : end;
    }
  };

  // The fragment A of 16 rows of q and the columns from 16 step on.
  static DEVICE Words4 queries(const bf16* q, const Sequence& sequence, int kv_head, const Rows& rows,
                               int step) {
    uint32_t a[4];
    for (int i = 0; i < 4; ++i) {
      int row = rows.row[i % 2], head = kv_head * GROUP + row % GROUP;
      // Where keys are codes, their columns 4t ... are rows 2t, 2t + 1, 2t + 8 and 2t + 9 of B.
      int column = 16 * step + (CODES ? 4 * (lane() % 4) + i / 2 * 2 : 2 * (lane() % 4) + i / 2 * 8);
      const bf16* from = q + int64_t{sequence.first_token + row / GROUP} * S.q_stride + head * S.kv.head_dim;
      a[i] = column < S.kv.head_dim ? *reinterpret_cast<const uint32_t*>(from + column) : 0;
    }
    return {a[0], a[1], a[2], a[3]};
  }

  // The block of a warp's quarter of a split, if any of it is seen.
  static DEVICE int block_of(const Sequence& sequence, int split, const Span& rows) {
    int first = split * SPLIT + warp() * QUARTER;
    return rows.any_sees(first, first + QUARTER) ? sequence.blocks[first / S.kv.block_size] : 0;
  }

  // What a warp copies: its quarter of a split, zeros for what no row sees. The scales of both come with the
  // keys. A split's keys begin and end before its values. What has ended is there for the lane that copied
  // it, and after a barrier for others.
  struct Copy {
    const unsigned char *keys, *values;
    int kv_head;
    Span rows;

    DEVICE void begin_keys(const Shared& to, int block, int split) const {
      begin(to.keys, keys, block, split);
      if constexpr (CODES) {
        begin_scales(to.key_scales, keys, block, split);
        begin_scales(to.value_scales, values, block, split);
      }
      commit_copies();
    }
    DEVICE void begin_values(const Shared& to, int block, int split) const {
      begin(to.values, values, block, split);
      commit_copies();
    }
    static DEVICE void end_keys(const Shared& shared) {
      wait_copies<1>();
      if constexpr (EXPANDS) expand(shared.keys);
    }
    static DEVICE void end_values(const Shared& shared) {
      wait_copies<0>();
      if constexpr (EXPANDS) expand(shared.values);
    }

   private:
    DEVICE bool sees(int position) const { return rows.any_sees(position, position + 1); }
    DEVICE void begin(unsigned char* to, const unsigned char* pool, int block, int split) const {
      constexpr int COPIED = S.kv.number_bytes() / 16;  // chunks of a row
      int quarter = warp() * QUARTER, first = split * SPLIT + quarter, place = first % S.kv.block_size;
      const unsigned char* tile = kv_tile(S.kv, pool, block, kv_head);
      const unsigned char* from = tile + place * S.kv.number_bytes();
      NO_UNROLL
      for (int i = lane(); i < QUARTER * COPIED; i += WARP)
        copy_async(to + chunk_at<CHUNKS>(quarter + i / COPIED, i % COPIED), from + i * 16,
                   sees(first + i / COPIED));
      if constexpr (EXPANDS) {  // scales after a row's codes
        from = tile + S.kv.code_bytes() + place * S.kv.scale_bytes();
        NO_UNROLL
        for (int i = lane(); i < QUARTER * COPIED; i += WARP)
          copy_async<4>(to + scale_at(quarter + i / COPIED, i % COPIED), from + i * 4,
                        sees(first + i / COPIED));
      }
    }

    // Where a row's codes lie, and then its bf16: a chunk of codes is a group, and becomes four chunks.
    static DEVICE int scale_at(int row, int group) {
      return chunk_at<CHUNKS>(row, S.kv.number_bytes() / 16 + group / 4) + group % 4 * 4;
    }
    // warp: its quarter, in place, by way of registers. A lane reads what it has copied itself.
    static DEVICE void expand(unsigned char* tile) {
      constexpr int GROUPS = DIM / U4_GROUP, ALL = QUARTER * GROUPS, COUNT = ceil_div(ALL, WARP);
      Words4 codes[COUNT];
      uint32_t scales[COUNT];
      auto each = [&](auto use) {
        UNROLL
        for (int j = 0; j < COUNT; ++j)
          if (int i = lane() + j * WARP; ALL % WARP == 0 || i < ALL)
            use(j, warp() * QUARTER + i / GROUPS, i % GROUPS);
      };
      each([&](int j, int row, int group) {
        codes[j] = load16(tile + chunk_at<CHUNKS>(row, group));
        scales[j] = *reinterpret_cast<const uint32_t*>(tile + scale_at(row, group));
      });
      sync_warp();  // all codes are read
      each([&](int j, int row, int group) {
        uint32_t words[4] = {codes[j].x, codes[j].y, codes[j].z, codes[j].w};
        for (int i = 0; i < 4; ++i)
          store16(tile + chunk_at<CHUNKS>(row, 4 * group + i), expanded(words[i], scales[j]));
      });
    }
    static DEVICE Words4 expanded(uint32_t codes, uint32_t scale_and_zero) {
      uint32_t scale = byte_perm(scale_and_zero, 0, 0x1010), zero = byte_perm(scale_and_zero, 0, 0x3232);
      uint32_t pairs[4];
      for (int i = 0; i < 4; ++i) {  // 128 + code, less 128; both exactly
        uint32_t code = fma_bf16(and_or(codes >> 4 * i, 0x000f000f, 0x43004300), 0x3f803f80, 0xc300c300);
        pairs[i] = fma_bf16(code, scale, zero);
      }
      return {pairs[0], pairs[1], pairs[2], pairs[3]};
    }
    DEVICE void begin_scales(float* to, const unsigned char* pool, int block, int split) const {
      int quarter = warp() * QUARTER, first = split * SPLIT + quarter;
      const unsigned char* from =
          kv_tile(S.kv, pool, block, kv_head) + S.kv.code_bytes() + first % S.kv.block_size * 4;
      if (lane() < QUARTER) copy_async<4>(to + quarter + lane(), from + lane() * 4, sees(first + lane()));
    }
  };

  // warp: q k of 16 rows and 8 N positions, `at` being the first one's place in the split. query(step): a
  // fragment A of q.
  template <int N, class Query>
  static DEVICE void multiply_keys(float (&s)[N][4], Query query, const unsigned char* keys, int at) {
    for (float (&tile)[4] : s)
      for (float& x : tile) x = 0.0f;
    int row = lane() / 16 * 8 + lane() % 8, key = key_of<CHUNKS>(row) ^ (lane() / 8 % 2);
    const unsigned char* from = keys + (at + row) * ROW_BYTES;
    UNROLL
    for (int chunk = 0; chunk < CHUNKS; chunk += 2) {
      constexpr int STEPS_OF_TWO = CODES ? 2 : 1;
      Words4 q[STEPS_OF_TWO];
      for (int i = 0; i < STEPS_OF_TWO; ++i) q[i] = query(chunk * STEPS_OF_TWO / 2 + i);
      UNROLL
      for (int n = 0; n < N; n += 2) {
        uint32_t r[4];
        load_matrices(r, from, 8 * n * ROW_BYTES + chunk_offset(chunk, key));
        for (int i = 0; i < 2; ++i)
          if constexpr (CODES)
            for (int half = 0; half < 2; ++half) {
              uint32_t codes = r[2 * i + half];
              mma_bf16(s[n + i], {q[half].x, q[half].y, q[half].z, q[half].w},
                       {widened<S.kv.type, 0, 1>(codes), widened<S.kv.type, 2, 3>(codes)});
            }
          else
            mma_bf16(s[n + i], {q[0].x, q[0].y, q[0].z, q[0].w}, {r[2 * i], r[2 * i + 1]});
      }
    }
  }

  // Scores of positions from `first` on, where `scales` are their keys'. whole: rows see all of them.
  template <int N>
  static DEVICE void adjust(float (&s)[N][4], const Rows& rows, int first, bool whole, const float* scales) {
    UNROLL
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < 4; ++i) {
        if constexpr (CODES) s[n][i] *= scales[8 * n + 2 * (lane() % 4) + i % 2];
        if constexpr (S.softcap > 0.0f) s[n][i] = S.softcap * tanh_of(s[n][i] * (S.scale / S.softcap));
      }
    if (whole) return;
    for (int row = 0; row < 2; ++row) {
      int newest = rows.position[row] - first - 2 * (lane() % 4);
      UNROLL
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 2; ++i)
          if (8 * n + i > newest || (S.window && 8 * n + i <= newest - S.window)) s[n][2 * row + i] = -INF;
    }
  }
  static constexpr float FACTOR = (S.softcap > 0.0f ? 1.0f : S.scale) * LOG2E;

  // The four lanes of a row together.
  template <class Operation>
  static DEVICE float over_columns(float x, Operation operation) {
    x = operation(x, shuffle_xor(x, 1));
    return operation(x, shuffle_xor(x, 2));
  }

  template <int N>
  static DEVICE void maxima(float (&row_max)[2], const float (&s)[N][4]) {
    for (int row = 0; row < 2; ++row) {
      row_max[row] = -INF;
      UNROLL
      for (int n = 0; n < N; ++n) row_max[row] = fmaxf(row_max[row], fmaxf(s[n][2 * row], s[n][2 * row + 1]));
      row_max[row] = over_columns(row_max[row], [](float a, float b) { return fmaxf(a, b); });
    }
  }

  // warp: fragments A of p from the scores of whole quarters, times the values' scales, if they have any.
  // sums: of p. row_max: the largest scores of the split.
  template <int N>
  static DEVICE void weigh(uint32_t (&p)[N / 2][4], float (&sums)[2], const float (&s)[N][4],
                           const float (&row_max)[2], const float* scales) {
    float from[2];
    for (int i = 0; i < 2; ++i) {
      from[i] = row_max[i] == -INF ? 0.0f : row_max[i] * FACTOR;
      sums[i] = 0.0f;
    }
    UNROLL
    for (int quarter = 0; quarter < N / 2; quarter += TILES / 2) {
      float sum[4] = {};
      UNROLL
      for (int step = quarter; step < quarter + TILES / 2; ++step) {
        float x[4][2];
        for (int i = 0; i < 4; ++i) {
          for (int j = 0; j < 2; ++j)
            x[i][j] = exp2_fast(fma(s[2 * step + i / 2][i % 2 * 2 + j], FACTOR, -from[i % 2]));
          p[step][i] = pack_bf16(x[i][0], x[i][1]);
        }
        mma_bf16(sum, p[step], {0x3f803f80, 0x3f803f80});  // ones
        if constexpr (CODES)
          for (int i = 0; i < 4; ++i) {
            const float* scale = scales + 16 * step + i / 2 * 8 + 2 * (lane() % 4);
            p[step][i] = pack_bf16(x[i][0] * scale[0], x[i][1] * scale[1]);
          }
      }
      for (int i = 0; i < 2; ++i) sums[i] += sum[2 * i];
    }
  }

  // warp: o[j] += p v of 16 rows, a split's positions, and 16 columns from 16 (group + j STRIDE) on.
  // weights(a, step): the fragment A of p at the positions from 16 step on.
  template <int STRIDE, int COUNT, class Weights>
  static DEVICE void multiply_values(float (&o)[COUNT][2][4], Weights weights, const unsigned char* values,
                                     int group) {
    int row = CODES ? lane() : lane() % 16, key = key_of<CHUNKS>(row) ^ (CODES ? 0 : lane() / 16);
    const unsigned char* from = values + row * ROW_BYTES;
    UNROLL
    for (int step = 0; step < SPLIT / 16; step += 2) {
      uint32_t p[2][4], r[4];
      weights(p[0], step);
      weights(p[1], step + 1);
      UNROLL
      for (int j = 0; j < COUNT; ++j) {
        int g = group + j * STRIDE;
        if (STRIDE > 1 && g >= COLUMN_GROUPS) continue;
        if constexpr (CODES) {
          load_matrices_transposed(r, from, 16 * step * ROW_BYTES + chunk_offset(g, key));
          for (int i = 0; i < 2; ++i) {
            uint32_t low = r[2 * i], high = r[2 * i + 1];
            mma_bf16(o[j][0], p[i], {widened<S.kv.type, 0, 2>(low), widened<S.kv.type, 0, 2>(high)});
            mma_bf16(o[j][1], p[i], {widened<S.kv.type, 1, 3>(low), widened<S.kv.type, 1, 3>(high)});
          }
        } else {
          for (int i = 0; i < 2; ++i) {
            load_matrices_transposed(r, from, 16 * (step + i) * ROW_BYTES + chunk_offset(2 * g, key));
            mma_bf16(o[j][0], p[i], {r[0], r[1]});
            mma_bf16(o[j][1], p[i], {r[2], r[3]});
          }
        }
      }
    }
  }

  // What a lane has of a row of o[j] are two pairs of columns: use(column, first, second).
  template <class Use>
  static DEVICE void for_pairs(const float (&o)[2][4], int group, int row, Use use) {
    for (int i = 0; i < 2; ++i)
      if constexpr (CODES)  // o[0] has even columns, o[1] odd ones
        use(16 * group + 4 * (lane() % 4) + 2 * i, o[0][2 * row + i], o[1][2 * row + i]);
      else
        use(16 * group + 8 * i + 2 * (lane() % 4), o[i][2 * row], o[i][2 * row + 1]);
  }

  using Out = stored_t<S.out_type>;

  // What a row's o is multiplied by when all its splits are folded: 1 / sum, where `row_max` is the largest s
  // * log2(e), and the head's sink is in the sum.
  static DEVICE float inverse_of(float sum, [[maybe_unused]] float row_max,
                                 [[maybe_unused]] const float* sinks, [[maybe_unused]] int kv_head,
                                 [[maybe_unused]] int row) {
    if constexpr (S.sinks) {
      Fold fold = fold_of(row_max, sinks[kv_head * GROUP + row % GROUP] * LOG2E);
      return divide(fold.keep, fma(sum, fold.keep, fold.take));
    } else {
      return divide(1.0f, sum);
    }
  }

  static DEVICE void write(Out* out, const Sequence& sequence, int kv_head, int row, int column, float first,
                           float second) {
    if (column >= S.kv.head_dim) return;
    int64_t token = sequence.first_token + row / GROUP;
    Out* to = out + token * S.out_stride + (kv_head * GROUP + row % GROUP) * S.kv.head_dim + column;
    if constexpr (S.out_type == Type::bf16) {
      *reinterpret_cast<uint32_t*>(to) = pack_bf16(first, second);
    } else {
      to[0] = first;
      to[1] = second;
    }
  }

  // block: zeros after the columns of the tokens whose last head is among rows first ... end - 1.
  static DEVICE void write_padding([[maybe_unused]] Out* out, [[maybe_unused]] const Sequence& sequence,
                                   [[maybe_unused]] int kv_head, [[maybe_unused]] int first,
                                   [[maybe_unused]] int end) {
    constexpr int COLUMNS = S.heads * S.kv.head_dim, PADDING = S.padded - COLUMNS;
    if constexpr (PADDING > 0) {
      if (kv_head != S.kv.heads - 1) return;
      for (int i = thread_index(); i < (end - first) * PADDING; i += ATTENTION_THREADS)
        if (int row = first + i / PADDING; row % GROUP == GROUP - 1)
          out[int64_t{sequence.first_token + row / GROUP} * S.out_stride + COLUMNS + i % PADDING] =
              from_float<Out>(0.0f);
    }
  }
};

}  // namespace enginewright
