// Splits of a sequence's positions, each with a result of its own, and how these become one: what all kernels
// of attention have in common. Maxima are of s * log2(e).
#pragma once

#include "device.cuh"

namespace enginewright {

// What a total and the next split's result are multiplied by when they are added, and the maximum of both.
struct Fold {
  float keep, take, maximum;
};
DEVICE Fold fold_of(float total, float next) {
  float maximum = fmaxf(total, next), from = maximum == -INF ? 0.0f : maximum;
  return {exp2_fast(total - from), exp2_fast(next - from), maximum};
}
DEVICE float folded(float total, float next, const Fold& fold) {
  return fma(total, fold.keep, next * fold.take);
}

// Results of splits for some rows, apart from each other: [COLUMNS] of each row, then their maxima, then
// their sums.
template <int ROWS, int COLUMNS>
struct Partial {
  static constexpr int FLOATS = ROWS * (COLUMNS + 2);
  float *o, *maxima, *sums;
  explicit DEVICE Partial(float* at) : o(at), maxima(o + ROWS * COLUMNS), sums(maxima + ROWS) {}

  // Four columns of a row, of `count` splits in ascending order, the next one's `stride` floats after this.
  DEVICE void fold(float (&to)[4], float& row_max, float& sum, int64_t stride, int count, int row,
                   int column) const {
    for (float& x : to) x = 0.0f;
    row_max = -INF;
    sum = 0.0f;
    UNROLL_BY(4)  // results that are read at once
    for (int j = 0; j < count; ++j) {
      Words4 words = load16(o + j * stride + row * COLUMNS + column);
      Fold fold = fold_of(row_max, maxima[j * stride + row]);
      row_max = fold.maximum;
      sum = folded(sum, sums[j * stride + row], fold);
      uint32_t bits[4] = {words.x, words.y, words.z, words.w};
      for (int c = 0; c < 4; ++c) to[c] = folded(to[c], float_of_bits(bits[c]), fold);
    }
  }
};

// warp: the sum of count(i) for i below `end`.
template <class Count>
DEVICE int sum_below(int end, Count count) {
  int sum = 0;
  for (int i = lane(); i < end; i += WARP) sum += count(i);
  for (int mask = WARP / 2; mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);
  return sum;
}

// warp: of sequences with splits_of(i) splits, the fewest splits that one is not taken apart for, if there is
// room for so many results.
template <class Splits>
DEVICE int bound_of(int room, int sequences, Splits splits_of) {
  for (int bound = 1;; bound *= 2) {
    auto apart = [&](int i) { return splits_of(i) > bound ? splits_of(i) : 0; };
    if (sum_below(sequences, apart) <= room) return bound;
  }
}

}  // namespace enginewright
