// wgmma.cuh in plain C++, as PTX ISA 9.0 (9.7.15) has it: what we read there, and no GPU has confirmed.
//
// A product is computed at the wait for it, from B as it was when it began, and is an error if B, its A or
// its d have been touched meanwhile; d is NaN until then. B has to come from copies, each with fence_copies()
// by its thread and a barrier after it (other writes are not watched). Warps of a warpgroup have to begin
// the same products.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <vector>

#include "emulated.h"

namespace enginewright {
namespace emulator {

constexpr int IN_FLIGHT = 0xff;  // what the bytes of d are meanwhile
constexpr int STEP_BYTES = 32;   // of K, in a product

// B, as its descriptor says. It is read 16 bytes at a time: 32 of each column, or, transposed, all columns of
// each k.
struct MatrixB {
  uint64_t descriptor;
  bool transposed;
  int columns;

  int granules() const { return columns * STEP_BYTES / 16; }
  const unsigned char* granule(int index) const {
    auto decoded = [&](int bit) { return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4; };
    int mode = static_cast<int>(descriptor >> 62);
    require(mode == 1 || (mode == 2 && !transposed), "wgmma reads a matrix that is swizzled otherwise");
    require((descriptor >> 49 & 7) == 0, "wgmma reads a matrix with a base offset");
    uint32_t row_bytes = mode == 1 ? 128 : 64;
    int in_row = transposed ? columns / 8 : 2, row = index / in_row, at = index % in_row;
    uint32_t address = decoded(0) + row / 8 * decoded(32) + row % 8 * row_bytes + at % 8 * 16;
    if (transposed) address += at / 8 * decoded(16);
    return shared_bytes() + (address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4);
  }
  // Where number `k` of a column is in what was read.
  int at(int column, int k, int bytes) const {
    return transposed ? (k * columns + column) * bytes : column * STEP_BYTES + k * bytes;
  }
};

// What a warp has begun. Its lanes take it in turn, from the same place in their own order.
struct WarpProduct {
  MatrixB matrix;
  const char* what;
  bool add;
  uint32_t a[32][4];
  std::vector<unsigned char> b;  // its granules
  bool checked = false;          // at its end, by the first lane that waits
};

struct LaneProduct {
  std::shared_ptr<WarpProduct> of_warp;
  const uint32_t* a;
  void* d;
  void (*compute)(const WarpProduct&, uint32_t* sums);
};

// The products of a block: those that warps have begun, by their place in the warp's order.
struct BlockProducts : Attached {
  std::map<int, std::vector<std::shared_ptr<WarpProduct>>> of_warps;
};

struct ThreadProducts : Attached {
  std::deque<std::vector<LaneProduct>> groups{1};  // the last one is still open
  std::map<void*, std::vector<uint32_t>> sums;     // of d in flight, by its address
  std::size_t begun = 0;
  bool fenced = false;

  const char* at_end() const override {
    return sums.empty() ? nullptr : "a thread ends without having waited for wgmma";
  }
};

template <class T>
T& attached(std::unique_ptr<Attached>& place) {
  if (!place) place.reset(new T);
  return static_cast<T&>(*place);
}

// Adds E4M3 products as tensor cores do by https://arxiv.org/abs/2412.19437, 3.3.2: each term is cut to the
// 14 bits below the exponent of the largest one.
template <std::size_t COUNT>
double cut_sum(const std::array<double, COUNT>& terms) {
  auto smaller = [](double a, double b) { return std::abs(a) < std::abs(b); };
  double largest = *std::max_element(terms.begin(), terms.end(), smaller);
  int exponent;
  std::frexp(largest, &exponent);
  double unit = std::ldexp(1.0, exponent - 14);
  auto cut = [unit](double term) { return std::trunc(term / unit) * unit; };
  return std::transform_reduce(terms.begin(), terms.end(), 0.0, std::plus(), cut);
}

// Σ a b of a lane's elements of d: number() of each BYTES.
template <int TILES, int BYTES, class Sum, double (*NUMBER)(uint32_t)>
void compute_product(const WarpProduct& product, uint32_t* sums) {
  constexpr int IN_WORD = 4 / BYTES;
  int g = here.thread % 32 / 4, t = here.thread % 4;
  double a[2][STEP_BYTES / BYTES];
  for (int row = 0; row < 2; ++row)
    for (int i = 0; i < STEP_BYTES / BYTES; ++i)
      a[row][i] = NUMBER(product.a[g * 4 + i / IN_WORD % 4][row + i / IN_WORD / 4 * 2] >>
                         (8 * BYTES * (i % IN_WORD)));
  for (int column = 0; column < 2 * TILES; ++column) {
    double b[STEP_BYTES / BYTES];
    for (int i = 0; i < STEP_BYTES / BYTES; ++i) {
      uint32_t bits = 0;
      int of_b = column / 2 * 8 + 2 * t + column % 2;
      std::memcpy(&bits, &product.b[product.matrix.at(of_b, i, BYTES)], BYTES);
      b[i] = NUMBER(bits);
    }
    for (int row = 0; row < 2; ++row) {
      uint32_t& to = sums[column / 2 * 4 + row * 2 + column % 2];
      std::array<double, STEP_BYTES / BYTES + 1> terms;
      for (int i = 0; i < STEP_BYTES / BYTES; ++i) terms[i] = a[row][i] * b[i];
      terms.back() = product.add ? static_cast<double>(__builtin_bit_cast(Sum, to)) : 0;
      double sum = NUMBER == e4m3_number ? cut_sum(terms) : std::reduce(terms.begin(), terms.end());
      to = __builtin_bit_cast(uint32_t, static_cast<Sum>(sum));
    }
  }
}

struct WgmmaOperands {
  uint32_t a[4];
  uint64_t b;
  bool add;
};

// What lanes of a warp begin together: the first of them makes it.
inline std::shared_ptr<WarpProduct> begun_by_warp(const char* what, const Lanes<WgmmaOperands>& lanes,
                                                  std::size_t index, bool transposed, int columns) {
  auto& of_warps = attached<BlockProducts>(attached_to_block()).of_warps;
  int warp = here.thread / 32;
  auto& mine = of_warps[warp];
  if (index < mine.size()) return mine[index];
  WgmmaOperands first = lanes[0];
  mine.emplace_back(new WarpProduct{{first.b, transposed, columns}, what, first.add, {}, {}});
  WarpProduct& product = *mine.back();
  for (int lane = 0; lane < 32; ++lane) {
    WgmmaOperands operands = lanes[lane];
    require(operands.b == first.b && operands.add == first.add, "lanes of a warp begin different wgmma");
    std::memcpy(product.a[lane], operands.a, sizeof operands.a);
  }
  for (int i = 0; i < product.matrix.granules(); ++i) {
    const unsigned char* from = product.matrix.granule(i);
    visible_to_wgmma(from);
    product.b.insert(product.b.end(), from, from + 16);
  }
  for (int other = warp / 4 * 4; other < warp / 4 * 4 + 4; ++other)
    if (index < of_warps[other].size()) {
      const WarpProduct& its = *of_warps[other][index];
      require(its.matrix.descriptor == first.b && !std::strcmp(its.what, what) && its.add == first.add,
              "warps of a warpgroup begin different wgmma");
    }
  return mine.back();
}

template <int TILES, int BYTES, class Sum, double (*NUMBER)(uint32_t)>
void begin_wgmma(const char* what, Sum (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add,
                 bool transposed = false) {
  auto& mine = attached<ThreadProducts>(attached_to_thread());
  require(mine.fenced, "wgmma begins without wgmma_fence since the group before");
  Lanes<WgmmaOperands> lanes(what, {{a[0], a[1], a[2], a[3]}, b, add});
  auto product = begun_by_warp(what, lanes, mine.begun++, transposed, TILES * 8);
  auto [place, first] = mine.sums.try_emplace(&d, TILES * 4);
  require(place->second.size() == TILES * 4, "wgmma of two shapes add to the same registers");
  if (first) {
    std::memcpy(place->second.data(), &d, sizeof d);
    std::memset(&d, IN_FLIGHT, sizeof d);
  }
  mine.groups.back().push_back({product, a, &d, compute_product<TILES, BYTES, Sum, NUMBER>});
}

inline void check_and_compute(LaneProduct& product, std::vector<uint32_t>& sums) {
  WarpProduct& of_warp = *product.of_warp;
  require(std::equal(product.a, product.a + 4, of_warp.a[here.thread % 32]),
          "A was written while wgmma read it");
  if (!of_warp.checked)
    for (int i = 0; i < of_warp.matrix.granules(); ++i)
      require(!std::memcmp(&of_warp.b[16 * i], of_warp.matrix.granule(i), 16),
              "B was written while wgmma read it");
  of_warp.checked = true;
  auto* d = static_cast<const unsigned char*>(product.d);
  require(std::all_of(d, d + 4 * sums.size(), [](int byte) { return byte == IN_FLIGHT; }),
          "d was written while wgmma added to it");
  product.compute(of_warp, sums.data());
}

inline void wait_for_wgmma(int pending, Site site) {
  if (left_out(site)) return;
  auto& mine = attached<ThreadProducts>(attached_to_thread());
  exchange("wgmma_wait", nullptr, 0);
  auto done = [&](const void* d) {
    for (const auto& group : mine.groups)
      for (const LaneProduct& product : group)
        if (product.d == d) return false;
    return true;
  };
  while (static_cast<int>(mine.groups.size()) - 1 > pending) {
    std::vector<LaneProduct> group = std::move(mine.groups.front());
    mine.groups.pop_front();
    for (LaneProduct& product : group) check_and_compute(product, mine.sums.at(product.d));
    for (LaneProduct& product : group) {
      auto place = mine.sums.find(product.d);
      if (place == mine.sums.end() || !done(product.d)) continue;
      std::memcpy(product.d, place->second.data(), 4 * place->second.size());
      mine.sums.erase(place);
    }
  }
}

}  // namespace emulator

DEVICE void fence_copies(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::fence_landed({file, line});
}
DEVICE void wgmma_fence(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  if (emulator::left_out({file, line})) return;
  emulator::exchange("wgmma_fence", nullptr, 0);
  emulator::attached<emulator::ThreadProducts>(emulator::attached_to_thread()).fenced = true;
}
DEVICE void wgmma_commit() {
  auto& mine = emulator::attached<emulator::ThreadProducts>(emulator::attached_to_thread());
  emulator::exchange("wgmma_commit", nullptr, 0);
  mine.groups.emplace_back();
  mine.fenced = false;
}
template <int PENDING>
DEVICE void wgmma_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emulator::wait_for_wgmma(PENDING, {file, line});
}
template <class T, int COUNT>
DEVICE void hold(T (&)[COUNT][4]) {}

DEVICE uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - emulator::shared_bytes());
}

template <int TILES>
DEVICE void wgmma_bf16(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::begin_wgmma<TILES, 2, float, emulator::bf16_number>("wgmma_bf16", d, a, b, add);
}
template <int TILES>
DEVICE void wgmma_bf16_transposed(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::begin_wgmma<TILES, 2, float, emulator::bf16_number>("wgmma_bf16_transposed", d, a, b, add, true);
}
template <int TILES>
DEVICE void wgmma_int8(int32_t (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::begin_wgmma<TILES, 1, int32_t, emulator::int8_number>("wgmma_int8", d, a, b, add);
}
template <int TILES>
DEVICE void wgmma_e4m3(float (&d)[TILES][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  emulator::begin_wgmma<TILES, 1, float, emulator::e4m3_number>("wgmma_e4m3", d, a, b, add);
}

}  // namespace enginewright
