// Every kernel of the CPU target: one line each.
#pragma once

#include "elementwise.h"
#include "embed.h"
#include "gemm.h"
#include "kernel.h"
#include "norm.h"
#if __has_include("attention.h")
#include "attention.h"
#endif
#if __has_include("rope.h")
#include "rope.h"
#endif

namespace enginewright {
namespace {

template <class S>
KernelTable make_table() {
  return {
      {"add@1", make_kernel<Add<S>>},
      {"add_rms_norm@1", make_kernel<AddRmsNorm<S>>},
      {"cast@1", make_kernel<Cast<S>>},
      {"embed_bf16@1", make_kernel<EmbedBf16<S>>},
      {"embed_w8@1", make_kernel<EmbedW8<S>>},
      {"gather_rows@1", make_kernel<GatherRows<S>>},
      {"gemm_bf16@1", make_kernel<GemmBf16<S>>},
      {"gemm_w8a16@1", make_kernel<GemmW8A16<S>>},
      {"rms_norm@1", make_kernel<RmsNorm<S>>},
      {"softcap@1", make_kernel<Softcap<S>>},
      // rope.h and attention.h: {"rope_table@1", make_kernel<RopeTable<S>>},
      // {"rope_kv_write@1", make_kernel<RopeKvWrite<S>>}, {"paged_attention@1", make_kernel<PagedAttention<S>>},
  };
}

}  // namespace
}  // namespace enginewright
