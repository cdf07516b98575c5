// What a block finds out together about many numbers, whichever way their order falls: sums, the k-th
// largest, and where a running sum reaches a target. All sums are of integers, so they have no order.
//
// A source is an object with `size()`; `at(i)`, the float at an index; `each(f)`, which calls f(index, float)
// for every one, by all threads; and `run(begin, end, f)`, the same for indices in [begin, end), by a warp,
// where begin is a multiple of 4. All functions but those of one number are called by all threads together.
#pragma once

#include "device.cuh"

namespace enginewright {

constexpr int BINS = 2048;  // of a digit of 11 bits

// THREADS: a power of two.
template <int THREADS>
struct SelectMemory {
  static constexpr int WARPS = THREADS / WARP;
  uint64_t partial[WARPS], starts[WARPS];
  uint64_t left, here;
  uint32_t low[BINS], high[BINS];
  int32_t found, index;
};

// Unsigned integers in the order of floats; 0 and -0 are one.
DEVICE uint32_t key_of(float x) {
  uint32_t bits = bits_of_float(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
DEVICE float float_of_key(uint32_t key) {
  return float_of_bits(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

constexpr int32_t LAST = 0x7fffffff;

// The least of what a filter keeps: larger keys, and equal ones up to this index.
struct Floor {
  uint32_t key;
  int32_t index;
  DEVICE bool keeps(uint32_t other, int i) const { return other > key || (other == key && i <= index); }
};
constexpr Floor KEEP_ALL = {0, LAST};

// warp: 64 bits of another lane.
DEVICE uint64_t shuffle(uint64_t value, int from) {
  uint32_t low = shuffle(static_cast<uint32_t>(value), from);
  return static_cast<uint64_t>(shuffle(static_cast<uint32_t>(value >> 32), from)) << 32 | low;
}
DEVICE uint64_t shuffle_xor(uint64_t value, int mask) { return shuffle(value, lane() ^ mask); }

// warp: the sum of the values of this lane and those before it.
DEVICE uint64_t warp_sum_to(uint64_t value) {
  for (int distance = 1; distance < WARP; distance *= 2) {
    uint64_t other = shuffle(value, lane() - distance);
    if (lane() >= distance) value += other;
  }
  return value;
}
// warp: what `combine` makes of all values.
template <class Combine>
DEVICE uint64_t warp_combined(uint64_t value, Combine combine) {
  for (int mask = WARP / 2; mask > 0; mask /= 2) value = combine(value, shuffle_xor(value, mask));
  return value;
}
// What `combine` makes of all threads' values and 0.
template <int THREADS, class Combine>
DEVICE uint64_t combined(SelectMemory<THREADS>& m, uint64_t value, Combine combine) {
  value = warp_combined(value, combine);
  if (lane() == 0) m.partial[warp()] = value;
  sync_threads();
  value = warp_combined(lane() < THREADS / WARP ? m.partial[lane()] : 0, combine);
  sync_threads();  // nobody combines again before all have read
  return value;
}

struct Sum {
  DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Maximum {
  DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// The sum of the values of threads before this one.
template <int THREADS>
DEVICE uint64_t sum_before(SelectMemory<THREADS>& m, uint64_t value) {
  uint64_t sum = warp_sum_to(value);
  if (lane() == WARP - 1) m.starts[warp()] = sum;
  sync_threads();
  return sum - value + warp_combined(lane() < warp() ? m.starts[lane()] : 0, Sum());
}

// A key; what of the target is left when all larger keys are counted; and the amount of the key itself.
struct Selected {
  uint32_t key;
  uint64_t left, here;
};

// Amounts of keys, counted from the largest key on: where they reach target (1 ... their sum). visit(add)
// calls add(key, amount) for every one, three times, for a digit each.
template <int THREADS, class Visit>
DEVICE Selected select(SelectMemory<THREADS>& m, uint64_t target, Visit visit) {
  constexpr int PER = BINS / THREADS;
  static_assert(PER * THREADS == BINS);
  auto bin_sum = [&](int bin) { return static_cast<uint64_t>(m.high[bin]) << 32 | m.low[bin]; };
  Selected selected = {0, target, 0};
  uint32_t known = 0;  // bits of the key
  NO_UNROLL
  for (int level = 0; level < 3; ++level) {
    int shift = level == 0 ? 21 : level == 1 ? 10 : 0;
    NO_UNROLL
    for (int bin = thread_index(); bin < BINS; bin += THREADS) m.low[bin] = m.high[bin] = 0;
    sync_threads();
    visit([&](uint32_t key, uint64_t amount) {
      if (amount == 0 || ((key ^ selected.key) & known) != 0) return;
      int bin = static_cast<int>(key >> shift & (BINS - 1));
      uint32_t low = static_cast<uint32_t>(amount);
      uint32_t high = static_cast<uint32_t>(amount >> 32) + (atomic_add(&m.low[bin], low) > ~low);
      if (high) atomic_add(&m.high[bin], high);
    });
    sync_threads();
    int bin = BINS - 1 - thread_index() * PER;
    uint64_t mine = 0;
    for (int i = 0; i < PER; ++i) mine += bin_sum(bin - i);
    uint64_t before = sum_before(m, mine);
    if (before < selected.left && selected.left <= before + mine) {
      NO_UNROLL
      while (before + bin_sum(bin) < selected.left) before += bin_sum(bin--);
      m.found = bin;
      m.left = selected.left - before;
      m.here = bin_sum(bin);
    }
    sync_threads();
    known |= static_cast<uint32_t>(BINS - 1) << shift;
    selected = {selected.key | static_cast<uint32_t>(m.found) << shift, m.left, m.here};
  }
  return selected;
}

// The first index up to which amount(index, float) sums to target(sum of all), which is in 1 ... that sum.
template <int THREADS, class Source, class Amount, class Target>
DEVICE int locate(SelectMemory<THREADS>& m, Source source, Amount amount, Target target) {
  constexpr int WARPS = THREADS / WARP;
  int width = ceil_div(source.size(), 4 * WARPS) * 4, begin = warp() * width;
  uint64_t sum = 0;
  source.run(begin, begin + width < source.size() ? begin + width : source.size(),
             [&](int i, float x) { sum += amount(i, x); });
  sum = warp_combined(sum, Sum());
  if (lane() == 0) m.partial[warp()] = sum;
  sync_threads();
  uint64_t part = lane() < WARPS ? m.partial[lane()] : 0, to = warp_sum_to(part);
  uint64_t left = target(shuffle(to, WARP - 1));
  int w = first_bit(ballot(to >= left));
  left -= shuffle(to - part, w);
  // Within that warp's part: a run of each thread.
  int per = ceil_div(width, THREADS);
  int first = w * width + thread_index() * per, end = (w + 1) * width;
  if (end > source.size()) end = source.size();
  if (end > first + per) end = first + per;
  uint64_t mine = 0;
  NO_UNROLL
  for (int i = first; i < end; ++i) mine += amount(i, source.at(i));
  uint64_t before = sum_before(m, mine);
  if (before < left && left <= before + mine) {
    int i = first;
    NO_UNROLL
    while ((before += amount(i, source.at(i))) < left) ++i;
    m.index = i;
  }
  sync_threads();
  return m.index;
}

// The floor above which, itself included, amounts reach target (1 ... their sum). Equal keys have equal
// amounts, or none; `one` of a key is that amount.
template <int THREADS, class Source, class Key, class Amount, class One>
DEVICE Floor floor_of(SelectMemory<THREADS>& m, Source source, uint64_t target, Key key, Amount amount,
                      One one) {
  Selected last = select(
      m, target, [&](auto add) { source.each([&](int i, float x) { add(key(i, x), amount(i, x)); }); });
  if (last.left > last.here - one(last.key)) return {last.key, LAST};  // none of the equal ones is left out
  int index = locate(
      m, source, [&](int i, float x) { return key(i, x) == last.key ? amount(i, x) : 0; },
      [&](uint64_t) { return last.left; });
  return {last.key, index};
}

// list[0 ... count) in ascending order; there is room for the next power of two.
template <int THREADS>
COLD void sort(uint64_t* list, int count) {  // bitonic
  int size = 1;
  while (size < count) size *= 2;
  NO_UNROLL
  for (int i = count + thread_index(); i < size; i += THREADS) list[i] = ~uint64_t{0};
  sync_threads();
  NO_UNROLL
  for (int run = 2; run <= size; run *= 2) NO_UNROLL
  for (int apart = run / 2; apart > 0; apart /= 2) {
    NO_UNROLL
    for (int t = thread_index(); t < size / 2; t += THREADS) {
      int i = 2 * t - (t & (apart - 1));
      uint64_t a = list[i], b = list[i + apart];
      if ((a > b) == ((i & run) == 0)) {
        list[i] = b;
        list[i + apart] = a;
      }
    }
    sync_threads();
  }
}

}  // namespace enginewright
