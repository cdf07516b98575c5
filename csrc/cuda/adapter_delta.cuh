// What adapters add to the products of linear layers, delta = bias + B (A x), in two kernels: adapter_shrink
// has the sums over parts of K of A x, and adapter_expand adds these up and multiplies them with B.
//
// The runtime sorts a step's rows by their slots and cuts them into tiles of up to tile_rows rows of one
// slot, for which a factor is read once: tiles, [1 + 3 · tiles], has their number, and of each its slot, its
// first entry in `rows` and their number. Grids have as many blocks as there can be tiles. Products are FMAs
// in fp32 on what all types of x and factors are exactly, since few ranks take less time than their factors
// take to be read: 16 ranks of 4,096 columns are 128 KB of bf16, and 65,536 FMAs a row.
//
// Each sum has one order, whatever the step: 64 chains of FMAs over a split of K, lanes and then warps,
// splits in ascending order; then scales of rows, and one chain over the ranks. So a row's bits depend on
// nothing but the row and its adapter.
#pragma once

#include "adapters.cuh"
#include "rows.cuh"

namespace enginewright {

struct AdapterDelta {
  Type type;          // of x, in adapter_shrink
  int tile_rows;      // rows of a tile, at most
  int split_columns;  // columns of K of a block of adapter_shrink
  int outputs;        // rows of B of a block of adapter_expand

  constexpr int expand_threads() const { return outputs / 4; }
};

constexpr int SHRINK_THREADS = 128,
              SHRINK_LANES = SHRINK_THREADS / 2;  // two threads have the 16 ranks of a k

// Words in one load.
template <int COUNT>
DEVICE void load_words(uint32_t* words, const uint8_t* from) {
  if constexpr (COUNT == 4) {
    const Words4 found = load16(from);
    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
  } else if constexpr (COUNT == 2) {
    const Words2 found = *reinterpret_cast<const Words2*>(from);
    words[0] = found.x, words[1] = found.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(from);
  }
}

// Four or eight numbers of a factor in r16_columns, from number `index` on, a multiple of that.
template <int COUNT>
DEVICE void load_factor(float (&numbers)[COUNT], const uint8_t* data, int64_t index, bool codes) {
  uint32_t words[COUNT / 2];
  if (codes) {
    load_words<COUNT / 4>(words, data + index);
    UNROLL
    for (int i = 0; i < COUNT; ++i)
      numbers[i] = static_cast<float>(static_cast<int8_t>(words[i / 4] >> (8 * (i % 4))));
  } else {
    load_words<COUNT / 2>(words, data + index * 2);
    UNROLL
    for (int i = 0; i < COUNT; i += 2)
      numbers[i] = low_bf16(words[i / 2]), numbers[i + 1] = high_bf16(words[i / 2]);
  }
}

// A tile of rows of one slot.
struct AdapterTile {
  int slot, first, count;

  static DEVICE AdapterTile of_block(const int32_t* tiles) {
    const int32_t* own = tiles + 1 + 3 * block_x();
    return {own[0], own[1], own[2]};
  }
};

DEVICE float number_of(bf16 x) { return to_float(x); }
DEVICE float number_of(int8_t code) { return static_cast<float>(code); }
DEVICE float number_of(e4m3 code) {
  return low_bf16(bf16_of_fp8<e4m3>(static_cast<uint32_t>(code.bits) << 8));
}

// Sums over a split of K. Grid: tiles in x, splits in y, and blocks in z that share the ranks, 16 at a time.
// Shared memory: x of the tile, [tile_rows][split_columns], and the sums of warps, [warps][tile_rows][16].
template <AdapterDelta S>
KERNEL(SHRINK_THREADS)
adapter_shrink(const Sizes*, const stored_t<S.type>* x, const float* x_scale, const uint8_t* at,
               const int32_t* rows, const int32_t* tiles, float* shrunk) {
  constexpr bool CODES = S.type != Type::bf16;
  static_assert(SHRINK_THREADS == S.tile_rows * 16 && S.split_columns % SHRINK_LANES == 0);
  if (block_x() >= tiles[0]) return;
  const Adapters adapters{at};
  const SiteCall call = adapters.call();
  const AdapterTile tile = AdapterTile::of_block(tiles);
  const SiteChange change = adapters.change(tile.slot);
  if (block_z() * 16 >= change.rank) return;
  float *numbers = shared_memory<float>(), *sums_of_warps = numbers + S.tile_rows * S.split_columns;

  const int begin = block_y() * S.split_columns;
  const int columns = call.columns - begin < S.split_columns ? call.columns - begin : S.split_columns;
  for (int i = thread_index(); i < S.tile_rows * S.split_columns; i += SHRINK_THREADS) {
    const int row = i / S.split_columns, k = i % S.split_columns;
    float number = 0.0f;
    if (row < tile.count && k < columns) {
      const int64_t from = rows[tile.first + row];
      number = number_of(x[from * call.x_stride + begin + k]);
      if constexpr (CODES) {
        const int group = call.group == 0 ? 0 : (begin + k) / call.group;
        number *= x_scale[from * call.x_scale_stride + group];
      }
    }
    numbers[i] = number;
  }
  sync_threads();

  const uint8_t* a = adapters.place<uint8_t>(change.a);
  const int half = thread_index() % 2 * 8;
  for (int block = block_z(); block * 16 < change.rank; block += grid_z()) {
    float sums[S.tile_rows][8] = {};
    UNROLL_BY(2)
    for (int k = thread_index() / 2; k < columns; k += SHRINK_LANES) {
      float factors[8];
      load_factor(factors, a, (int64_t{block} * call.columns + begin + k) * 16 + half, change.a_scale != 0);
      UNROLL
      for (int row = 0; row < S.tile_rows; ++row) {
        const float number = numbers[row * S.split_columns + k];
        UNROLL
        for (int i = 0; i < 8; ++i) sums[row][i] = fma(number, factors[i], sums[row][i]);
      }
    }
    UNROLL
    for (int row = 0; row < S.tile_rows; ++row) {
      UNROLL
      for (int i = 0; i < 8; ++i) {
        float sum = sums[row][i];
        for (int mask = WARP / 2; mask > 1; mask /= 2) sum += shuffle_xor(sum, mask);
        if (lane() < 2) sums_of_warps[(warp() * S.tile_rows + row) * 16 + half + i] = sum;
      }
    }
    sync_threads();
    const int row = thread_index() / 16, rank = thread_index() % 16;
    float sum = 0.0f;
    for (int i = 0; i < SHRINK_THREADS / WARP; ++i) sum += sums_of_warps[(i * S.tile_rows + row) * 16 + rank];
    if (row < tile.count)
      shrunk[int64_t{rows[tile.first + row]} * call.shrunk_stride + block_y() * call.max_rank + block * 16 +
             rank] = sum;
    sync_threads();  // the sums are read, and may be overwritten
  }
}

// delta of `outputs` rows of a piece, from its row `first` on.
template <AdapterDelta S>
DEVICE void expand_piece(const Adapters& adapters, const SiteChange& change, const AdapterPiece& piece,
                         const AdapterTile& tile, const int32_t* rows, int first, const float* shrunk,
                         float* delta) {
  const SiteCall call = adapters.call();
  float* numbers = shared_memory<float>();  // A x, [tile_rows][rank]
  const int splits = ceil_div(call.columns, S.split_columns);
  for (int i = thread_index(); i < S.tile_rows * piece.rank; i += S.expand_threads()) {
    const int row = i / piece.rank, rank = piece.first_rank + i % piece.rank;
    float sum = 0.0f;
    if (row < tile.count) {
      const float* parts = shrunk + int64_t{rows[tile.first + row]} * call.shrunk_stride + rank;
      for (int split = 0; split < splits; ++split) sum += parts[split * call.max_rank];
      if (change.a_scale != 0) sum *= adapters.place<float>(change.a_scale)[rank];
    }
    numbers[i] = sum;
  }
  sync_threads();

  const int own = first + thread_index() * 4;
  if (own < piece.count) {
    const uint8_t* b = adapters.place<uint8_t>(piece.b);
    float sums[S.tile_rows][4] = {};
    UNROLL_BY(2)
    for (int rank = 0; rank < piece.rank; ++rank) {
      float factors[4];
      load_factor(factors, b, (int64_t{own / 16} * piece.rank + rank) * 16 + own % 16, piece.b_scale != 0);
      UNROLL
      for (int row = 0; row < S.tile_rows; ++row) {
        UNROLL
        for (int i = 0; i < 4; ++i)
          sums[row][i] = fma(numbers[row * piece.rank + rank], factors[i], sums[row][i]);
      }
    }
    const bool whole = piece.begin % 4 == 0 && own + 4 <= piece.count;
    float scales[4], biases[4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int n = own + i < piece.count ? own + i : own;
      scales[i] = piece.b_scale != 0 ? adapters.place<float>(piece.b_scale)[n] : 1.0f;
      biases[i] = change.bias != 0 ? adapters.place<float>(change.bias)[piece.begin + n] : 0.0f;
    }
    UNROLL
    for (int row = 0; row < S.tile_rows; ++row) {
      if (row >= tile.count) break;
      float* to = delta + int64_t{rows[tile.first + row]} * call.delta_stride + piece.begin + own;
      float sum[4];
      UNROLL
      for (int i = 0; i < 4; ++i) sum[i] = sums[row][i] * scales[i] + biases[i];
      if (whole) {
        store16(to,
                {bits_of_float(sum[0]), bits_of_float(sum[1]), bits_of_float(sum[2]), bits_of_float(sum[3])});
      } else {
        UNROLL
        for (int i = 0; i < 4; ++i)
          if (own + i < piece.count) to[i] = sum[i];
      }
    }
  }
  sync_threads();  // A x is read, and may be overwritten
}

// Grid: tiles in x, and blocks in y that share the rows of pieces, `outputs` at a time. Shared memory:
// [tile_rows][largest rank of a piece] floats.
template <AdapterDelta S>
KERNEL_OCCUPANCY(S.expand_threads(), 1)
adapter_expand(const Sizes*, const uint8_t* at, const int32_t* rows, const int32_t* tiles,
               const float* shrunk, float* delta) {
  if (block_x() >= tiles[0]) return;
  const Adapters adapters{at};
  const AdapterTile tile = AdapterTile::of_block(tiles);
  const SiteChange change = adapters.change(tile.slot);
  const AdapterPiece* pieces = adapters.place<AdapterPiece>(change.pieces);
  int part = block_y();  // of the piece, or of those after it
  for (int i = 0; i < change.num_pieces; ++i) {
    const int parts = ceil_div(pieces[i].count, S.outputs);
    for (; part < parts; part += grid_y())
      expand_piece<S>(adapters, change, pieces[i], tile, rows, part * S.outputs, shrunk, delta);
    part -= parts;
  }
}

}  // namespace enginewright
