// The kernels for AVX2 with AVX-VNNI. Those without products of int8 are those of AVX2.
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET "avx2,avxvnni,fma,f16c"
#include "isa_begin.h"
#include "simd_avx2_vnni.h"

// After it, since they use Avx2Vnni.
#include "attention.h"
#include "attention_fma.h"
#include "gemm_a8.h"
#include "gemm_kernel.h"

namespace enginewright {

KernelTable avx2_vnni_table() {
  KernelTable table = avx2_table();
  table["gemm_mxfp4a8@1"] = make_gemm<GemmMxfp4A8<Avx2Vnni>>;
  table["gemm_w4a8@1"] = make_gemm<GemmW4A8<Avx2Vnni>>;
  table["gemm_w8a8@1"] = make_gemm<GemmW8A8<Avx2Vnni>>;
  table["latent_attention@1"] = make_latent_attention<Avx2Vnni, FmaSplits<Avx2Vnni>>;
  table["paged_attention@1"] = make_attention<Avx2Vnni, FmaSplits<Avx2Vnni>>;
  return table;
}

}  // namespace enginewright

#include "isa_end.h"

#endif
