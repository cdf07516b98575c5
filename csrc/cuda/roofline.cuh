// Reads memory and does nothing else: the rate that other kernels are measured against (benchmarks/gpu).
#pragma once

#include "device.cuh"

namespace enginewright {

struct ReadRows {
  int lines;  // of 16 bytes, in a row
};

constexpr int READ_THREADS = 256;
constexpr int READ_LOADS = 8;  // in flight, a thread

// x: [tokens, lines · 16 bytes]. sums: [grid · READ_THREADS], of the words that a thread has read.
template <ReadRows S>
KERNEL(READ_THREADS)
read_rows(const Sizes* sizes, const uint8_t* x, uint32_t* sums) {
  int64_t lines = int64_t{sizes->tokens()} * S.lines, stride = int64_t{grid_x()} * READ_THREADS;
  int first = block_x() * READ_THREADS + thread_index();
  int64_t at = first;
  uint32_t sum = 0;
  auto add = [&](Words4 words) { sum += words.x + words.y + words.z + words.w; };
  for (; at + (READ_LOADS - 1) * stride < lines; at += READ_LOADS * stride) {
    Words4 words[READ_LOADS];
    UNROLL
    for (int i = 0; i < READ_LOADS; ++i) words[i] = load_once(x + (at + i * stride) * 16);
    UNROLL
    for (int i = 0; i < READ_LOADS; ++i) add(words[i]);
  }
  for (; at < lines; at += stride) add(load_once(x + at * 16));
  sums[first] = sum;
}

}  // namespace enginewright
