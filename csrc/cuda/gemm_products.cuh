// Products of a chunk of weights with a chunk of x: what the words of each format become in registers.
#pragma once

#include "gemm.cuh"

namespace enginewright {

constexpr uint32_t BF16_ONES = 0x3f803f80u, BF16_NONE = 0x80008000u;  // two of 1, of -0

// Two bytes of a word, each in the lower half of 16 bits (or in the upper one).
DEVICE uint32_t low_bytes(uint32_t word, int pair) { return byte_perm(word, 0, pair ? 0x4342 : 0x4140); }
DEVICE uint32_t high_bytes(uint32_t word, int pair) { return byte_perm(word, 0, pair ? 0x3424 : 0x1404); }

// Two int8: 7 bits below those of 128, minus 128, or 256 where the sign is set. All exact.
DEVICE uint32_t bf16_of_int8(uint32_t bytes) {
  uint32_t size = and_or(bytes, 0x007f007fu, 0x43004300u), minus = and_or(bytes, 0x00800080u, 0xc300c300u);
  return fma_bf16(size, BF16_ONES, minus);
}
// Two codes of 4 bits, in the lowest bits of each half, minus their zero: 128 + code is exact. minus: two of
// -(128 + zero).
DEVICE uint32_t bf16_of_u4(uint32_t codes, uint32_t minus) {
  return fma_bf16(and_or(codes, 0x000f000fu, 0x43004300u), BF16_ONES, minus);
}
// Two E2M1 in the lower (or, step 1, the upper) 4 bits of bytes, doubled as in the plugin. The product is two
// shifts at once: sign, and exponent with fraction, at their places mean 2^-127 of that number.
DEVICE uint32_t bf16_of_e2m1(uint32_t bytes, int step) {
  uint32_t bits = (bytes & (step ? 0x00f000f0u : 0x000f000fu)) * (step ? 0x0104u : 0x1040u) & 0x81c081c0u;
  return fma_bf16(bits, 0x7f007f00u, BF16_NONE);
}

// Two numbers of a weight, out of a word that holds them: bytes 2 · pair and 2 · pair + 1, the lower or the
// upper 4 bits of each; as they are where they are bf16, or 8 bits that are not expanded. zeros: of the
// unit's four rows, a byte each.
template <Gemm S>
DEVICE uint32_t numbers_of(uint32_t word, int pair, int upper, uint32_t zeros, int row) {
  if constexpr (S.format == Format::w8a16) return bf16_of_int8(low_bytes(word, pair));
  if constexpr (S.format == Format::fp8a16) return bf16_of_fp8<e4m3>(high_bytes(word, pair));
  if constexpr (S.format == Format::w4a16) {
    uint32_t minus = byte_perm(zeros, 0xc3, 0x4040 | row | row << 8);
    return bf16_of_u4(low_bytes(word, pair) >> (4 * upper), minus);
  }
  if constexpr (S.format == Format::mxfp4a16) return bf16_of_e2m1(low_bytes(word, pair), upper);
  return word;
}

// Of the four rows that a load has.
DEVICE uint32_t word_of(const Words4& w, int row) {
  return row == 0 ? w.x : row == 1 ? w.y : row == 2 ? w.z : w.w;
}

// A of two MMA steps for a unit, from a lane's loads of them.
template <Gemm S>
DEVICE void weight_fragments(uint32_t (&a)[2][2][4], const Words4 (&loads)[Shape<S>::PAIR_LOADS],
                             uint32_t zeros) {
  constexpr int LOADS = Shape<S>::PAIR_LOADS;
  UNROLL
  for (int row = 0; row < 4; ++row) {  // of tile row / 2, its fragment's row g, or g + 8
    UNROLL
    for (int step = 0; step < 2; ++step) {
      UNROLL
      for (int half = 0; half < 2; ++half) {
        int load = LOADS == 4 ? 2 * step + half : LOADS == 2 ? step : 0;
        a[step][row / 2][row % 2 + 2 * half] =
            numbers_of<S>(word_of(loads[load], row), half, step, zeros, row);
      }
    }
  }
}

// d += a b of E4M3: where tensor cores have no such products, in two steps of two bytes of each word.
DEVICE void multiply_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (E4M3_CORES) {
    mma_e4m3(d, a, b);
  } else {
    auto wide = [](uint32_t word, int pair) {
      return SM < 89 ? bf16_of_fp8<e4m3>(high_bytes(word, pair)) : f16_of_e4m3(word, pair);
    };
    UNROLL
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t wide_a[4] = {wide(a[0], pair), wide(a[1], pair), wide(a[2], pair), wide(a[3], pair)};
      const uint32_t wide_b[2] = {wide(b[0], pair), wide(b[1], pair)};
      SM < 89 ? mma_bf16(d, wide_a, wide_b) : mma_f16(d, wide_a, wide_b);
    }
  }
}

template <Gemm S>
DEVICE void multiply(part_t<S> (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (S.format == Format::w8a8)
    mma_int8(d, a, b);
  else if constexpr (S.format == Format::fp8a8)
    multiply_e4m3(d, a, b);
  else
    mma_bf16(d, a, b);
}

// What a run's sums are scaled by.
struct RunScales {
  float of_row[4] = {1.0f, 1.0f, 1.0f, 1.0f};  // of this lane in a unit
  float of_token[2] = {1.0f, 1.0f};            // of this lane in a tile
};
template <Gemm S, class Weights>
DEVICE RunScales run_scales(int unit, int tile, int run, const Weights& weights, const float* x_scales) {
  RunScales scales;
  if constexpr (S.weight_groups()) {
    const uint8_t* of_rows = weights.scales(unit, run);
    if constexpr (Shape<S>::GROUP_SCALE_BYTES == 2) {
      Words2 words = *reinterpret_cast<const Words2*>(of_rows);
      scales.of_row[0] = low_bf16(words.x), scales.of_row[1] = high_bf16(words.x);
      scales.of_row[2] = low_bf16(words.y), scales.of_row[3] = high_bf16(words.y);
    } else {
      Words4 words = load16(of_rows);
      scales.of_row[0] = float_of_bits(words.x), scales.of_row[1] = float_of_bits(words.y);
      scales.of_row[2] = float_of_bits(words.z), scales.of_row[3] = float_of_bits(words.w);
    }
  }
  if constexpr (S.x_groups()) {
    int token = run * Shape<S>::TOKENS + tile * 8 + lane() % 4 * 2;
    scales.of_token[0] = x_scales[token], scales.of_token[1] = x_scales[token + 1];
  }
  return scales;
}

// total += a run's sums times its scales, for half a unit and a tile.
template <Gemm S>
DEVICE void add_run(sum_t<S> (&total)[4], const part_t<S> (&part)[4], int half, const RunScales& scales) {
  UNROLL
  for (int i = 0; i < 4; ++i) {
    float scale = scales.of_row[2 * half + i / 2] * scales.of_token[i % 2];
    total[i] = fma(static_cast<float>(part[i]), scale, total[i]);
  }
}

// total += weights of a chunk x its x, for a warp's units and tiles of 8 tokens. weights: gives
// load(unit, index), 16 bytes of this lane, and what belongs to its four rows of a unit in a run: where
// scales(unit, run) are, and zeros(unit, run). x, x_scales: of the warp's first token.
template <Gemm S, class Weights>
DEVICE void multiply_chunk(sum_t<S> (&total)[S.units][2][S.tiles][4], const Weights& weights,
                           const uint8_t* x, const float* x_scales) {
  using Of = Shape<S>;
  constexpr int RUN_STEPS = 2 * Of::PAIRS / Of::RUNS;
  constexpr int TURN_PAIRS = S.in_runs() && RUN_STEPS > 2 ? RUN_STEPS / 2 : 1;  // whose A are held at once
  constexpr int TURN_RUNS = S.in_runs() ? 2 * TURN_PAIRS / RUN_STEPS : 1;
  UNROLL_BY(S.units * S.tiles <= 2 ? 2 : 1)  // turns take registers from each other
  for (int turn = 0; turn < Of::PAIRS / TURN_PAIRS; ++turn) {
    uint32_t a[TURN_PAIRS][S.units][2][2][4];
    UNROLL
    for (int p = 0; p < TURN_PAIRS; ++p) {
      UNROLL
      for (int unit = 0; unit < S.units; ++unit) {
        Words4 loads[Of::PAIR_LOADS];
        UNROLL
        for (int i = 0; i < Of::PAIR_LOADS; ++i)
          loads[i] = weights.load(unit, (turn * TURN_PAIRS + p) * Of::PAIR_LOADS + i);
        weight_fragments<S>(a[p][unit], loads, weights.zeros(unit, turn * TURN_RUNS));
      }
    }
    UNROLL
    for (int tile = 0; tile < S.tiles; ++tile) {
      [[maybe_unused]] part_t<S> part[S.units][2][4] = {};
      uint32_t b[4];  // of two steps
      UNROLL
      for (int step = 0; step < 2 * TURN_PAIRS; ++step) {
        if (step % 2 == 0) x_fragments<S>(b, x + tile * 8 * Of::X_ROW_BYTES, turn * TURN_PAIRS + step / 2);
        const uint32_t b_step[2] = {b[step % 2 * 2], b[step % 2 * 2 + 1]};
        UNROLL
        for (int unit = 0; unit < S.units; ++unit) {
          UNROLL
          for (int half = 0; half < 2; ++half) {
            const uint32_t (&a_step)[4] = a[step / 2][unit][step % 2][half];
            if constexpr (S.in_runs())
              multiply<S>(part[unit][half], a_step, b_step);
            else
              multiply<S>(total[unit][half][tile], a_step, b_step);
          }
        }
        if constexpr (S.in_runs())
          if ((step + 1) % RUN_STEPS == 0) {
            UNROLL
            for (int unit = 0; unit < S.units; ++unit) {
              const RunScales scales =
                  run_scales<S>(unit, tile, turn * TURN_RUNS + step / RUN_STEPS, weights, x_scales);
              UNROLL
              for (int half = 0; half < 2; ++half) {
                add_run<S>(total[unit][half][tile], part[unit][half], half, scales);
                for (part_t<S>& sum : part[unit][half]) sum = 0;
              }
            }
          }
      }
    }
  }
}

}  // namespace enginewright
