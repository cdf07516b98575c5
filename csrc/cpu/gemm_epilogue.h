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
  explicit Finish(const GemmOperands& gemm)
      : out_(gemm.out.data),
        stride_(gemm.out.stride),
        outputs_(gemm.outputs),
        pad_(gemm.out.pad),
        scale_(gemm.scale),
        bias_(gemm.bias),
        bf16_(gemm.out.dtype == DType::bf16),
        gated_(gemm.gated()),
        swish_(gemm.epilogue == Epilogue::swiglu) {}

  // 16 columns of out in one row, from the accumulators of block `unit`.
  ENGINEWRIGHT_INLINE void plain(int64_t row, int64_t unit, F acc) const {
    const int64_t n = columns_of(unit);
    store(row, unit, n, affine(acc, constants(unit * 16, n)));
  }

  // The same from those of a pair of blocks: act(gate) * up.
  ENGINEWRIGHT_INLINE void gated(int64_t row, int64_t unit, F gate, F up) const {
    const int64_t n = columns_of(unit);
    const F g = affine(gate, constants(unit * 16, n)), u = affine(up, constants(outputs_ + unit * 16, n));
    store(row, unit, n, S::mul(activation(g), u));
  }

  // Whether out has the accumulators of blocks up to this one as they are.
  bool is_copy(int64_t last_unit) const {
    return !bf16_ && !gated_ && scale_ == nullptr && bias_ == nullptr && last_unit * 16 + 16 <= outputs_;
  }

  // `rows` rows of them, from accumulators in memory: acc, gate, up: (rows, 16).
  void plain_rows(int64_t row, int64_t rows, int64_t unit, const float* acc) const {
    const int64_t n = columns_of(unit);
    const Constants c = constants(unit * 16, n);
    for (int64_t m = 0; m < rows; ++m) store(row + m, unit, n, affine(S::load(acc + 16 * m), c));
  }
  void gated_rows(int64_t row, int64_t rows, int64_t unit, const float* gate, const float* up) const {
    const int64_t n = columns_of(unit);
    const Constants gate_constants = constants(unit * 16, n),
                    up_constants = constants(outputs_ + unit * 16, n);
    for (int64_t m = 0; m < rows; ++m) {
      const F g = affine(S::load(gate + 16 * m), gate_constants),
              u = affine(S::load(up + 16 * m), up_constants);
      store(row + m, unit, n, S::mul(activation(g), u));
    }
  }

  // `rows` rows of the columns that blocks [block, block + count) of weight make. acc: (count, rows, 16)
  // Out of line, since it is called once a tile: one copy for tiles of all sizes.
  __attribute__((noinline)) void blocks(int64_t row, int64_t rows, int64_t block, int64_t count,
                                        const float* acc) const {
    if (gated_) {
      for (int64_t n = 0; n < count; n += 2, acc += 2 * rows * 16) {
        gated_rows(row, rows, (block + n) / 2, acc, acc + rows * 16);
      }
    } else {
      for (int64_t n = 0; n < count; ++n, acc += rows * 16) plain_rows(row, rows, block + n, acc);
    }
  }

 private:
  struct Constants {
    F scale, bias;
  };

  ENGINEWRIGHT_INLINE int64_t columns_of(int64_t unit) const {
    const int64_t left = outputs_ - unit * 16;
    return left < 16 ? left : 16;
  }

  ENGINEWRIGHT_INLINE Constants constants(int64_t first, int64_t n) const {
    Constants c{S::zero(), S::zero()};
    if (scale_ != nullptr) c.scale = n == 16 ? S::load(scale_ + first) : S::load_first(scale_ + first, n);
    if (bias_ != nullptr) c.bias = n == 16 ? S::load(bias_ + first) : S::load_first(bias_ + first, n);
    return c;
  }

  ENGINEWRIGHT_INLINE F affine(F acc, const Constants& c) const {
    if (scale_ != nullptr) acc = S::mul(acc, c.scale);
    return bias_ != nullptr ? S::add(acc, c.bias) : acc;
  }

  ENGINEWRIGHT_INLINE F activation(F x) const { return swish_ ? silu<S>(x) : gelu_tanh<S>(x); }

  // n: columns of the unit that are in out.
  ENGINEWRIGHT_INLINE void store(int64_t row, int64_t unit, int64_t n, F value) const {
    const int64_t at = row * stride_ + unit * 16;
    if (!bf16_) {
      float* out = reinterpret_cast<float*>(out_) + at;
      if (n == 16) {
        S::store(out, value);
      } else {
        S::store_first(out, value, n);
      }
      return;
    }
    uint16_t* out = reinterpret_cast<uint16_t*>(out_) + at;
    if (n == 16) {
      S::store_bf16(out, value);
    } else {
      S::store_bf16_first(out, value, n);
    }
    if (unit * 16 + n == outputs_) {  // zeros that the next GEMM reads
      for (int64_t i = n; i < n + pad_; ++i) out[i] = 0;
    }
  }

  std::byte* const out_;
  const int64_t stride_, outputs_, pad_;
  const float *const scale_, *const bias_;  // null: none
  const bool bf16_, gated_, swish_;
};

}  // namespace
}  // namespace enginewright
