// The kernels for AVX-512.
//
// Every std header comes before the target pragma: inline functions of the library are shared between object
// files, and one that was compiled for AVX-512 must not be the one that the linker keeps.
#if defined(__x86_64__)

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "dispatch.h"
#include "operands.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                           \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC's own intrinsics (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma")
#endif

#include "simd_avx512_bf16.h"
#include "table.h"

namespace enginewright {

KernelTable avx512_table() { return make_table<Avx512>(product_table<Avx512>()); }

}  // namespace enginewright

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
