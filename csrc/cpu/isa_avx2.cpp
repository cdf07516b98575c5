// The kernels for AVX2.
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET "avx2,fma,f16c"
#include "isa_begin.h"
#include "simd_avx2.h"
#include "table.h"

namespace enginewright {

KernelTable avx2_table() { return make_table<Avx2>(fma_table<Avx2>()); }

}  // namespace enginewright

#include "isa_end.h"

#endif
