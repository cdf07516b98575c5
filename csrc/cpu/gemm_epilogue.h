// What happens to 16 accumulators of a GEMM on their way to memory.
#pragma once

#include "gemm_operands.h"
#include "simd_math.h"

namespace enginewright {
namespace {

template <class S>
class Finish {
 public:
  using F = typename S::F;
  explicit Finish(const GemmOperands& gemm) : g_(gemm) {}

  // 16 columns of out in one row, from the accumulators of block `unit`.
  ENGINEWRIGHT_INLINE void plain(int64_t row, int64_t unit, F acc) const {
    store(row, unit, affine(acc, unit * 16, columns_of(unit)));
  }

  // The same from those of a pair of blocks: act(gate) * up.
  ENGINEWRIGHT_INLINE void gated(int64_t row, int64_t unit, F gate, F up) const {
    const int64_t n = columns_of(unit);
    gate = affine(gate, unit * 16, n);
    gate = g_.epilogue == Epilogue::swiglu ? silu<S>(gate) : gelu_tanh<S>(gate);
    store(row, unit, S::mul(gate, affine(up, g_.outputs + unit * 16, n)));
  }

 private:
  ENGINEWRIGHT_INLINE int64_t columns_of(int64_t unit) const {
    const int64_t left = g_.outputs - unit * 16;
    return left < 16 ? left : 16;
  }

  ENGINEWRIGHT_INLINE void store(int64_t row, int64_t unit, F value) const {
    const int64_t n = columns_of(unit), at = row * g_.out.stride + unit * 16;
    if (g_.out.dtype == DType::f32) {
      float* out = g_.out.as<float>() + at;
      if (n == 16) {
        S::store(out, value);
      } else {
        S::store_first(out, value, n);
      }
      return;
    }
    uint16_t* out = g_.out.as<uint16_t>() + at;
    if (n == 16) {
      S::store_bf16(out, value);
    } else {
      S::store_bf16_first(out, value, n);
    }
    if (unit == g_.units - 1) {  // zeros that the next GEMM reads
      for (int64_t i = n; i < n + g_.out.pad; ++i) out[i] = 0;
    }
  }

  ENGINEWRIGHT_INLINE F affine(F acc, int64_t first, int64_t n) const {
    if (n == 16) {
      if (g_.scale != nullptr) acc = S::mul(acc, S::load(g_.scale + first));
      return g_.bias != nullptr ? S::add(acc, S::load(g_.bias + first)) : acc;
    }
    if (g_.scale != nullptr) acc = S::mul(acc, S::load_first(g_.scale + first, n));
    return g_.bias != nullptr ? S::add(acc, S::load_first(g_.bias + first, n)) : acc;
  }

  const GemmOperands& g_;
};

}  // namespace
}  // namespace enginewright
