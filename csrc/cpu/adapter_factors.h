// How the matrices of adapters are read (adapters.h), 16 numbers at a time.
#pragma once

#include "adapters.h"
#include "simd_portable.h"

namespace enginewright {
namespace {

template <class S>
struct Bf16Factor {
  using Element = uint16_t;
  static ENGINEWRIGHT_INLINE typename S::F load(const Element* p) { return S::load_bf16(p); }
};

template <class S>
struct Int8Factor {
  using Element = int8_t;
  static ENGINEWRIGHT_INLINE typename S::F load(const Element* p) { return S::to_float(S::widen_i8(p)); }
};

// Calls use(Bf16Factor or Int8Factor, pointer to number `index` of the matrix).
template <class S, class Use>
ENGINEWRIGHT_INLINE void with_factor(const FactorMatrix& matrix, int64_t index, const Use& use) {
  if (matrix.scale == nullptr) {
    use(Bf16Factor<S>(), reinterpret_cast<const uint16_t*>(matrix.data) + index);
  } else {
    use(Int8Factor<S>(), reinterpret_cast<const int8_t*>(matrix.data) + index);
  }
}

}  // namespace
}  // namespace enginewright
