// Every kernel of the CPU target: one line each.
#pragma once

#include "adapter_delta.h"
#include "adapter_embed.h"
#include "attention.h"
#include "attention_fma.h"
#include "causal_conv.h"
#include "elementwise.h"
#include "embed.h"
#include "experts.h"
#include "gather_columns.h"
#include "gemm.h"
#include "gemm_a8.h"
#include "gemm_fma.h"
#include "gemm_kernel.h"
#include "head_adapters.h"
#include "head_gemm.h"
#include "kernel.h"
#include "latent_write.h"
#include "linear_recurrence.h"
#include "mean_rows.h"
#include "norm.h"
#include "quantize.h"
#include "rope.h"

namespace enginewright {
namespace {

// Those that are made of dot products; an instruction set may have its own instead.
template <class S>
KernelTable product_table() {
  return {
      {"gemm_bf16@1", make_gemm<GemmBf16<S>>},
      {"gemm_fp8a16@1", make_gemm<GemmFp8A16<S>>},
      {"gemm_w8a16@1", make_gemm<GemmW8A16<S>>},
      {"head_gemm_bf16@1", make_kernel<HeadGemm<GemmBf16<S>>>},
      {"latent_attention@1", make_latent_attention<S>},
      {"paged_attention@1", make_attention<S>},
  };
}

// The same by fp32 FMAs, where there is no good dot product of bf16.
template <class S>
KernelTable fma_table() {
  return {
      {"gemm_bf16@1", make_gemm<GemmFma<S, Bf16Floats<S>>>},
      {"gemm_fp8a16@1", make_gemm<GemmFma<S, Fp8Floats<S, E4m3>>>},
      {"gemm_w8a16@1", make_gemm<GemmFma<S, I8Floats<S>>>},
      {"head_gemm_bf16@1", make_kernel<HeadGemm<GemmFma<S, Bf16Floats<S>>>>},
      {"latent_attention@1", make_latent_attention<S, FmaSplits<S>>},
      {"paged_attention@1", make_attention<S, FmaSplits<S>>},
  };
}

// `table` and all others.
template <class S>
KernelTable make_table(KernelTable table) {
  table.insert({
      {"activation@1", make_kernel<Activation<S>>},
      {"adapter_delta@1", make_kernel<AdapterDelta<S>>},
      {"adapter_embed@1", make_adapter_embed},
      {"adapter_rows@1", make_kernel<GroupAdapterRows>},
      {"add@1", make_kernel<Add<S>>},
      {"add_rms_norm@1", make_kernel<AddRmsNorm<S>>},
      {"cast@1", make_kernel<Cast<S>>},
      {"causal_conv@1", make_kernel<CausalConv<S>>},
      {"combine_experts@1", make_kernel<CombineExperts<S>>},
      {"embed_bf16@1", make_kernel<EmbedBf16<S>>},
      {"embed_w8@1", make_kernel<EmbedW8<S>>},
      {"gated_delta@1", make_kernel<LinearRecurrence<S, true>>},
      {"gated_rms_norm@1", make_kernel<GatedRmsNorm<S>>},
      {"gather_columns@1", make_kernel<GatherColumns<S>>},
      {"gather_rows@1", make_kernel<GatherRows<S>>},
      {"gemm_mxfp4a8@1", make_gemm<GemmMxfp4A8<S>>},
      {"gemm_w4a8@1", make_gemm<GemmW4A8<S>>},
      {"gemm_w8a8@1", make_gemm<GemmW8A8<S>>},
      {"head_adapter_delta@1", make_kernel<HeadAdapterDelta<S>>},
      {"latent_write@1", make_kernel<LatentWrite<S>>},
      {"layer_norm@1", make_kernel<LayerNorm<S>>},
      {"mean_rows@1", make_kernel<MeanRows<S>>},
      {"position_scale@1", make_kernel<PositionScale<S>>},
      {"quantize_rows@1", make_kernel<QuantizeRows<S>>},
      {"rms_norm@1", make_kernel<RmsNorm<S>>},
      {"rope@1", make_kernel<Rope<S>>},
      {"rope_queries@1", make_kernel<RopeQueries<S>>},
      {"rope_kv_write@1", make_kernel<RopeKvWrite<S>>},
      {"rope_table@1", make_kernel<RopeTable<S>>},
      {"route@1", make_kernel<Route<S>>},
      {"selective_state@1", make_kernel<LinearRecurrence<S, false>>},
      {"scale@1", make_kernel<Scale<S>>},
      {"softcap@1", make_kernel<Softcap<S>>},
      {"sort_rows@1", make_kernel<SortRows<S>>},
  });
  return table;
}

}  // namespace
}  // namespace enginewright
