// The kernels for AVX-512 with VNNI, without its BF16 or where that is slower than FMAs (dispatch.cpp). Std
// headers first: see isa_avx512.cpp.
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
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma"))), \
                             apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC's own intrinsics (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma")
#endif

#include "simd_avx512.h"
#include "table.h"

namespace enginewright {

KernelTable avx512_vnni_table() { return make_table<Avx512Vnni>(fma_table<Avx512Vnni>()); }

}  // namespace enginewright

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
