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
        x_scale_(gemm.x_scale),
        x_scale_stride_(gemm.x_scale_stride),
        scale_(gemm.scale),
        bias_(gemm.bias),
        bf16_(gemm.out.dtype == DType::bf16),
        gated_(gemm.gated()),
        wide_(gemm.outputs >= kWide && !bf16_ && gemm.out.stride % 16 == 0 &&
              reinterpret_cast<uintptr_t>(out_) % 64 == 0),
        swish_(gemm.epilogue == Epilogue::swiglu),
        clamped_(gemm.epilogue == Epilogue::swiglu_clamped),
        adapters_(gemm.adapters != nullptr && gemm.adapters->changes(gemm.site) ? gemm.adapters : nullptr),
        slots_(adapters_ == nullptr     ? nullptr
               : gemm.starts != nullptr ? adapters_->expert_rows().slots() + gemm.first_row
                                        : adapters_->rows(gemm.has_logit_rows).slots()),
        site_(gemm.site),
        expert_(gemm.expert),
        delta_(gemm.delta),
        delta_stride_(gemm.delta_stride) {}

  // 16 columns of out in one row, from the accumulators of block `unit`.
  ENGINEWRIGHT_INLINE void plain(int64_t row, int64_t unit, F acc) const {
    const int64_t n = columns_of(unit);
    store(row, unit, n, one(acc, constants(unit * 16, n), row, unit * 16, n));
  }

  // The same from those of a pair of blocks: act(gate) * up.
  ENGINEWRIGHT_INLINE void gated(int64_t row, int64_t unit, F gate, F up) const {
    const int64_t n = columns_of(unit);
    const F g = one(gate, constants(unit * 16, n), row, unit * 16, n),
            u = one(up, constants(outputs_ + unit * 16, n), row, outputs_ + unit * 16, n);
    store(row, unit, n, gate_times_up(g, u));
  }

  // Whether out has the accumulators of blocks up to this one as they are.
  bool is_copy(int64_t last_unit) const {
    return !bf16_ && !gated_ && x_scale_ == nullptr && scale_ == nullptr && bias_ == nullptr &&
           adapters_ == nullptr && last_unit * 16 + 16 <= outputs_;
  }

  // `rows` rows of the columns that blocks [block, block + count) of weight make. acc: (count, rows, 16) of
  // float or int32, a block every block_stride of them. Out of line, since it is called once a tile: one copy
  // for tiles of all sizes.
  template <class Acc>
  ENGINEWRIGHT_ONCE void blocks(int64_t row, int64_t rows, int64_t block, int64_t count, const Acc* acc,
                                int64_t block_stride) const {
    // Two copies, so that steps without adapters run the code that they always have.
    if (adapters_ == nullptr) {
      each_block<false>(row, rows, block, count, acc, block_stride);
    } else {
      each_block<true>(row, rows, block, count, acc, block_stride);
    }
  }

 private:
  // Logits of many tokens are more than caches keep until they are read: they leave the place to weights.
  static constexpr int64_t kWide = 1 << 14;  // outputs
  static constexpr int64_t kKept = 12;       // rows; with 8 in all it made no difference, with 16 it did

  struct Constants {
    F scale, bias;
  };

  template <bool kAdapted, class Acc>
  ENGINEWRIGHT_INLINE void each_block(int64_t row, int64_t rows, int64_t block, int64_t count, const Acc* acc,
                                      int64_t block_stride) const {
    if (gated_) {
      for (int64_t n = 0; n < count; n += 2, acc += 2 * block_stride) {
        gated_rows<kAdapted>(row, rows, (block + n) / 2, acc, acc + block_stride);
      }
    } else {
      for (int64_t n = 0; n < count; ++n, acc += block_stride) {
        if (wide_ && row >= kKept && columns_of(block + n) == 16) {
          stream_rows<kAdapted>(row, rows, block + n, acc);
        } else {
          plain_rows<kAdapted>(row, rows, block + n, acc);
        }
      }
    }
  }
  template <bool kAdapted, class Acc>
  void plain_rows(int64_t row, int64_t rows, int64_t unit, const Acc* acc) const {
    const int64_t n = columns_of(unit);
    const Constants c = constants(unit * 16, n);
    for (int64_t m = row; m < row + rows; ++m, acc += 16) {
      store(m, unit, n, affine<kAdapted>(sums(acc, m), c, m, unit * 16, n));
    }
  }
  template <bool kAdapted, class Acc>
  void stream_rows(int64_t row, int64_t rows, int64_t unit, const Acc* acc) const {
    const Constants c = constants(unit * 16, 16);
    float* out = reinterpret_cast<float*>(out_) + row * stride_ + unit * 16;
    for (int64_t m = row; m < row + rows; ++m, acc += 16, out += stride_) {
      S::stream(out, affine<kAdapted>(sums(acc, m), c, m, unit * 16, 16));
    }
  }
  template <bool kAdapted, class Acc>
  void gated_rows(int64_t row, int64_t rows, int64_t unit, const Acc* gate, const Acc* up) const {
    const int64_t n = columns_of(unit);
    const Constants gate_constants = constants(unit * 16, n),
                    up_constants = constants(outputs_ + unit * 16, n);
    for (int64_t m = row; m < row + rows; ++m, gate += 16, up += 16) {
      const F g = affine<kAdapted>(sums(gate, m), gate_constants, m, unit * 16, n),
              u = affine<kAdapted>(sums(up, m), up_constants, m, outputs_ + unit * 16, n);
      store(m, unit, n, gate_times_up(g, u));
    }
  }

  ENGINEWRIGHT_INLINE F sums(const float* acc, int64_t) const { return S::load(acc); }
  ENGINEWRIGHT_INLINE F sums(const int32_t* acc, int64_t row) const {
    return S::mul(S::to_float(S::load_i(acc)), S::set1(x_scale_[row * x_scale_stride_]));
  }

  ENGINEWRIGHT_INLINE int64_t columns_of(int64_t unit) const {
    const int64_t left = outputs_ - unit * 16;
    return left < 16 ? left : 16;
  }

  ENGINEWRIGHT_INLINE Constants constants(int64_t first, int64_t n) const {
    Constants c{S::zero(), S::zero()};
    if (scale_ != nullptr) c.scale = load(scale_ + first, n);
    if (bias_ != nullptr) c.bias = load(bias_ + first, n);
    return c;
  }
  static ENGINEWRIGHT_INLINE F load(const float* from, int64_t n) {
    return n == 16 ? S::load(from) : S::load_first(from, n);
  }

  // first: row of the weight that the first of n columns belongs to.
  template <bool kAdapted>
  ENGINEWRIGHT_INLINE F affine(F acc, const Constants& c, int64_t row, int64_t first, int64_t n) const {
    if (scale_ != nullptr) acc = S::mul(acc, c.scale);
    if (kAdapted) return adapted(acc, c, row, first, n);
    return bias_ != nullptr ? S::add(acc, c.bias) : acc;
  }
  ENGINEWRIGHT_INLINE F adapted(F acc, const Constants& c, int64_t row, int64_t first, int64_t n) const {
    const int32_t slot = slots_[row];
    const SiteAdapter* change = slot < 0 ? nullptr : &adapters_->at(site_, slot);
    if (change != nullptr && change->gain != nullptr) acc = S::mul(acc, load(change->gain + first, n));
    if (bias_ != nullptr) acc = S::add(acc, c.bias);
    if (change == nullptr || change->matrix_of(expert_) < 0) return acc;
    return S::add(acc, load(delta_ + row * delta_stride_ + first, n));
  }
  // For 16 accumulators alone: out of line with adapters, for the same reason as in blocks().
  ENGINEWRIGHT_INLINE F one(F acc, const Constants& c, int64_t row, int64_t first, int64_t n) const {
    return adapters_ == nullptr ? affine<false>(acc, c, row, first, n) : one_adapted(acc, c, row, first, n);
  }
  ENGINEWRIGHT_ONCE F one_adapted(F acc, const Constants& c, int64_t row, int64_t first, int64_t n) const {
    return affine<true>(acc, c, row, first, n);
  }

  ENGINEWRIGHT_INLINE F gate_times_up(F gate, F up) const {
    if (clamped_) return clamped_swiglu(gate, up);
    return S::mul(swish_ ? silu<S>(gate) : gelu_tanh<S>(gate), up);
  }
  // (up + 1) g / (1 + e^-1.702 g), g at most 7 and up in ±7; NaN stays NaN.
  static F clamped_swiglu(F gate, F up) {
    const F one = S::set1(1.0f), g = S::min(S::set1(7.0f), gate);
    const F u = S::max(S::set1(-7.0f), S::min(S::set1(7.0f), up));
    const F active = S::div(g, S::add(one, exp<S>(S::mul(S::set1(-1.702f), g))));
    return S::mul(S::add(u, one), active);
  }

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
  const float* const x_scale_;  // null: 1
  const int64_t x_scale_stride_;
  const float *const scale_, *const bias_;  // null: none
  const bool bf16_, gated_, wide_, swish_, clamped_;
  const Adapters* const adapters_;  // null: no row of this step has one
  const int32_t* const slots_;      // of rows
  const int64_t site_, expert_;
  const float* const delta_;
  const int64_t delta_stride_;
};

}  // namespace
}  // namespace enginewright
