// The kernels for AVX-512 with GEMMs on AMX tiles. Std headers first: see isa_avx512.cpp.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "dispatch.h"
#include "gemm_operands.h"
#include "operands.h"

#if defined(__clang__)
#pragma clang attribute push(                                                                                    \
    __attribute__((target(                                                                                       \
        "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma,amx-tile,amx-bf16,amx-int8"))), \
    apply_to = function)
#else
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false, in GCC's own intrinsics (its bug 105593)
#pragma GCC diagnostic ignored "-Wuninitialized"        // the same
#pragma GCC push_options
#pragma GCC target( \
    "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vnni,avx512bf16,fma,amx-tile,amx-bf16,amx-int8")
#endif

#include "simd_avx512_bf16.h"

// Behind it, since it uses Avx512.
#include "attention.h"
#include "attention_amx.h"
#include "gemm_amx.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace enginewright {

// Linux gives a process its tile registers on request (Documentation/arch/x86/xstate.rst).
bool amx_allowed() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

KernelTable amx_table() {
  KernelTable table = avx512_table();
  table["gemm_bf16@1"] = make_kernel<GemmBf16Amx>;
  table["gemm_fp8a16@1"] = make_fp8a16_amx;
  table["gemm_w8a16@1"] = make_kernel<GemmW8A16Amx>;
  table["gemm_w8a8@1"] = make_w8a8_amx;
  table["paged_attention@1"] = make_attention<Avx512, AmxSplitAttention>;
  return table;
}

}  // namespace enginewright

#endif
