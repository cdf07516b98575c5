// What is between this and isa_end.h is compiled for the instruction sets that ENGINEWRIGHT_TARGET names, in
// files that define it; all that others share is included before.
//
// Every std header comes before the target pragma: inline functions of the library are shared between object
// files, and one that was compiled for AVX-512 must not be the one that the linker keeps.
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

#include "adapters.h"
#include "dispatch.h"
#include "gemm_operands.h"
#include "operands.h"

#define ENGINEWRIGHT_PRAGMA(...) ENGINEWRIGHT_PRAGMA_OF(__VA_ARGS__)
#define ENGINEWRIGHT_PRAGMA_OF(...) _Pragma(#__VA_ARGS__)

#if defined(__clang__)
ENGINEWRIGHT_PRAGMA(clang attribute push(__attribute__((target(ENGINEWRIGHT_TARGET))), apply_to = function))
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC's own intrinsics (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
ENGINEWRIGHT_PRAGMA(GCC target(ENGINEWRIGHT_TARGET))
#endif
