// The kernels for AVX-512 with VNNI, without its BF16 or where that is slower than FMAs (dispatch.cpp).
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma"
#include "isa_begin.h"
#include "simd_avx512.h"
#include "table.h"

namespace enginewright {

KernelTable avx512_vnni_table() { return make_table<Avx512Vnni>(fma_table<Avx512Vnni>()); }

}  // namespace enginewright

#include "isa_end.h"

#endif
