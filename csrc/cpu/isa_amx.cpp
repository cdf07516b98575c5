// The kernels for AVX-512 with GEMMs on AMX tiles.
#if defined(__x86_64__)

#define ENGINEWRIGHT_TARGET \
  "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma,amx-tile,amx-bf16,amx-int8"
#include "isa_begin.h"
#include "simd_avx512_bf16.h"

// After it, since they use Avx512.
#include "attention.h"
#include "attention_amx.h"
#include "attention_amx_i8.h"
#include "gemm_amx.h"
#include "gemm_amx_a8.h"
#include "head_gemm.h"
#include "isa_end.h"

namespace enginewright {
namespace {

struct AmxSplits : DotSplits<Avx512> {
  using Bf16 = AmxSplitAttention;
  using I8 = AmxSplitAttentionI8;
};

}  // namespace

KernelTable amx_table() {
  KernelTable table = avx512_table();
  table["gemm_bf16@1"] = make_gemm<GemmBf16Amx>;
  table["gemm_fp8a16@1"] = make_fp8a16_amx;
  table["gemm_mxfp4a8@1"] = make_gemm<GemmA8Amx<E2m1Codes<Avx512>>>;
  table["gemm_w4a8@1"] = make_gemm<GemmA8Amx<U4Codes<Avx512>>>;
  table["gemm_w8a16@1"] = make_gemm<GemmW8A16Amx>;
  table["gemm_w8a8@1"] = make_w8a8_amx;
  table["head_gemm_bf16@1"] = make_kernel<HeadGemm<GemmBf16Amx>>;
  table["latent_attention@1"] = make_latent_attention<Avx512, AmxSplits>;
  table["paged_attention@1"] = make_attention<Avx512, AmxSplits>;
  return table;
}

}  // namespace enginewright

#endif
