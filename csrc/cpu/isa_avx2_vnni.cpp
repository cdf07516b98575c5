// The kernels for AVX2 with AVX-VNNI.
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET "avx2,avxvnni,fma,f16c"
#include "isa_begin.h"
#include "simd_avx2_vnni.h"
#include "table.h"

namespace enginewright {

KernelTable avx2_vnni_table() { return make_table<Avx2Vnni>(fma_table<Avx2Vnni>()); }

}  // namespace enginewright

#include "isa_end.h"

#endif
