// What stands around the products of experts (plugins/experts/route.py, sort_rows.py, combine_experts.py say
// the mathematics; gemm_experts.cuh has the products).
//
//   route            scores of a few tokens' experts, and which of them are chosen
//   place_rows       where each copy of a token is when copies are sorted by expert, and where experts start
//   sort_rows        copies of rows, where they are to be
//   combine_experts  sums of a token's experts
//
// Every sum has one order, whatever else is in the step. The times on paper: a block of route reads the
// router (E = 128, K = 2048: 512 KB out of L2) once for ROUTE_TOKENS tokens; place_rows is one block, whose
// warps each pass all copies twice for each of their experts. Unmeasured.
#pragma once

#include "rows.cuh"

namespace enginewright {

// Strides are elements from one row to the next.
struct Route {
  int rows;  // tokens: the position of their dim
  int columns, experts, top, groups, chosen_groups, group_best;
  bool softmax, normalized, bias, correction;
  int x_stride, chosen_stride, share_stride;
  float scale;

  constexpr int blocks() const { return (experts + 15) / 16; }
};

constexpr int ROUTE_THREADS = 512, ROUTE_WARPS = ROUTE_THREADS / WARP;
constexpr int ROUTE_TOKENS = 4;  // of a block

// Parts of K that different warps have.
template <Route S>
constexpr int ROUTE_SLICES = S.blocks() < ROUTE_WARPS ? ROUTE_WARPS / S.blocks() : 1;

// Of all lanes, the first index of the largest value; index -1: a lane has none.
DEVICE int first_of_largest(float value, int index) {
  UNROLL
  for (int mask = WARP / 2; mask > 0; mask /= 2) {
    float other = shuffle_xor(value, mask);
    int at = shuffle_xor(index, mask);
    bool better = at >= 0 && (index < 0 || other > value || (other == value && at < index));
    value = better ? other : value;
    index = better ? at : index;
  }
  return shuffle(index, 0);  // NaN may be larger for one lane than for another
}

// The first of the largest that are left, of all lanes; there is one.
DEVICE int largest_left(const float* values, const int32_t* left, int count) {
  float value = 0.0f;
  int index = -1;
  for (int i = lane(); i < count; i += WARP) {
    if (left[i] != 0 && (index < 0 || values[i] > value)) value = values[i], index = i;
  }
  return first_of_largest(value, index);
}

// A warp's token: scores become what they are made of; chosen and share are its rows. by, left: as many
// numbers as experts, and after them as many as groups, in shared memory.
template <Route S>
DEVICE void choose(float* scores, float* by, int32_t* left, const float* correction, int32_t* chosen,
                   float* share) {
  float largest = -INF;
  for (int e = lane(); e < S.experts; e += WARP) largest = fmaxf(largest, scores[e]);
  largest = warp_max(largest);
  float sum = 0.0f;
  for (int e = lane(); e < S.experts; e += WARP) {
    float score = S.softmax ? exp2_fast((scores[e] - largest) * LOG2E)
                            : divide(1.0f, 1.0f + exp2_fast(-scores[e] * LOG2E));
    scores[e] = score;
    sum += score;
  }
  sum = warp_sum(sum);
  for (int e = lane(); e < S.experts; e += WARP) {
    if constexpr (S.softmax) scores[e] = divide(scores[e], sum);
    by[e] = scores[e];
    if constexpr (S.correction) by[e] += correction[e];
    left[e] = 1;
  }
  sync_warp();
  if constexpr (S.groups > 1) {
    constexpr int OF_GROUP = S.experts / S.groups;
    float* value = by + S.experts;
    int32_t* open = left + S.experts;
    for (int group = lane(); group < S.groups; group += WARP) {
      value[group] = 0.0f;
      open[group] = 1;
      for (int i = 0; i < S.group_best; ++i) {
        int best = -1;
        for (int e = group * OF_GROUP; e < (group + 1) * OF_GROUP; ++e)
          if (left[e] != 0 && (best < 0 || by[e] > by[best])) best = e;
        left[best] = 0;
        value[group] += by[best];
      }
      for (int e = group * OF_GROUP; e < (group + 1) * OF_GROUP; ++e) left[e] = 0;
    }
    sync_warp();
    for (int i = 0; i < S.chosen_groups; ++i) {
      int best = largest_left(value, open, S.groups);
      sync_warp();  // everyone has looked
      if (lane() == 0) open[best] = 0;
      for (int e = best * OF_GROUP + lane(); e < (best + 1) * OF_GROUP; e += WARP) left[e] = 1;
      sync_warp();
    }
  }
  float total = 0.0f;
  for (int j = 0; j < S.top; ++j) {
    int best = largest_left(by, left, S.experts);
    total += scores[best];
    sync_warp();  // everyone has looked
    if (lane() == 0) {
      left[best] = 0;
      chosen[j] = best;
    }
    sync_warp();
  }
  if (lane() != 0) return;
  float divisor = S.normalized ? fmaxf(total, 1e-20f) : 1.0f;
  for (int j = 0; j < S.top; ++j) share[j] = divide(scores[chosen[j]], divisor) * S.scale;
}

template <Route S>
constexpr int route_shared_floats() {
  return ROUTE_TOKENS * (ROUTE_SLICES<S> * S.blocks() * 16 + 2 * (S.experts + S.groups));
}

// weight: R16 columns, [blocks of 16 experts][K][16]. A warp has a block of experts and a part of K; half of
// its lanes have every other k. Shared memory: sums [slices][tokens][experts], then what is chosen by, and
// what is left, [tokens][experts + groups] each.
template <Route S>
KERNEL(ROUTE_THREADS)
route(const Sizes* sizes, const float* x, const bf16* weight, const float* bias, const float* correction,
      int32_t* chosen, float* share) {
  constexpr int BLOCKS = S.blocks(), SLICES = ROUTE_SLICES<S>, WIDTH = BLOCKS * 16;
  constexpr int SLICE = 2 * ceil_div(S.columns, 2 * SLICES);  // of K
  float* sums = shared_memory<float>();
  int tokens = (*sizes)[S.rows], first = block_x() * ROUTE_TOKENS;
  int count = tokens - first < ROUTE_TOKENS ? tokens - first : ROUTE_TOKENS;
  if (count <= 0) return;
  for (int item = warp(); item < BLOCKS * SLICES; item += ROUTE_WARPS) {
    int block = item % BLOCKS, slice = item / BLOCKS;
    int end = (slice + 1) * SLICE < S.columns ? (slice + 1) * SLICE : S.columns;
    float sum[ROUTE_TOKENS] = {};
    for (int k = slice * SLICE + lane() / 16; k < end; k += 2) {
      float w = to_float(weight[(int64_t{block} * S.columns + k) * 16 + lane() % 16]);
      UNROLL
      for (int m = 0; m < ROUTE_TOKENS; ++m)
        if (m < count) sum[m] = fma(x[int64_t{first + m} * S.x_stride + k], w, sum[m]);
    }
    UNROLL
    for (int m = 0; m < ROUTE_TOKENS; ++m) {
      float both = sum[m] + shuffle_xor(sum[m], 16);
      if (lane() < 16) sums[(slice * ROUTE_TOKENS + m) * WIDTH + block * 16 + lane()] = both;
    }
  }
  sync_threads();
  int m = warp();
  if (m >= count) return;
  float* scores = sums + m * WIDTH;
  for (int e = lane(); e < S.experts; e += WARP) {
    float sum = scores[e];
    for (int slice = 1; slice < SLICES; ++slice) sum += scores[slice * ROUTE_TOKENS * WIDTH + e];
    if constexpr (S.bias) sum += bias[e];
    scores[e] = sum;
  }
  constexpr int EACH = S.experts + S.groups;
  float* by = sums + SLICES * ROUTE_TOKENS * WIDTH;
  auto* left = reinterpret_cast<int32_t*>(by + ROUTE_TOKENS * EACH);
  choose<S>(scores, by + m * EACH, left + m * EACH, correction, chosen + int64_t{first + m} * S.chosen_stride,
            share + int64_t{first + m} * S.share_stride);
}

struct PlaceRows {
  int rows;  // tokens: the position of their dim
  int experts, top, chosen_stride, places_stride;
};

constexpr int PLACE_THREADS = 1024;

// One block. Shared memory: a number for each expert.
template <PlaceRows S>
KERNEL(PLACE_THREADS)
place_rows(const Sizes* sizes, const int32_t* chosen, int32_t* places, int32_t* starts) {
  int32_t* first = shared_memory<int32_t>();
  int copies = (*sizes)[S.rows] * S.top;
  // put: of each of 32 copies whether it is the expert's, of all of them, in order.
  auto pass = [&](int expert, auto put) {
    for (int begin = 0; begin < copies; begin += WARP) {
      int copy = begin + lane();
      bool is_its = copy < copies && chosen[int64_t{copy / S.top} * S.chosen_stride + copy % S.top] == expert;
      put(copy, is_its, ballot(is_its));
    }
  };
  for (int e = warp(); e < S.experts; e += PLACE_THREADS / WARP) {
    int count = 0;
    pass(e, [&](int, bool, uint32_t of_expert) { count += popc(of_expert); });
    if (lane() == 0) first[e] = count;
  }
  sync_threads();
  if (warp() == 0) {
    int before = 0;
    for (int begin = 0; begin < S.experts; begin += WARP) {
      int e = begin + lane(), count = e < S.experts ? first[e] : 0, sum = count;
      UNROLL
      for (int distance = 1; distance < WARP; distance *= 2) {
        int below = shuffle_up(sum, distance);
        if (lane() >= distance) sum += below;
      }
      if (e < S.experts) first[e] = starts[e] = before + sum - count;
      before += shuffle(sum, WARP - 1);
    }
    if (lane() == 0) starts[S.experts] = before;
  }
  sync_threads();
  for (int e = warp(); e < S.experts; e += PLACE_THREADS / WARP) {
    int next = first[e];
    pass(e, [&](int copy, bool is_its, uint32_t of_expert) {
      uint32_t below = of_expert & ((1u << lane()) - 1);
      if (is_its) places[int64_t{copy / S.top} * S.places_stride + copy % S.top] = next + popc(below);
      next += popc(of_expert);
    });
  }
}

struct SortRows {
  int rows;  // tokens: the position of their dim
  Type type;
  int columns, padded, top, x_stride, places_stride, out_stride, group, scale_stride;
};

constexpr int SORT_THREADS = 256;

// A block a token. Shared memory: two floats for each warp.
template <SortRows S>
KERNEL(SORT_THREADS)
sort_rows(const Sizes* sizes, const float* x, const int32_t* places, stored_t<S.type>* out, float* scale) {
  int token = block_x();
  if (token >= (*sizes)[S.rows]) return;
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.out_stride, S.group, S.scale_stride};
  auto value = [&](int c) { return x[int64_t{token} * S.x_stride + c]; };
  for (int j = 0; j < S.top; ++j) {
    if (OUT.codes() && S.group == 0 && j > 0) sync_threads();  // nobody reads the last row's sums any more
    int place = places[int64_t{token} * S.places_stride + j];
    write_row<OUT, SORT_THREADS>(place, value, out, scale, shared_memory<float>());
  }
}

struct CombineExperts {
  int rows;  // tokens: the position of their dim
  int columns, top, y_stride, places_stride, share_stride, shared_stride, gate_stride, out_stride;
  bool shared, gate;
};

constexpr int COMBINE_THREADS = 256;

// A block a token.
template <CombineExperts S>
KERNEL(COMBINE_THREADS)
combine_experts(const Sizes* sizes, const float* y, const int32_t* places, const float* share,
                const float* shared, const float* gate, float* out) {
  int token = block_x();
  if (token >= (*sizes)[S.rows]) return;
  const int32_t* place = places + int64_t{token} * S.places_stride;
  const float* part = share + int64_t{token} * S.share_stride;
  float open = 1.0f;
  if constexpr (S.gate) open = divide(1.0f, 1.0f + exp2_fast(-gate[int64_t{token} * S.gate_stride] * LOG2E));
  for (int c = thread_index(); c < S.columns; c += COMBINE_THREADS) {
    float sum = 0.0f;
    for (int j = 0; j < S.top; ++j) sum = fma(part[j], y[int64_t{place[j]} * S.y_stride + c], sum);
    if constexpr (S.shared) sum = fma(open, shared[int64_t{token} * S.shared_stride + c], sum);
    out[int64_t{token} * S.out_stride + c] = sum;
  }
}

}  // namespace enginewright
