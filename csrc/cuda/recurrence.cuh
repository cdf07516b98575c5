// Recurrences over the tokens of a sequence, whose states are in slots: the depthwise causal convolution
// (plugins/recurrence/causal_conv.py), the gated delta rule and Mamba-2 (plugins/recurrence/gated_delta.py,
// selective_state.py). Any number of tokens, one after the other: what a step computes of a sequence does not
// depend on how its prompt was cut, nor on others.
#pragma once

#include "elementwise.cuh"

namespace enginewright {

constexpr int RECURRENCE_THREADS = 128;

// Strides are elements from one row to the next, or f32 from one slot to the next. padded: columns of out
// that are written, zeros after `columns`. taps: f32 [columns][width] in r16_columns (csrc/cpu/kernel.h).
// state: [width - 1][columns], the oldest first.
struct CausalConv {
  int columns, width, x_stride, before_stride, behind_stride, out_stride, padded;
  int64_t slot_stride;
  Type type;
  bool silu, bias, before, behind;
};

// A thread is a channel of a sequence.
template <CausalConv S>
KERNEL(RECURRENCE_THREADS)
causal_conv(const Sizes* sizes, const float* x, const float* taps, const float* bias, const float* before,
            const float* behind, float* state, const int32_t* query_start, const int32_t* slots,
            stored_t<S.type>* out) {
  using Number = stored_t<S.type>;
  int c = block_x() * RECURRENCE_THREADS + thread_index(), s = block_y();
  if (s >= sizes->sequences() || c >= S.padded) return;
  int begin = query_start[s], end = query_start[s + 1];
  if (c >= S.columns) {
    for (int t = begin; t < end; ++t) out[int64_t{t} * S.out_stride + c] = from_float<Number>(0.0f);
    return;
  }
  float* own = state + int64_t{slots[s]} * S.slot_stride + c;
  float seen[S.width], tap[S.width];  // inputs, the oldest first; and what they are multiplied with
  UNROLL
  for (int j = 0; j < S.width; ++j) {
    tap[j] = taps[(c / 16 * S.width + j) * 16 + c % 16];
    seen[j] = j == 0 ? 0.0f : own[(j - 1) * S.columns];
  }
  for (int t = begin; t < end; ++t) {
    UNROLL
    for (int j = 0; j + 1 < S.width; ++j) seen[j] = seen[j + 1];
    float u = x[int64_t{t} * S.x_stride + c];
    if constexpr (S.before) u *= before[int64_t{t} * S.before_stride + c];
    seen[S.width - 1] = u;
    float sum = 0.0f;
    if constexpr (S.bias) sum = bias[c];
    UNROLL
    for (int j = 0; j < S.width; ++j) sum = fma(tap[j], seen[j], sum);
    if constexpr (S.silu) sum = activated<Function::silu>(sum);
    if constexpr (S.behind) sum *= behind[int64_t{t} * S.behind_stride + c];
    out[int64_t{t} * S.out_stride + c] = from_float<Number>(sum);
  }
  UNROLL
  for (int j = 1; j < S.width; ++j) own[(j - 1) * S.columns] = seen[j];
}

// heads: of values; key_heads: of queries and keys. rows, columns: of a head's state, [heads][rows][columns].
// delta: the gated delta rule; otherwise Mamba-2, with `skip` in place of beta. by_row: each row of a state
// has a decay of its own. decodes: sequences with several tokens in the step are left to
// triton/recurrence.py.
struct LinearRecurrence {
  bool delta, by_row, decodes;
  int heads, key_heads, rows, columns;
  int query_stride, key_stride, value_stride, decay_stride, beta_stride, out_stride;
  int64_t slot_stride;
  float scale, epsilon, dt_min;

  // Lanes that share a column: each has at most 32 of its rows in registers, and as many of query and key.
  constexpr int lanes() const {
    int lanes = 1;
    while (rows > 32 * lanes) lanes *= 2;
    return lanes;
  }
  constexpr int block_columns() const { return RECURRENCE_THREADS / lanes(); }
};

// Of the lanes that share a column.
template <int LANES>
DEVICE float column_sum(float x) {
  UNROLL
  for (int mask = 1; mask < LANES; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// log(1 + e^x): where e^x is small, its series; where it is large, x.
DEVICE float softplus(float x) {
  float power = exp2_fast(x * LOG2E);
  return x > 20.0f ? x : power < 1e-4f ? fma(-0.5f * power, power, power) : log_of(1.0f + power);
}

// A block has columns of a head of a sequence. Grid: groups of columns, heads, sequences. Shared memory:
// query and key, two floats for each warp, and what rows keep where each has a decay.
template <LinearRecurrence S>
KERNEL(RECURRENCE_THREADS)
linear_recurrence(const Sizes* sizes, const float* query, const float* key, const float* value,
                  const float* decay, const float* beta, const float* log_a, const float* dt_bias,
                  const float* skip, float* state, const int32_t* query_start, const int32_t* slots,
                  float* out) {
  constexpr int THREADS = RECURRENCE_THREADS, LANES = S.lanes(), ROWS = ceil_div(S.rows, LANES);
  int s = block_z(), head = block_y();
  if (s >= sizes->sequences()) return;
  if (S.decodes && query_start[s + 1] - query_start[s] > 1) return;
  float *q = shared_memory<float>(), *k = q + S.rows, *partial = k + S.rows,
        *keeps = partial + 2 * THREADS / WARP;
  int column = block_x() * S.block_columns() + thread_index() / LANES, part = thread_index() % LANES;
  bool there = column < S.columns;
  float* own = state + int64_t{slots[s]} * S.slot_stride + int64_t{head} * S.rows * S.columns + column;
  float held[ROWS];  // rows part, part + LANES, ...
  UNROLL
  for (int i = 0; i < ROWS; ++i) {
    int row = i * LANES + part;
    held[i] = there && row < S.rows ? own[int64_t{row} * S.columns] : 0.0f;
  }
  int from = head / (S.heads / S.key_heads) * S.rows;
  float rate = exp2_fast(log_a[head] * LOG2E);
  for (int t = query_start[s]; t < query_start[s + 1]; ++t) {
    sync_threads();  // the last token's query and key have been read
    float squares[2] = {0.0f, 0.0f};
    for (int row = thread_index(); row < S.rows; row += THREADS) {
      q[row] = query[int64_t{t} * S.query_stride + from + row];
      k[row] = key[int64_t{t} * S.key_stride + from + row];
      squares[0] = fma(q[row], q[row], squares[0]);
      squares[1] = fma(k[row], k[row], squares[1]);
      if constexpr (S.by_row) {
        int own_row = head * S.rows + row;
        float dt = softplus(decay[int64_t{t} * S.decay_stride + own_row] + dt_bias[own_row]);
        keeps[row] = exp2_fast(-rate * dt * LOG2E);
      }
    }
    float of_query = 1.0f, of_key = 1.0f;
    if constexpr (S.delta) {
      float length = warp_sum(squares[0]), other = warp_sum(squares[1]);
      if (lane() == 0) partial[warp()] = length, partial[THREADS / WARP + warp()] = other;
      sync_threads();
      length = other = 0.0f;
      for (int i = 0; i < THREADS / WARP; ++i) {
        length += partial[i];
        other += partial[THREADS / WARP + i];
      }
      of_query = divide(S.scale, square_root(length + S.epsilon));
      of_key = divide(1.0f, square_root(other + S.epsilon));
    } else {
      sync_threads();
    }
    float dt = 0.0f, kept = 1.0f;  // of the head
    if constexpr (!S.by_row) {
      dt = softplus(decay[int64_t{t} * S.decay_stride + head] + dt_bias[head]);
      if constexpr (!S.delta) dt = dt < S.dt_min ? S.dt_min : dt;
      kept = exp2_fast(-rate * dt * LOG2E);
    }
    auto row_keeps = [&](int row) { return S.by_row ? keeps[row] : kept; };
    float given = there ? value[int64_t{t} * S.value_stride + head * S.columns + column] : 0.0f;
    float taken = given;
    if constexpr (S.delta) {
      float sum = 0.0f;
      UNROLL
      for (int i = 0; i < ROWS; ++i)
        if (int row = i * LANES + part; row < S.rows)
          sum = fma(S.by_row ? k[row] * keeps[row] : k[row], held[i], sum);
      float share = activated<Function::sigmoid>(beta[int64_t{t} * S.beta_stride + head]);
      taken = share * (given - kept * of_key * column_sum<LANES>(sum));
    } else {
      taken *= dt;
    }
    float sum = 0.0f;
    UNROLL
    for (int i = 0; i < ROWS; ++i)
      if (int row = i * LANES + part; row < S.rows) {
        held[i] = fma(of_key * k[row], taken, row_keeps(row) * held[i]);
        sum = fma(q[row], held[i], sum);
      }
    sum = of_query * column_sum<LANES>(sum);
    if constexpr (!S.delta) sum = fma(skip[head], given, sum);
    if (there && part == 0) out[int64_t{t} * S.out_stride + head * S.columns + column] = sum;
  }
  UNROLL
  for (int i = 0; i < ROWS; ++i)
    if (int row = i * LANES + part; there && row < S.rows) own[int64_t{row} * S.columns] = held[i];
}

// Norms of runs of columns with a gate (plugins/norm/gated_rms_norm.py). wide: there is a weight for each
// column.
struct GatedRmsNorm {
  int rows;  // of the matrix, in a step: the position of their dim
  int columns, run, x_stride, z_stride, y_stride, padded, group, scale_stride;
  Type type;
  bool gates_first, wide;
  float epsilon;
};

// A block a row. Shared memory: the row, and two floats for each warp.
template <GatedRmsNorm S>
KERNEL(RECURRENCE_THREADS)
gated_rms_norm(const Sizes* sizes, const float* x, const float* z, const float* weight, stored_t<S.type>* y,
               float* scale) {
  constexpr int THREADS = RECURRENCE_THREADS, WARPS = THREADS / WARP;
  int row = block_x();
  if (row >= (*sizes)[S.rows]) return;
  x += int64_t{row} * S.x_stride;
  z += int64_t{row} * S.z_stride;
  float* values = shared_memory<float>();  // [columns]
  for (int begin = warp() * S.run; begin < S.columns; begin += WARPS * S.run) {
    float squares = 0.0f;
    for (int c = begin + lane(); c < begin + S.run; c += WARP) {
      float value = S.gates_first ? x[c] * activated<Function::silu>(z[c]) : x[c];
      values[c] = value;
      squares = fma(value, value, squares);
    }
    float mean = divide(warp_sum(squares), static_cast<float>(S.run));
    float inverse = divide(1.0f, square_root(mean + S.epsilon));
    for (int c = begin + lane(); c < begin + S.run; c += WARP) {
      float value = values[c] * inverse * weight[S.wide ? c : c - begin];
      values[c] = S.gates_first ? value : value * activated<Function::silu>(z[c]);
    }
  }
  sync_threads();
  constexpr RowOut OUT{S.type, S.columns, S.padded, S.y_stride, S.group, S.scale_stride};
  write_row<OUT, THREADS>(row, [&](int c) { return values[c]; }, y, scale, values + S.columns);
}

}  // namespace enginewright
