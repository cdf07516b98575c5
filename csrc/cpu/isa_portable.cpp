// The kernels in portable C++, for any machine.
#if !defined(__clang__)
#pragma GCC optimize("O2")  // O3 makes this table a sixth larger, for machines that are older than AVX2
#endif

#define ENGINEWRIGHT_MATH \
  ENGINEWRIGHT_ONCE  // loops over arrays of numbers, which are long where they are inlined

#include "dispatch.h"
#include "table.h"

namespace enginewright {

KernelTable portable_table() { return make_table<Portable>(product_table<Portable>()); }

}  // namespace enginewright
