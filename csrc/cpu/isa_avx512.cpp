// The kernels for AVX-512.
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma"
#include "isa_begin.h"
#include "simd_avx512_bf16.h"
#include "table.h"

namespace enginewright {

KernelTable avx512_table() { return make_table<Avx512>(product_table<Avx512>()); }

}  // namespace enginewright

#include "isa_end.h"

#endif
