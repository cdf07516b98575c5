// Rows of f32 or bf16, 16 columns at a time.
#pragma once

#include "kernel.h"
#include "simd_portable.h"

namespace enginewright {
namespace {

template <class S>
class RowReader {
 public:
  using F = typename S::F;
  RowReader(const Operand& x, int64_t row) : bf16_(x.dtype == DType::bf16) {
    if (bf16_) {
      half_ = x.as<const uint16_t>() + row * x.stride;
    } else {
      full_ = x.as<const float>() + row * x.stride;
    }
  }
  explicit RowReader(const uint16_t* bf16) : bf16_(true), half_(bf16) {}
  explicit RowReader(const float* row) : bf16_(false), full_(row) {}
  ENGINEWRIGHT_INLINE F at(int64_t column) const {
    return bf16_ ? S::load_bf16(half_ + column) : S::load(full_ + column);
  }
  ENGINEWRIGHT_INLINE F first(int64_t column, int64_t n) const {  // n < 16 columns, zeros after them
    return bf16_ ? S::load_bf16_first(half_ + column, n) : S::load_first(full_ + column, n);
  }

 private:
  const bool bf16_;
  const uint16_t* half_ = nullptr;
  const float* full_ = nullptr;
};

template <class S>
class RowWriter {
 public:
  using F = typename S::F;
  RowWriter(const Operand& out, int64_t row) : bf16_(out.dtype == DType::bf16) {
    if (bf16_) {
      half_ = out.as<uint16_t>() + row * out.stride;
    } else {
      full_ = out.as<float>() + row * out.stride;
    }
  }
  ENGINEWRIGHT_INLINE void put(int64_t column, F value) const {
    if (bf16_) {
      S::store_bf16(half_ + column, value);
    } else {
      S::store(full_ + column, value);
    }
  }
  ENGINEWRIGHT_INLINE void put_first(int64_t column, F value, int64_t n) const {
    if (bf16_) {
      S::store_bf16_first(half_ + column, value, n);
    } else {
      S::store_first(full_ + column, value, n);
    }
  }
  // The zeros that GEMMs read after a bf16 row.
  ENGINEWRIGHT_INLINE void zero_pad(const Operand& out) const {
    if (bf16_) std::memset(half_ + out.columns, 0, static_cast<size_t>(out.pad) * 2);
  }

 private:
  const bool bf16_;
  uint16_t* half_ = nullptr;
  float* full_ = nullptr;
};

}  // namespace
}  // namespace enginewright
