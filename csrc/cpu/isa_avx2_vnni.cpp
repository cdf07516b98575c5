// The kernels for AVX2 with AVX-VNNI. Std headers first: see isa_avx512.cpp.
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
#include "gemm_operands.h"
#include "operands.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,avxvnni,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,avxvnni,fma,f16c")
#endif

#include "simd_avx2_vnni.h"
#include "table.h"

namespace enginewright {

KernelTable avx2_vnni_table() { return make_table<Avx2Vnni>(fma_table<Avx2Vnni>()); }

}  // namespace enginewright

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif
