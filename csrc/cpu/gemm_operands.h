// What all GEMMs check and know of their operands.
//
//   gemm_bf16@1   x: bf16 [M, K], weight: bf16 r16 [N, K], out: f32 or bf16 [M, N]; bias?: f32 [N]
//   gemm_w8a16@1  the same with weight: i8, scale: f32 [N]
//   gemm_fp8a16@1 the same with weight: e4m3, scale: f32 [N]
//   gemm_w8a8@1   the same with x: i8 and weight: i8, x_scale: f32 [M, 1], scale: f32 [N]
//
// out = (x · weightᵀ) * x_scale * scale + bias, from left to right in fp32. Products are summed in fp32, but
// in int32 where x is i8, exactly, since codes are in [-127, 127] and K is at most 2^17. With a gated
// epilogue ("swiglu", "geglu") weight is r16_pairs [2F, K], gate rows and up rows, scale and bias have 2F,
// and out [M, F] = act(gate) * up.
#pragma once

#include "kernel.h"

namespace enginewright {

enum class Epilogue : uint8_t { none, swiglu, geglu };

struct GemmOperands {
  GemmOperands(const Operands& operands, const Attributes& attributes, DType x_dtype, DType weight_dtype);

  Operand x, weight, out;
  Epilogue epilogue = Epilogue::none;
  const float* x_scale = nullptr;  // null: 1
  int64_t x_scale_stride = 0;      // from one token to the next
  const float* scale = nullptr;    // null: 1
  const float* bias = nullptr;     // null: 0
  int64_t k_pad = 0;               // columns of x and weight that are read
  int64_t outputs = 0;             // columns of out
  int64_t unit_blocks = 1;         // 16-row blocks of weight that make 16 columns of out: 2 if gated
  int64_t units = 0;               // those of out, the last one perhaps partly outside
  int64_t block_bytes = 0;         // of weight

  bool gated() const { return unit_blocks == 2; }
  // `operations`: those of Work that products of x and weight are.
  Work work(const Sizes& sizes, int64_t Work::* operations) const;
  const std::byte* block(int64_t index) const { return weight.data + index * block_bytes; }
};

}  // namespace enginewright
