// A line in memory (kernel.h: Layout, CachePlane), of bf16 or of codes of 8 bits, as lines of bf16 pairs.
#pragma once

#include "kernel.h"
#include "simd_portable.h"

namespace enginewright {
namespace {

template <class S>
struct Bf16Lines {
  using Element = uint16_t;
  static constexpr int kPairs = 1;  // pairs of k in a line
  static ENGINEWRIGHT_INLINE void load(const void* p, typename S::Line* lines) { lines[0] = S::load_line(p); }
};

template <class S>
struct I8Lines {
  static constexpr DType kDType = DType::i8;
  static constexpr int kPairs = 2;
  static ENGINEWRIGHT_INLINE void load(const void* p, typename S::Line* lines) {
    S::expand_i8(p, lines[0], lines[1]);
  }
};

template <class S, class Code>
struct Fp8Lines {
  using Element = uint8_t;
  static constexpr DType kDType = Code::kDType;
  static constexpr int kPairs = 2;
  static ENGINEWRIGHT_INLINE void load(const void* p, typename S::Line* lines) {
    S::template expand_fp8<Code>(p, lines[0], lines[1]);
  }
};

}  // namespace
}  // namespace enginewright
