// The types of numbers, with their bits. src/enginewright/dtypes.py says more of each; a test compares.
#pragma once

#include <cstdint>

#define ENGINEWRIGHT_DTYPES(DTYPE)       \
  DTYPE(f32, 32)                         \
  DTYPE(bf16, 16)                        \
  DTYPE(i32, 32)                         \
  DTYPE(i8, 8)                           \
  DTYPE(e4m3, 8) /* FP8, see codes.h */  \
  DTYPE(u4, 4)   /* codes of integers */ \
  DTYPE(e2m1, 4) /* codes of FP4 */

namespace enginewright {

#define ENGINEWRIGHT_NAME(name, bits) name,
enum class DType : uint8_t { ENGINEWRIGHT_DTYPES(ENGINEWRIGHT_NAME) };
#undef ENGINEWRIGHT_NAME

struct DTypeFacts {
  DType dtype;
  const char* name;
  int bits;
};
#define ENGINEWRIGHT_FACTS(name, bits) {DType::name, #name, bits},
constexpr DTypeFacts kDTypes[] = {ENGINEWRIGHT_DTYPES(ENGINEWRIGHT_FACTS)};  // in the order of DType
#undef ENGINEWRIGHT_FACTS

constexpr const DTypeFacts& facts_of(DType dtype) { return kDTypes[static_cast<int>(dtype)]; }

}  // namespace enginewright
